#!/usr/bin/env bash
# tokenizers 0.23.3, alone and under transformers 5.23.0: with Unigram a text can write any control token.
#
# Guess: `encode_special_tokens = True` (`split_special_tokens=True` in transformers) makes pieces of text of a text
# that looks like a special token, for every kind of model; and a text like `<0x41>` is six characters. So has it
# sentencepiece 0.2.3, whose file the tokenizer was made from: control and byte pieces are never found in a text.
# Seen: the flag keeps added tokens from being split off, and the Unigram model then finds the same names among its
# pieces, at the score 0, the best of all. `</s>` in a text is the token that ends texts, `<unk>` is the unknown one,
# and `<0x41>` becomes the byte of "A", which decodes to another text. BPE of the same text does as sentencepiece, but
# for `ignore_merges`. Whoever trains on strangers' texts with a Unigram tokenizer lets them end a document: give the
# special pieces other names in a copy of tokenizer.json, and encode plain texts by that.
#
# Prints for each text the pieces of sentencepiece and of tokenizers, and what transformers makes of the first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  sentencepiece==0.2.3 tokenizers==0.23.3 transformers==5.23.0
TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from importlib.metadata import version
from pathlib import Path

import sentencepiece
import tokenizers
import transformers

folder = Path(sys.argv[1])
(folder / "text.txt").write_text("".join(f"The cat sat down {n} times, so it was {n * 7}.\n" for n in range(3000)))
sentencepiece.SentencePieceTrainer.train(
    input=str(folder / "text.txt"), model_prefix=str(folder / "cat"), model_type="unigram", vocab_size=340,
    byte_fallback=True, minloglevel=2,
)
theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "cat.model"))
pieces = [(theirs.id_to_piece(n), theirs.get_score(n)) for n in range(theirs.get_piece_size())]
inner = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=theirs.unk_id(), byte_fallback=True))
inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
inner.add_special_tokens(["<unk>", "<s>", "</s>"])
inner.encode_special_tokens = True
print("sentencepiece", version("sentencepiece"), "tokenizers", tokenizers.__version__)
assert inner.encode("The cat sat", add_special_tokens=False).tokens == theirs.encode("The cat sat", out_type=str)
for name in ("</s>", "<unk>", "<0x41>"):
    text = f"cat {name} cat"
    right, seen = theirs.encode(text, out_type=str), inner.encode(text, add_special_tokens=False).tokens
    print(repr(text), "sentencepiece:", " ".join(right), "| tokenizers:", " ".join(seen))
    assert name not in right and name in seen, (right, seen)
fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
ids = fast("cat </s> cat", add_special_tokens=False, split_special_tokens=True)["input_ids"]
print("transformers with split_special_tokens:", " ".join(fast.convert_ids_to_tokens(ids)))
assert fast.eos_token_id in ids
PYTHON
