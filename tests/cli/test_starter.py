"""Recipes of `quickstart`: those that come with swarmnode fit its manifest, and a wrong one is told by its key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarmnode.app.cli.main import main
from swarmnode.app.local import starter
from swarmnode.base.errors import UsageError
from swarmnode.run.manifest import parse, template
from swarmnode.run.manifest.recipe import PRESETS
from swarmnode.run.manifest.text import with_value

GOOD = (
    'title = "t"\nabout = "a"\nneeds = "n"\ntakes = "t"\n'
    '[text]\nwhat = "w"\nsamples = ["conversations"]\nweights = [1.0]\nvalidation = 0.1\nvocabulary = 300\n'
    '[model]\nfrom = ""\nkind = "pretrain"\nparameters = 100000\ncontext = 64\n'
    '[run]\nnodes = 2\nsamples = 64\n[fields]\n"gossip.round_samples" = 32\n'
    '[talk]\nchat = true\nprompts = ["What is a stage?"]\n'
)


@pytest.mark.parametrize("name", starter.names())
def test_a_recipe_that_comes_with_swarmnode_sets_fields_that_there_are(name: str) -> None:
    made = starter.read(name)
    text = template(PRESETS["demo"])
    for field, value in made.fields.items():
        text = with_value(text, field, json.dumps(value))
    parse(text, name)


def test_conversations_that_come_with_swarmnode_are_conversations(tmp_path: Path) -> None:
    path = starter.write_sample("conversations", tmp_path)
    assert main(["data", "make", str(tmp_path / "set"), "--from", str(path), "--validation", "0.1"]) == 0
    assert json.loads((tmp_path / "set" / "index.json").read_text())["loss_mask"]


def test_the_list_names_each_recipe_with_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart"]) == 0
    said = capsys.readouterr().out
    for name in starter.names():
        made = starter.read(name)
        assert f"swarmnode quickstart {name}\n    {made.title}\n" in said
        assert made.needs in said and made.takes in said


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('title = "t"', "", "recipe x: title is missing"),
        ("nodes = 2", 'nodes = "2"', "recipe x: run.nodes: '2' is no int"),
        ("nodes = 2", "nodes = true", "recipe x: run.nodes: 'True' is no int"),
        ("nodes = 2", "nodes = 2\nnode = 3", "recipe x: [run] has no key 'node'"),
        ("[fields]", "[more]\n[fields]", "recipe x: no key 'more' is known"),
        ('["conversations"]', '["novels"]', "text.samples: 'novels' is none of conversations, python"),
        ("[1.0]", "[1.0, 2.0]", "text.weights has a number for each of text.samples"),
        ("[1.0]", '["1"]', "text.weights has a number for each of text.samples"),
        ("parameters = 100000", "parameters = 0", "model.from or model.parameters: give one"),
        ('from = ""', 'from = "hf://a/b"', "model.from or model.parameters: give one"),
        ('["What is a stage?"]', "[1]", "talk.prompts are texts"),
        ("[text]", "text", "recipe x: no TOML"),
        ('[fields]\n"gossip.round_samples" = 32', "", ""),
    ],
)
def test_a_wrong_recipe_is_told_by_its_key(old: str, new: str, told: str) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new)
    if not told:
        assert starter.parse(text, "x").fields == {}
        return
    with pytest.raises(UsageError) as raised:
        starter.parse(text, "x")
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_a_recipe_that_is_not_there_is_told_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "smal"]) == 2
    assert (
        "no recipe 'smal': there are chat, continue, small, or give a file that ends in .toml"
        in capsys.readouterr().err
    )


def test_a_recipe_from_nothing_takes_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "small", "--model", "hf://a/b"]) == 2
    assert "--model: recipe small begins from nothing" in capsys.readouterr().err
