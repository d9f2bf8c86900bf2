#!/usr/bin/env bash
# datasets 5.2.0: `to_parquet` of chat messages whose content is text in some rows and parts in others.
#
# Guess: from JSON lines that hold both kinds of content, `load_dataset` raises (a column has one Arrow type), or
# `to_parquet` writes what other readers take for the same values: text as text.
# Seen: the column is Arrow's extension type `arrow.json`, at the depth where the types differ. Parquet stores each
# value as JSON, so text is in quotes there. pyarrow without datasets gives '"yes"' for "yes"; datasets takes the quotes
# off again. A reader that takes the column for plain text trains on the quotes.
#
# Prints the type of the column and one value, read by pyarrow and by datasets.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check datasets==5.2.0 pyarrow==26.0.1
HF_HUB_OFFLINE=1 HF_HOME="$folder/home" "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import pathlib
import sys

import datasets
import pyarrow.parquet

datasets.disable_progress_bars()
folder = pathlib.Path(sys.argv[1])
rows = [
    {"messages": [{"role": "user", "content": "Is it wet?"}, {"role": "assistant", "content": "yes"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "And cold?"}]}]},
]
(folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
table = datasets.load_dataset("json", data_files=str(folder / "talks.jsonl"), split="train")
table.to_parquet(str(folder / "talks.parquet"))
print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__)
stored = pyarrow.parquet.read_table(folder / "talks.parquet")
content = stored.schema.field("messages").type.value_type.field("content").type
print("type:", content)
raw = stored.column("messages").to_pylist()[0][1]["content"]
back = datasets.load_dataset("parquet", data_files=str(folder / "talks.parquet"), split="train")[0]["messages"][1]["content"]
print("pyarrow reads:", raw, "| datasets reads:", back)
assert "arrow.json" in str(content), content
assert raw == '"yes"' and back == "yes", (raw, back)
PYTHON
