"""The tokenizer of an export: transformers knows which token ends a text, pads a batch, and makes the run's ids."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from swarmnode.data.tokens import ByteTokenizer
from swarmnode.model.export import small_files
from swarmnode.model.export_tokenizer import END
from swarmnode.run.manifest import DataSpec, Manifest
from tests.support.tiny_model import TINY, manifest

pytestmark = pytest.mark.node  # seconds to import transformers
TEXT = "It was dark: caf\u00e9 \u0100\n\tx  y\u4e2d"


def opened(folder: Path, run: Manifest, tokenizer: Path | None, **carried: Any) -> tuple[Any, dict[str, Any]]:
    """(transformers' tokenizer, its generation_config.json) of an export of `run` in `folder`."""
    from transformers import AutoTokenizer

    beside = {f"{name}.json": json.dumps(tree).encode() for name, tree in carried.items()}
    files = small_files(run, tokenizer, {}, beside)
    folder.mkdir()
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    return AutoTokenizer.from_pretrained(folder), json.loads(files["generation_config.json"])


def own(folder: Path) -> tuple[Path, int]:
    """A tokenizer without special tokens, as docs/data.md makes one, and its size."""
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(["the quick brown fox jumps over 123 lazy dogs\n"] * 40, vocab_size=300)
    made.save(str(folder / "own.json"))
    return folder / "own.json", made.get_vocab_size()


def test_a_byte_models_tokenizer_makes_bytes_ends_at_byte_0_and_pads(tmp_path: Path) -> None:
    run = manifest(replace(TINY, vocabulary=256))
    theirs, settings = opened(tmp_path / "out", run, None)
    ids = theirs(TEXT)["input_ids"]
    assert ids == ByteTokenizer().encode(TEXT).tolist() and theirs.decode(ids) == TEXT
    assert (theirs.eos_token, theirs.eos_token_id, theirs.pad_token_id) == (END, 0, 0)
    assert (settings["eos_token_id"], settings["pad_token_id"]) == (0, 0)
    batch = theirs(["a", "a longer one"], padding=True)
    assert [len(row) for row in batch["input_ids"]] == [12, 12] and sum(batch["attention_mask"][0]) == 1


def test_an_end_without_a_name_gets_one_and_ids_of_text_stay(tmp_path: Path) -> None:
    path, size = own(tmp_path)
    data = DataSpec(tokenizer="own.json", end_token=size)
    theirs, settings = opened(tmp_path / "out", replace(manifest(replace(TINY, vocabulary=size + 1)), data=data), path)
    assert theirs(TEXT)["input_ids"] == Tokenizer.from_file(str(path)).encode(TEXT).ids
    assert (theirs.eos_token, theirs.eos_token_id, theirs.pad_token) == (END, size, END)
    assert settings["eos_token_id"] == size
    assert len(theirs(["a", "a longer one"], padding=True)["input_ids"][0]) > 1


def test_names_that_a_models_files_give_are_kept(tmp_path: Path) -> None:
    path, size = own(tmp_path)
    tree = json.loads(path.read_text())
    names = ("<s>", "</s>", "<pad>")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tree["added_tokens"] = [{"id": size + index, "content": name, **flags} for index, name in enumerate(names)]
    path.write_text(json.dumps(tree))
    run = replace(manifest(replace(TINY, vocabulary=size + 3)), data=DataSpec(tokenizer="own.json", end_token=size + 1))
    named = {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "more": 1}}
    theirs, settings = opened(tmp_path / "named", run, path, **named, config={"bos_token_id": size})
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == names
    assert [settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")] == [size, size + 1, size + 2]
    config = json.loads((tmp_path / "named" / "tokenizer_config.json").read_text())
    assert config["more"] == 1 and json.loads((tmp_path / "named" / "tokenizer.json").read_text()) == tree
    # Padding is no property of the model: transformers would train no row of the table for it.
    assert json.loads((tmp_path / "named" / "config.json").read_text())["pad_token_id"] is None
