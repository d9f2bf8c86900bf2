"""`export`, `eval` and `generate` on what a small run has left behind."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import tokenizers
import torch
from tokenizers import decoders, normalizers

from swarmnode.app.cli.main import main
from swarmnode.app.cli.schema import schema_of
from swarmnode.app.local.text_pieces import pieces
from swarmnode.data.tokens import ByteTokenizer, HuggingFaceTokenizer, huggingface_tokenizer
from swarmnode.model.export import read_tensors
from swarmnode.run import manifest as manifests
from swarmnode.run.manifest.folder import SIGNED_FILE
from tests.support.left_session import AGE, RUN, left_session
from tests.support.tiny_model import TINY


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return left_session(tmp_path_factory.mktemp("run"))


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Iterator[object]:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        out, error = capsys.readouterr()
        return code, out, error

    yield run


def test_export_gives_transformers_the_same_logits(session: Path, tmp_path: Path, said) -> None:  # type: ignore[no-untyped-def]
    transformers = pytest.importorskip("transformers")
    from swarmnode.app.local.model_source import gather
    from swarmnode.model.gather import merged
    from swarmnode.model.text_generation import whole_model

    for kind in ("stages", "checkpoint"):
        out = tmp_path / kind
        code, text, _ = said("export", str(session), "--out", str(out), "--from", kind, "--json")
        jsonschema.validate(json.loads(text), schema_of("export"))
        assert code == 0 and json.loads(text)["replicas"] == (2 if kind == "stages" else 1)
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        ids = tokenizer("the quick", return_tensors="pt")["input_ids"][0].tolist()
        assert ids == list(b"the quick")
        found, _ = gather(str(session), kind, lambda line: None)
        with torch.no_grad():
            ours = whole_model(found.manifest.model, merged(found))(torch.tensor([ids]))[0, -1]
            theirs = transformers.AutoModelForCausalLM.from_pretrained(out)(torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_eval_tells_the_mean_from_the_replicas(session: Path, tmp_path: Path, said) -> None:  # type: ignore[no-untyped-def]
    cache = ["--cache", str(tmp_path / "cache"), "--json"]
    code, text, error = said("eval", str(session), "--last", *cache)
    assert code == 0, error
    found = json.loads(text)
    jsonschema.validate(found, schema_of("eval"))
    assert found["kind"] == "saved stages" and found["samples"] == 512 and found["tokens"] == 8 * TINY.context
    assert len(found["replicas"]) == 2 and found["spread"] > 0
    losses = [row["loss"] for row in found["replicas"]]
    assert min(losses) - 0.5 < found["merged"]["loss"] < max(losses) + 0.5
    code, text, _ = said("eval", str(session / "checkpoints"), "--data", str(session.parent), *cache)
    kept = json.loads(text)
    assert kept["kind"] == "checkpoint round-000000005" and kept["replicas"] == [] and kept["samples"] == 640
    assert kept["merged"]["loss"] == pytest.approx(losses[1]), "the checkpoint is the second replica's"
    said("export", str(session), "--last", "--out", str(tmp_path / "model"))
    code, text, error = said("eval", str(tmp_path / "model"), "--data", str(session.parent), *cache)
    assert json.loads(text)["merged"]["loss"] == pytest.approx(found["merged"]["loss"], abs=1e-5), error


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    return read_tensors(model / "model.safetensors")


def test_export_takes_running_means_and_last_weights_when_asked(  # type: ignore[no-untyped-def]
    session: Path, tmp_path: Path, said, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[tuple[object, ...]] = []

    def push_folder(*given: object) -> str:
        pushed.append(given)
        return "https://hub/1"

    monkeypatch.setattr("swarmnode.app.machine.hub.push_folder", push_folder)
    code, text, error = said(
        "export", str(session), "--out", str(tmp_path / "mean"), "--push-to-hub", "ada/left", "--json"
    )
    told = json.loads(text)
    assert code == 0 and told["hub"] == "https://hub/1" and "pushed: https://hub/1" in error
    message = f"round {told['round']}, {told['samples']} samples"
    assert pushed == [(tmp_path / "mean", "ada/left", f"round-{told['round']}", message)]
    assert f"| samples, tokens | {told['samples']}," in (tmp_path / "mean" / "README.md").read_text()
    assert said("export", str(session), "--out", str(tmp_path / "last"), "--last")[0] == 0
    last = tensors_of(tmp_path / "last")
    for name, value in tensors_of(tmp_path / "mean").items():
        torch.testing.assert_close(value, AGE * last[name])


def test_export_averages_the_newest_checkpoints(session: Path, tmp_path: Path, said) -> None:  # type: ignore[no-untyped-def]
    """Of round 5, and of round 3 with three times its weights."""
    place = str(session / "checkpoints")
    made = {}
    for count in ("1", "2", "9"):
        code, text, error = said("export", place, "--out", str(tmp_path / count), "--average", count, "--json")
        assert code == 0, error
        assert json.loads(text)["replicas"] == 1 and json.loads(text)["samples"] == 640
        assert ("only 2 of 9 checkpoints are usable" in error) == (count == "9")
        made[count] = tensors_of(tmp_path / count)
    for name, newest in made["1"].items():
        torch.testing.assert_close(made["2"][name], 2.0 * newest)
        assert torch.equal(made["2"][name], made["9"][name])
    code, text, _ = said("export", str(session), "--out", str(tmp_path / "session"), "--average", "2", "--json")
    assert json.loads(text)["kind"] == "checkpoint round-000000005 averaged with 1 before it"
    code, _, error = said("export", place, "--out", str(tmp_path / "none"), "--average", "2", "--from", "stages")
    assert code == 2 and "--average only works for checkpoints" in error


def test_generate_says_the_same_for_the_same_seed(session: Path, said) -> None:  # type: ignore[no-untyped-def]
    ask = ["generate", str(session), "--prompt", "the ", "--tokens", "12"]
    texts = [said(*ask, "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("the ")
    code, text, _ = said(*ask, "--json", "--seed", "1")
    jsonschema.validate(json.loads(text), schema_of("generate"))
    assert code == 0 and json.loads(text)["text"] + "\n" == texts[0]


def test_a_missing_stage_comes_from_the_checkpoint_or_is_named(session: Path, tmp_path: Path, said) -> None:  # type: ignore[no-untyped-def]
    import shutil

    copy = tmp_path / "up-1"
    shutil.copytree(session, copy)
    for path in copy.rglob("saved/*/*/stage-1.json"):
        path.unlink()
    code, text, error = said("export", str(copy), "--out", str(tmp_path / "model"), "--json")
    assert code == 0 and json.loads(text)["kind"].startswith("checkpoint") and "looking for a checkpoint" in error
    shutil.rmtree(copy / "checkpoints")
    for source, kind, words in (
        (copy, "auto", "a model needs a replica of each of its stages"),
        (copy, "checkpoint", "no checkpoint"),
        (tmp_path / "nowhere", "auto", "no such folder"),
        (tmp_path / "model", "stages", "no saved stage"),
    ):
        code, _, error = said("export", str(source), "--out", str(tmp_path / "x"), "--from", kind)
        assert code != 0 and words in error and "Traceback" not in error, error
    assert not (tmp_path / "x").exists()


def test_characters_are_said_whole() -> None:
    text = "naïve 中文 \N{SNOWMAN} end"
    whole = list(pieces(ByteTokenizer(), iter(text.encode())))
    assert "".join(whole) == text and all("\ufffd" not in piece for piece in whole)
    broken = list(pieces(ByteTokenizer(), iter(b"a\xff\xfeb")))
    assert "".join(broken) == b"a\xff\xfeb".decode(errors="replace")


def llama_2() -> HuggingFaceTokenizer:
    """A tokenizer whose decoder drops a first space, as Llama 2's and Mistral's do (tokenizers 0.23.3)."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, show_progress=False)
    inner.train_from_iterator("a small boat went down the river".split(), trainer)
    return huggingface_tokenizer(inner.to_str().encode(), "tokenizer.json")


def test_a_continuation_keeps_the_space_before_it() -> None:
    tokenizer = llama_2()
    prompt = "a small boat"
    whole = "a small boat went down the river"
    ids = tokenizer.encode(whole).tolist()
    first = tokenizer.encode(prompt).size
    assert tokenizer.decode(ids[first:]) == "went down the river", "this is why"
    assert prompt + "".join(pieces(tokenizer, iter(ids[first:]), prompt)) == whole
    assert "".join(pieces(tokenizer, iter(ids))) == whole


def of_stranger(session: Path, where: Path, tokenizer: str) -> Path:
    """An exported model as somebody else may have put it on the net: its manifest names `tokenizer`."""
    run = replace(RUN, data=replace(RUN.data, tokenizer=tokenizer))
    assert main(["export", str(session), "--out", str(where)]) == 0
    for made in (SIGNED_FILE, "tokenizer.json"):
        (where / made).unlink(missing_ok=True)
    (where / "manifest.toml").write_text(manifests.template(run))
    return where


def test_a_model_of_a_stranger_takes_no_file_of_ours_along(session: Path, tmp_path: Path, said) -> None:  # type: ignore[no-untyped-def]
    """A tokenizer is copied into what is exported, which people publish."""
    (tmp_path / "secret.json").write_text('{"api_key": "of this user"}')
    (tmp_path / "home").mkdir()
    theirs = of_stranger(session, tmp_path / "home" / "theirs", "secret.json")
    out = tmp_path / "out"
    for path in ("secret.json", str(tmp_path / "secret.json"), "../../secret.json"):
        run = replace(RUN, data=replace(RUN.data, tokenizer=path))
        (theirs / "manifest.toml").write_text(manifests.template(run))
        code, _, error = said("export", str(theirs), "--out", str(out))
        assert code == 78, error
    (theirs / "manifest.toml").write_text(
        manifests.template(replace(RUN, data=replace(RUN.data, tokenizer="link.json")))
    )
    (theirs / "link.json").symlink_to(tmp_path / "secret.json")
    for verb in (["export", str(theirs), "--out", str(out)], ["generate", str(theirs), "--prompt", "a"]):
        code, _, error = said(*verb)
        assert code == 77 and "symbolic link" in error, error
    (theirs / "link.json").unlink()
    (theirs / "link.json").write_text((tmp_path / "secret.json").read_text())
    code, _, error = said("export", str(theirs), "--out", str(out))
    assert code == 78 and "not a Hugging Face tokenizer.json" in error
    assert not any("of this user" in path.read_text(errors="replace") for path in tmp_path.glob("out/*"))
