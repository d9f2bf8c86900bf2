"""`init --from` and `init --data`: runs on a pretrained model and on a data set; what is none is said in one line."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from swarmnode.app.cli.init import command
from swarmnode.app.local.run_folder import check_run
from swarmnode.base.errors import DataError, SwarmnodeError, UsageError
from swarmnode.data.base_index import local_base, parse_base
from swarmnode.run.manifest.folder import read_manifest
from tests.support.data_sets import data_set
from tests.support.published_model import llama
from tests.support.web_folder import web_folder


def run(*arguments: str) -> str:
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_run_from_a_folder(tmp_path: Path) -> None:
    llama(tmp_path / "model", shard="40KB")
    place = "hf://me/model@0123abc"
    said = run(str(tmp_path / "run"), "--from", str(tmp_path / "model"), "--samples", "9000", "--base-location", place)
    assert str(tmp_path / "run" / "base") in said
    made = read_manifest(tmp_path / "run" / "manifest.toml")
    assert (made.name, made.base.locations, made.data.tokenizer) == ("model", (place,), "base/tokenizer.json")
    assert (made.model.layers, made.model.width, made.model.context, made.inner.decay_samples) == (3, 32, 64, 9000)
    base = tmp_path / "run" / "base"
    index = parse_base((base / "base.json").read_bytes(), bytes.fromhex(made.base.index))
    assert len(index.files) > 1 and all((base / file.name).is_symlink() for file in index.files)
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= {path.name for path in base.iterdir()}
    assert 0 < made.inner.warmup_samples <= 900, "the rate re-warms"
    fresh = tmp_path / "fresh"
    run(str(fresh), "--parameters", "200000", "--samples", "9000")
    assert made.inner.learning_rate < 0.5 * read_manifest(fresh / "manifest.toml").inner.learning_rate


def test_a_run_from_a_place_on_the_web_stores_no_weights(tmp_path: Path) -> None:
    llama(tmp_path / "model", shard="40KB")
    with web_folder(tmp_path) as (url, asked):
        run(str(tmp_path / "run"), "--from", f"{url}/model")
    made = read_manifest(tmp_path / "run" / "manifest.toml")
    assert made.base.locations == (f"{url}/model",)
    assert not list((tmp_path / "run" / "base").glob("*.safetensors"))
    here = run(str(tmp_path / "same"), "--from", str(tmp_path / "model"))
    assert here and read_manifest(tmp_path / "same" / "manifest.toml").base.index == made.base.index
    weights = sum(nbytes for name, nbytes in asked if name.endswith(".safetensors"))
    assert weights <= sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors")), "read once"


def test_one_file_counts_where_an_index_of_former_shards_lies_beside_it(tmp_path: Path) -> None:
    """`save_pretrained` into a folder of shards deletes these and leaves their index (transformers 5.23.0), and
    `from_pretrained` takes the one file."""
    llama(tmp_path / "model", shard="20KB", dtype=torch.float16)
    llama(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    llama(tmp_path / "fresh")
    run(str(tmp_path / "run"), "--from", str(tmp_path / "model"))
    run(str(tmp_path / "other"), "--from", str(tmp_path / "fresh"))
    bases = [read_manifest(tmp_path / name / "manifest.toml").base.index for name in ("run", "other")]
    assert bases[0] == bases[1]


def changed(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def header(path: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    """Rewrite the header of a safetensors file, with the same numbers behind it."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    tree = json.loads(raw[8 : 8 + size])
    change(tree)
    made = json.dumps(tree).encode()
    path.write_bytes(struct.pack("<Q", len(made)) + made + raw[8 + size :])


def shards(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    path = folder / "model.safetensors.index.json"
    tree = json.loads(path.read_text())
    change(tree["weight_map"])
    path.write_text(json.dumps(tree))


DOWN = "model.layers.0.mlp.down_proj.weight"
WRONG: list[tuple[Callable[[Path], object], str]] = [
    (lambda m: (m / "config.json").unlink(), "no config.json"),
    (lambda m: (m / "config.json").write_text("{"), "not JSON"),
    (lambda m: changed(m, model_type="mamba2"), "mamba2"),
    (lambda m: changed(m, intermediate_size=64), "not of one model"),
    (lambda m: changed(m, num_hidden_layers=4), "hold no tensor model.layers.3"),
    (lambda m: changed(m, num_hidden_layers=10**9), "num_hidden_layers = 1000000000: allowed is"),
    (lambda m: changed(m, vocab_size=1 << 40), "vocab_size"),
    (lambda m: changed(m, vocab_size=100), "another model's tokenizer"),
    (lambda m: changed(m, hidden_size="32"), "hidden_size"),
    (lambda m: changed(m, hidden_act="gelu"), "hidden_act"),
    (lambda m: (m / "tokenizer.json").unlink(), "no tokenizer.json"),
    (lambda m: (m / "tokenizer.json").write_text("[]"), "tokenizer.json"),
    (lambda m: (m / "model-00002-of-00004.safetensors").unlink(), "model-00002-of-00004.safetensors: no such file"),
    (lambda m: (m / "model-00002-of-00004.safetensors").write_bytes(b"short"), "no safetensors file"),
    (lambda m: (m / "model-00002-of-00004.safetensors").write_bytes(b"\xff" * 99), "a header of"),
    (lambda m: (m / "model-00002-of-00004.safetensors").write_bytes(struct.pack("<Q", 90) + b"{"), "cut off"),
    (lambda m: cut(m / "model-00002-of-00004.safetensors"), "cut off"),
    (lambda m: header(m / "model-00002-of-00004.safetensors", lambda h: h[DOWN].update(dtype="F8_E4M3")), "F8_E4M3"),
    (lambda m: header(m / "model-00002-of-00004.safetensors", lambda h: h[DOWN].update(shape=[1 << 40])), "damaged"),
    (lambda m: header(m / "model-00002-of-00004.safetensors", lambda h: h[DOWN].update(data_offsets=[-8, 0])), "dam"),
    (lambda m: header(m / "model-00002-of-00004.safetensors", overlap), "overlap"),
    (lambda m: shards(m, lambda w: w.update({DOWN: "../../etc/passwd"})), "no name of a file"),
    (lambda m: shards(m, lambda w: w.update({DOWN: "model-00001-of-00004.safetensors"})), "does not hold it"),
]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def overlap(tree: dict[str, dict[str, object]]) -> None:
    names = [name for name in tree if name.endswith("input_layernorm.weight")]
    other = next(name for name in tree if name.endswith("post_attention_layernorm.weight"))
    tree[other] = tree[names[0]] | {"data_offsets": [int(at) + 4 for at in tree[names[0]]["data_offsets"]]}  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "model"
    llama(folder, shard="40KB")
    return folder


@pytest.mark.parametrize(("break_it", "says"), WRONG)
def test_a_model_that_is_none_is_said_in_one_line(
    tmp_path: Path, model: Path, break_it: Callable[[Path], object], says: str
) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for path in model.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    break_it(broken)
    with pytest.raises(SwarmnodeError) as found:
        run(str(tmp_path / "run"), "--from", str(broken))
    assert says in str(found.value) and "\n" not in str(found.value) and len(str(found.value)) < 400
    assert not (tmp_path / "run").exists(), "nothing is left of what was refused"


def test_a_data_set_of_another_tokenizer_and_other_misuse(tmp_path: Path, model: Path) -> None:
    data_set(tmp_path / "set")
    with pytest.raises(DataError, match="another tokenizer"):
        run(str(tmp_path / "a"), "--from", str(model), "--data", str(tmp_path / "set"))
    for wrong in (
        ["--from", str(model), "--parameters", "1000000"],
        ["--untie"],
        ["--base-location", "https://example.org/x"],
    ):
        assert CliRunner().invoke(command, [str(tmp_path / "b"), *wrong]).exit_code == 2
    for wrong in (
        ["--from", str(tmp_path / "none")],
        ["--from", "file:///etc"],
        ["--from", "hf://datasets/me/text"],
        ["--from", str(model), "--context", "65"],
        ["--from", str(model), "--base-location", "hf://datasets/me/text"],
    ):
        with pytest.raises(SwarmnodeError):
            run(str(tmp_path / "c"), *wrong)
    assert not any((tmp_path / name).exists() for name in "abc")


def test_up_stops_where_the_base_model_is_not_to_be_had(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "run"
    run(str(folder), "--from", str(model))
    cache = tmp_path / "cache"
    index = local_base(folder / "base", bytes.fromhex(read_manifest(folder / "manifest.toml").base.index))
    assert index is not None
    link = folder / "base" / index.files[1].name
    real = link.readlink()
    link.unlink()
    with pytest.raises(DataError, match="missing"):
        check_run(folder, None, None, cache, "")
    link.write_bytes(real.read_bytes()[:-500])
    with pytest.raises(DataError, match="cut off"):
        check_run(folder, None, None, cache, "")
    (folder / "base" / "base.json").unlink()
    with pytest.raises(DataError, match="does not hold it"):
        check_run(folder, None, None, cache, "")


def test_a_tied_model_stays_tied_unless_it_is_to_be_untied(tmp_path: Path) -> None:
    llama(tmp_path / "model")
    adapt = ("--from", str(tmp_path / "model"), "--kind", "adapters")
    for name, tied, arguments in (
        ("kept", True, adapt),
        ("untied", False, (*adapt, "--untie")),
        ("trained", True, adapt[:2]),
        ("trained apart", False, (*adapt[:2], "--untie")),
    ):
        run(str(tmp_path / name), *arguments)
        made = read_manifest(tmp_path / name / "manifest.toml")
        assert (made.model.tied, made.pipeline.stages) == (tied, 3), name


def test_the_kind_of_training_sets_what_suits_it(tmp_path: Path) -> None:
    llama(tmp_path / "model", tied=False, shard="5GB")
    run(str(tmp_path / "plain"), "--from", str(tmp_path / "model"))
    run(str(tmp_path / "lora"), "--from", str(tmp_path / "model"), "--kind", "adapters")
    plain, adapters = (read_manifest(tmp_path / name / "manifest.toml") for name in ("plain", "lora"))
    assert (plain.training.kind, adapters.training.kind) == ("pretrain", "adapters")
    assert adapters.inner.optimizer == "adamw" and adapters.inner.weight_decay == 0.0
    assert adapters.inner.learning_rate > plain.inner.learning_rate and adapters.base == plain.base
    failed = CliRunner().invoke(command, [str(tmp_path / "new"), "--kind", "adapters"])
    assert failed.exit_code == 2 and "--kind, --base-location and --untie belong to --from MODEL" in failed.output
    failed = CliRunner().invoke(command, [str(tmp_path / "one"), "--from", "model.gguf"])
    assert isinstance(failed.exception, UsageError) and "made of; docs" in str(failed.exception)
    failed = CliRunner().invoke(
        command, [str(tmp_path / "chat"), "--from", str(tmp_path / "model"), "--kind", "finetune"]
    )
    assert failed.exit_code == 2 and "--kind finetune needs --data OUT" in failed.output


def test_a_run_on_a_data_set(tmp_path: Path) -> None:
    index = data_set(tmp_path / "set")
    place = "https://example.org/set"
    said = run(str(tmp_path / "run"), "--preset", "tiny", "--data", str(tmp_path / "set"), "--location", place)
    assert str(tmp_path / "run" / "data") in said
    made = read_manifest(tmp_path / "run" / "manifest.toml")
    assert (made.data.source, made.data.index, made.data.locations) == ("index", index.digest.hex(), (place,))
    assert (made.data.end_token, made.data.tokenizer, made.model.vocabulary) == (0, "bytes", 256)
    assert (tmp_path / "run" / "data" / "index.json").samefile(tmp_path / "set" / "index.json")
    assert not made.data.names_files, "no machine needs files of its own"


def test_a_bad_data_set_or_place_is_reported(tmp_path: Path) -> None:
    data_set(tmp_path / "set")
    with pytest.raises(DataError, match=f"data make OUT --from {tmp_path}` makes"):
        run(str(tmp_path / "a"), "--data", str(tmp_path))
    with pytest.raises(DataError, match=r"none: no such folder: .*data make"):
        run(str(tmp_path / "a"), "--data", str(tmp_path / "none"))
    for wrong in ("file:///etc", "http://user@host/x", "set"):
        with pytest.raises(UsageError, match="allowed is"):
            run(str(tmp_path / "b"), "--data", str(tmp_path / "set"), "--location", wrong)
    alone = CliRunner().invoke(command, [str(tmp_path / "c"), "--location", "https://example.org/x"])
    assert alone.exit_code == 2 and "give both" in alone.output
    assert not any((tmp_path / name).exists() for name in "abc"), "nothing is left of what was refused"
    (tmp_path / "set" / "index.json").write_text("{}")
    with pytest.raises(DataError, match="index.json"):
        run(str(tmp_path / "d"), "--data", str(tmp_path / "set"))
