"""A tokenizer trained here."""

import pathlib

import tokenizers

from swarmnode.data import tokens


def train_tokenizer(path: pathlib.Path, vocabulary: int = 400) -> pathlib.Path:
    """A byte-level BPE of some Python source, saved as a tokenizer.json."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train([tokens.__file__], trainer)
    inner.save(str(path))
    return path
