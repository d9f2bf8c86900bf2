"""What [evaluation] of a manifest lists, measured by `eval --all`, and a conversation with a model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from swarmnode.app.cli.main import cli, main
from swarmnode.app.local.evaluation import read_text
from swarmnode.base.errors import DataError, NotPermitted
from swarmnode.data.root import DataRoot
from swarmnode.keep.recovery.archive import Scores
from swarmnode.model.export import write_model
from swarmnode.model.stage import StageReplica
from swarmnode.run.manifest import EvaluationSpec, Manifest, PipelineSpec
from tests.support.tiny_model import TINY

PROMPTS = ("the quick", "a dog")
RUN = Manifest(
    name="scored",
    model=replace(TINY, vocabulary=256),
    pipeline=PipelineSpec(stages=1, validation_samples=8),
    evaluation=EvaluationSpec(sets=("other.txt", "absent.txt"), prompts=PROMPTS, prompt_tokens=5),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported model of random weights, with a text beside it."""
    folder = tmp_path_factory.mktemp("scored")
    (folder / "other.txt").write_text("pack my box with five dozen liquor jugs. " * 30)
    replica = StageReplica(RUN, 0)
    write_model(replica.named(replica.theta), RUN, folder)
    return folder


def plain_loss(folder: Path, text: bytes) -> float:
    """Nats per token by transformers, in windows of the context that follow each other."""
    transformers = pytest.importorskip("transformers")
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor(list(text))
    context = RUN.model.context
    total = 0.0
    with torch.no_grad():
        for at in range(0, len(ids) - 1, context):
            piece = ids[at : at + context + 1]
            logits = whole(piece[None, :-1]).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, piece[1:], reduction="sum"))
    return total / (len(ids) - 1)


def test_eval_all_measures_each_text_and_continues_each_prompt(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(model), "--all", "--json", "--cache", str(model / "cache")]) == 0
    told = json.loads(capsys.readouterr().out)
    found = Scores.of_json(told)
    (score,) = found.scores
    assert (score.name, score.metric) == ("other.txt", "nats/token")
    assert score.value == pytest.approx(plain_loss(model, (model / "other.txt").read_bytes()), abs=1e-4)
    assert [prompt for prompt, _ in found.continuations] == list(PROMPTS)
    assert main(["generate", str(model), "--prompt", PROMPTS[0], "--tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == PROMPTS[0] + found.continuations[0][1].rstrip("\n")
    (failed,) = found.failed
    assert "absent.txt" in failed and "evaluation.sets" in failed, "the rest is measured all the same"
    assert main(["eval", str(model), "--json", "--cache", str(model / "cache")]) == 0
    assert "scores" not in json.loads(capsys.readouterr().out), "without --all the held-out part only"


def test_a_text_out_of_the_data_folder_is_not_read(model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("a key")
    (model / "link.txt").symlink_to(tmp_path / "secret.txt")
    for name in ("link.txt", "../secret.txt", str(tmp_path / "secret.txt")):
        with pytest.raises(NotPermitted):
            read_text(model, name)
    with pytest.raises(NotPermitted):
        read_text(None, "other.txt")
    assert DataRoot(model).find("other.txt").is_file()


def test_chat_answers_each_line(model: Path) -> None:
    asked = ["chat", str(model), "--tokens", "6", "--temperature", "0"]
    told = CliRunner().invoke(cli, asked, input="hello\n/new\nhello\n\n")
    assert told.exit_code == 0, told.output
    once = CliRunner().invoke(cli, asked, input="hello\n")
    assert once.stdout and told.stdout == once.stdout * 2, "after /new the same question has the same answer"
    (model / "swarmnode.json").write_text('{"a":' * 9999)  # of a stranger's export
    refused = CliRunner().invoke(cli, asked)
    assert isinstance(refused.exception, DataError), refused.output
