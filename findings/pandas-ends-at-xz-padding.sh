#!/usr/bin/env bash
# pandas 3.1.1 and datasets 5.2.0 (`lzma.open` of CPython 3.11.7): a .xz file ends at the first padding.
#
# Guess: `read_json`, `read_csv` and `load_dataset` give all rows of a .xz file whose streams have padding between them
# (zeros, a multiple of four bytes: section 2.2 of the format), as `xz -dc` does; those that cannot read it fail.
# Seen: rows behind the padding are missing, and nothing is said. `lzma.LZMAFile` takes what follows a stream for
# rubbish if it is no stream, and ends there; two streams without padding are read whole. gzip's zeros are skipped. So
# count rows after reading, or join .xz files by `xz -dc A B | xz`, which leaves no padding.
#
# Prints the rows of one file of two streams, with and without eight zeros between them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check pandas==3.1.1 datasets==5.2.0 pyarrow==26.0.1
HF_HUB_OFFLINE=1 HF_HOME="$folder/home" "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import lzma
import sys
from importlib.metadata import version
from pathlib import Path

import datasets
import pandas

folder = Path(sys.argv[1])
datasets.disable_progress_bars()
print(f"pandas {version('pandas')}, datasets {version('datasets')}, Python {sys.version.split()[0]}")


def rows(between: bytes) -> list[int]:
    name = f"padded{len(between)}"
    for kind, one, two in (("jsonl", b'{"text": "one"}\n', b'{"text": "two"}\n'), ("csv", b"text\none\n", b"two\n")):
        (folder / f"{name}.{kind}.xz").write_bytes(lzma.compress(one) + between + lzma.compress(two))
    lines = str(folder / f"{name}.jsonl.xz")
    found = [len(pandas.read_json(lines, lines=True)), len(pandas.read_csv(folder / f"{name}.csv.xz"))]
    return [*found, len(datasets.load_dataset("json", data_files=lines, split="train"))]


whole, padded = rows(b""), rows(bytes(8))
for name, count in (("without padding", whole), ("with padding", padded)):
    print(f"{name}: rows of read_json, read_csv, load_dataset: {count}")
assert whole == [2, 2, 2], "two streams are two rows"
assert padded == [1, 1, 1], "this has changed: the rows behind the padding are read, or an error tells of them"
PYTHON
