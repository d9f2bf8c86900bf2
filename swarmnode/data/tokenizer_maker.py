"""Makes a tokenizer of an organiser's own text: byte-level BPE, as GPT-2's (Radford et al. 2019), with the special
tokens of ChatML, so that the model can learn conversations, too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from swarmnode.base.atomic_file import atomic_write, write_errors
from swarmnode.base.errors import DataError, UsageError
from swarmnode.base.ids import seeded
from swarmnode.data.chat_template import CHATML, CONFIG_FILE
from swarmnode.data.document_row import Document, Reading
from swarmnode.data.document_source import documents, find_work
from swarmnode.data.index import TOKENIZER_FILE

END_OF_TEXT = "<|endoftext|>"
SPECIAL = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")
BYTES = 256
VOCABULARY_MIN = BYTES + len(SPECIAL)
VOCABULARY_MAX = 1 << 18  # guess: published models have at most 262,144
CHARACTERS_MAX = 200_000_000  # guess: merges no longer change; about 2 GB of memory


def make_tokenizer(out: Path, sources: Sequence[str], reading: Reading, vocabulary: int, seed: int) -> int:
    """Write OUT/tokenizer.json and its configuration, made of at most CHARACTERS_MAX characters of `sources`; returns
    the number of its tokens, fewer than `vocabulary` where the text has no more pairs.

    Raises UsageError for a size that no tokenizer has, DataError when no text is found or a document cannot be read,
    LocalFault when `out` cannot be written.
    """
    import tokenizers

    if not VOCABULARY_MIN < vocabulary <= VOCABULARY_MAX:
        raise UsageError(f"--vocabulary {vocabulary}: allowed is {VOCABULARY_MIN + 1} to {VOCABULARY_MAX}")

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_texts(sources, reading, seed), trainer)
    size = made.get_vocab_size()
    if size <= VOCABULARY_MIN:
        raise DataError(f"{', '.join(sources)[:200]}: too little text for a tokenizer; use bytes")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL[1:]),
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
    }
    with write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        atomic_write(out / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
        atomic_write(out / TOKENIZER_FILE, made.to_str().encode())
    return size


def _texts(sources: Sequence[str], reading: Reading, seed: int) -> Iterator[str]:
    """Texts of `sources`, piece of work by piece in an order drawn from `seed`, up to CHARACTERS_MAX characters."""
    works = find_work(sources, reading)
    seeded(seed, "tokenizer").shuffle(works)
    left = CHARACTERS_MAX
    for work in works:
        for placed in documents(work, reading):
            for text in _parts(placed.document):
                yield text[:left]
                left -= len(text)
            if left <= 0:
                return


def _parts(document: Document) -> Iterator[str]:
    """The texts in `document`: itself, or what is said in a conversation."""
    if isinstance(document, str):
        yield document
        return
    for message in document:
        content = message.get("content")
        if isinstance(content, str):
            yield content
