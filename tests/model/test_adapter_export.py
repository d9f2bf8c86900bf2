"""A run's adapters as others read them: merged into the base for transformers, or by themselves for peft."""

from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.app.local.evaluation import export_model
from swarmnode.app.local.pretrained import lay_out
from swarmnode.base.errors import DataError, UsageError
from swarmnode.model.adapter import trained_count
from swarmnode.model.export import stage_state_dict, write_adapter, write_model
from swarmnode.model.frozen import held, whole_weights
from swarmnode.model.split import initial, parameter_shapes, split
from swarmnode.model.stage import StageReplica
from swarmnode.model.text_generation import whole_model
from swarmnode.run.manifest import Manifest, ModelSpec, TrainingSpec, template
from swarmnode.run.manifest.folder import MANIFEST_FILE
from tests.support.published_model import llama, start_from
from tests.support.saved_stage import save_left
from tests.support.tiny_model import TINY, manifest, stages_of, token_batch, train_on

pytestmark = pytest.mark.node  # seconds to import transformers

MODEL = replace(TINY, width=64, ffn=128, vocabulary=256)
WHOLE = split(MODEL, 1)[0]


def saved(folder: Path, model: ModelSpec = MODEL, **training: object) -> tuple[Manifest, dict[str, Tensor]]:
    """A run whose nodes have saved the stages that they trained, and its adapters."""
    run = manifest(model, optimizer="adamw", average_share=0.0)
    run = replace(run, training=replace(TrainingSpec(kind="adapters", rank=4), **training))  # type: ignore[arg-type]
    chain = stages_of(run)
    found = {}
    for step in range(4):
        train_on(chain, token_batch(MODEL, seed=step))
        for stage in chain:
            stage.step(8 * (step + 1))
    for stage in chain:
        save_left(folder, stage.part.stage, stage_state_dict(stage))
        found |= stage_state_dict(stage)
    (folder / MANIFEST_FILE).write_text(template(run))
    return run, found


def base(run: Manifest) -> dict[str, Tensor]:
    shapes = parameter_shapes(MODEL, WHOLE)
    return {name: held(run, name, initial(MODEL, run.seed, name, shape)) for name, shape in shapes.items()}


@pytest.mark.parametrize(("kind", "tied"), [("bf16", True), ("nf4", False)])
def test_merged_adapters_load_in_transformers_with_the_same_logits(tmp_path: Path, kind: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    run, adapters = saved(tmp_path, replace(MODEL, tied=tied), base_format=kind)
    export_model(str(tmp_path), tmp_path / "out", "auto", lambda text: None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = token_batch(MODEL)
    (stage,) = stages_of(replace(run, pipeline=replace(run.pipeline, stages=1)))
    for name, view in stage.named(stage.theta).items():
        view.copy_(adapters[name])
    with torch.no_grad():
        ours = F.linear(stage.module.hidden(tokens[:, :-1]), stage.module.head.float())
        torch.testing.assert_close(ours, theirs(tokens[:, :-1]).logits, rtol=0, atol=1e-5)
    again = export_model(str(tmp_path / "out"), tmp_path / "again", "auto", lambda text: None)
    assert again["parameters"] == split(run.model, 1)[0].parameters and again["kind"] == "export"
    assert theirs.config.tie_word_embeddings == tied
    assert ("lm_head.weight" in safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")) != tied


def test_peft_loads_an_adapter_folder_with_the_same_logits(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    run, adapters = saved(tmp_path, targets=("q_proj", "v_proj", "up_proj"))
    done = export_model(str(tmp_path), tmp_path / "adapter", "auto", lambda text: None, adapter=True)
    assert done["parameters"] == trained_count(run, WHOLE) < WHOLE.parameters / 5
    write_model(base(run), run, tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    ours = whole_model(MODEL, whole_weights(run, adapters, None))
    tokens = token_batch(MODEL)
    with torch.no_grad():
        found = theirs(tokens[:, :-1]).logits
        torch.testing.assert_close(ours(tokens[:, :-1]), found, rtol=0, atol=1e-5)
        with theirs.disable_adapter():
            assert not torch.allclose(theirs(tokens[:, :-1]).logits, found, atol=1e-2)


def test_an_adapter_folder_names_its_base_model_on_the_hub(tmp_path: Path) -> None:
    """peft's `AutoPeftModelForCausalLM` fetches the base by this name and revision (peft 0.21.2), and the hub shows
    the adapter beside it."""
    peft = pytest.importorskip("peft")
    run, adapters = saved(tmp_path)
    mirror = "https://models.example.org/me"
    for locations, name, revision in (
        ((mirror, "hf://me/small@0a1b"), "me/small", "0a1b"),
        (("hf://me/small",), "me/small", None),
        ((mirror, "hf://me/all/small"), None, None),
    ):
        based = replace(run, base=replace(run.base, locations=locations))
        write_adapter(adapters, based, tmp_path / "adapter")
        read = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
        assert (read.base_model_name_or_path, read.revision) == (name, revision)
        card = (tmp_path / "adapter" / "README.md").read_text()
        assert "library_name: peft\n" in card and (f"base_model: {name}\n" in card) == (name is not None)


def test_adapters_are_merged_into_the_base_model_of_the_run(tmp_path: Path) -> None:
    """The base by content in the run's folder, not what the seed would give; a damaged or missing one is one line."""
    model = llama(tmp_path / "model", tied=True, shard="40KB")
    made = start_from(tmp_path / "model", manifest())
    place = lay_out(tmp_path / "run", made)
    spec = TrainingSpec(kind="adapters", rank=4, base_format="fp32")
    run = made.recipe.manifest
    inner = replace(run.inner, optimizer="adamw", average_share=0.0)
    run = replace(run, training=spec, inner=inner, pipeline=replace(run.pipeline, stages=1))
    (tmp_path / "run" / MANIFEST_FILE).write_text(template(run))
    adapters = stage_state_dict(StageReplica(run, 0))
    adapters["model.layers.1.mlp.up_proj.lora_B"] += 0.5
    save_left(tmp_path / "run", 0, adapters)
    export_model(str(tmp_path / "run"), tmp_path / "out", "auto", lambda text: None)
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    change = 8.0 * adapters["model.layers.1.mlp.up_proj.lora_B"] @ adapters["model.layers.1.mlp.up_proj.lora_A"]
    for name, value in model.state_dict().items():
        if name in found:
            wanted = value + change if name == "model.layers.1.mlp.up_proj.weight" else value
            torch.testing.assert_close(found[name], wanted)
    assert "model.layers.1.mlp.up_proj.weight" in found

    with pytest.raises(DataError, match="adapters of base model [0-9a-f]{16}..., which is not in"):
        (place / "base.json").rename(tmp_path / "base.json")
        export_model(str(tmp_path / "run"), tmp_path / "again", "auto", lambda text: None)
    (tmp_path / "base.json").rename(place / "base.json")
    weights = sorted((tmp_path / "model").glob("*.safetensors"))[0]
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(DataError, match="not the run's base model from byte"):
        export_model(str(tmp_path / "run"), tmp_path / "again", "auto", lambda text: None)


def test_an_adapter_folder_is_only_made_of_adapters(tmp_path: Path) -> None:
    saved(tmp_path)
    export_model(str(tmp_path), tmp_path / "out", "auto", lambda text: None)
    with pytest.raises(UsageError, match="--adapter: .* holds a whole model; give the folder of a run that trains"):
        export_model(str(tmp_path / "out"), tmp_path / "adapter", "auto", lambda text: None, adapter=True)
