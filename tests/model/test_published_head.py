"""The head of a published model: tied or not as transformers settles it from config.json and files, with its logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from swarmnode.app.cli.init import command
from swarmnode.app.local.pretrained import Pretrained
from swarmnode.base.errors import DataError
from swarmnode.data.base_index import ITEMSIZES
from swarmnode.model.export_tokenizer import byte_tokenizer
from swarmnode.model.split import HEAD, TABLE
from swarmnode.model.text_generation import whole_model
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.folder import read_manifest
from tests.support.published_model import VOCABULARY, start_from

DEFAULTS = {"llama": False, "smollm3": True}
"""Families, and whether a config.json without tie_word_embeddings ties them."""
FILES = ("both alike", "both apart", "table alone", "head alone", "neither")
STORES = ("one file", "shards")
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def published(folder: Path, family: str, tied: bool | None, files: str, store: str, dtype: str = "F32") -> None:
    """A random model of `family`: `tied` by config.json (None: not said), with these ends in its files."""
    import transformers

    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    tensors = {name: value.to(DTYPES[dtype]).clone() for name, value in model.state_dict().items()}
    if files == "both alike":
        tensors[HEAD] = tensors[TABLE].clone()
    for name, kept in ((TABLE, ("head alone", "neither")), (HEAD, ("table alone", "neither"))):
        if files in kept:
            del tensors[name]
    config.save_pretrained(folder)
    tree = json.loads((folder / "config.json").read_text())
    tree |= {"architectures": [type(model).__name__], "dtype": str(DTYPES[dtype]).removeprefix("torch.")}
    del tree["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(tree if tied is None else {**tree, "tie_word_embeddings": tied}))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    stored(folder, tensors, store)


def stored(folder: Path, tensors: dict[str, torch.Tensor], store: str) -> None:
    if store == "one file":
        safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    where = {name: f"model-{1 + number % 3:05}-of-00003.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in sorted(set(where.values())):
        held = {name: value for name, value in tensors.items() if where[name] == file}
        safetensors.torch.save_file(held, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def read_back(folder: Path, made: Pretrained) -> dict[str, torch.Tensor]:
    """The parameters of the run, from the places that its base index names."""
    found = {}
    for name, tensor in made.index.tensors.items():
        raw = (folder / made.index.files[tensor.file].name).read_bytes()
        nbytes = tensor.elements * ITEMSIZES[tensor.dtype]
        part = bytearray(raw[tensor.offset : tensor.offset + nbytes])
        found[name] = torch.frombuffer(part, dtype=DTYPES[tensor.dtype]).reshape(tensor.shape).float()
    return found


@pytest.mark.parametrize("store", [STORES[0], pytest.param(STORES[1], marks=pytest.mark.nightly)])
@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("tied", [True, False, None])
@pytest.mark.parametrize("family", ["llama", pytest.param("smollm3", marks=pytest.mark.nightly)])
def test_a_run_begins_with_the_logits_of_transformers(
    tmp_path: Path, family: str, tied: bool | None, files: str, store: str
) -> None:
    import transformers

    published(tmp_path, family, tied, files, store)
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    says_tied = DEFAULTS[family] if tied is None else tied
    if loading["missing_keys"]:  # transformers draws them at random, and warns
        assert files == "neither" or (not says_tied and files in ("table alone", "head alone"))
        with pytest.raises(DataError, match=r"hold no tensor (lm_head|model\.embed_tokens)\.weight"):
            start_from(tmp_path, Manifest())
        return
    made = start_from(tmp_path, Manifest())
    model = made.recipe.manifest.model
    assert model.tied == (theirs.lm_head.weight is theirs.model.embed_tokens.weight)
    assert bool(made.told) == (says_tied and files in ("both apart", "head alone"))
    if made.told:
        assert HEAD in made.told and made.told in made.recipe.origins["model.tied"]
    tokens = torch.randint(VOCABULARY, (2, 12))
    with torch.no_grad():
        ours = whole_model(model, read_back(tmp_path, made))(tokens)
        torch.testing.assert_close(ours, theirs(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("files", ["both alike", "both apart", "head alone"])
def test_heads_are_compared_in_every_format(tmp_path: Path, files: str, dtype: str) -> None:
    published(tmp_path, "llama", True, files, "one file", dtype)
    made = start_from(tmp_path, Manifest())
    assert made.recipe.manifest.model.tied == (files != "both apart")
    ends = safetensors.torch.load_file(tmp_path / "model.safetensors")
    found = read_back(tmp_path, made)
    assert torch.equal(found[TABLE], ends[HEAD if files == "head alone" else TABLE].float())


def test_a_model_saved_without_its_head_is_read(tmp_path: Path) -> None:
    import transformers

    published(tmp_path, "llama", True, "table alone", "one file")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    theirs.model.save_pretrained(tmp_path)
    tree = json.loads((tmp_path / "config.json").read_text())
    assert tree["architectures"] == ["LlamaModel"]
    assert "embed_tokens.weight" in safetensors.torch.load_file(tmp_path / "model.safetensors")
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"]
    made = start_from(tmp_path, Manifest())
    found = read_back(tmp_path, made)
    assert made.recipe.manifest.model.tied
    assert all(torch.equal(found[name], value) for name, value in again.state_dict().items() if name in found)


def test_init_says_how_the_head_is_settled_and_untie_copies_it(tmp_path: Path) -> None:
    def begun(files: str, *more: str) -> tuple[str, bool, Any]:
        model = tmp_path / files
        run = tmp_path / f"run {len(list(tmp_path.iterdir()))}"
        if not model.exists():
            model.mkdir()
            published(model, "smollm3", None, files, "one file")
        done = CliRunner().invoke(command, [str(run), "--from", str(model), *more], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        tensors = json.loads((run / "base" / "base.json").read_text())["tensors"]
        return done.stderr, read_manifest(run / "manifest.toml").model.tied, tensors

    said, tied, tensors = begun("both apart")
    assert "the files hold another lm_head.weight: it stays a matrix of its own, as in transformers" in said
    assert not tied and tensors[HEAD]["pieces"] != tensors[TABLE]["pieces"]
    said, tied, tensors = begun("head alone")
    assert "the files hold lm_head.weight alone, which is the token table, too" in said
    assert tied and HEAD not in tensors
    said, tied, tensors = begun("head alone", "--untie")
    assert not tied and tensors[HEAD]["pieces"] == tensors[TABLE]["pieces"]
    said, tied, tensors = begun("both alike")
    assert "lm_head" not in said and tied


def test_weights_in_pickles_are_refused_with_what_to_do(tmp_path: Path) -> None:
    published(tmp_path, "llama", False, "both apart", "one file")
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"pytorch_model.bin: weights in a pickle, .*save_pretrained"):
        start_from(tmp_path, Manifest())
