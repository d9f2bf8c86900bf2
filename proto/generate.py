"""Generate swarmnode/base/wire from proto/swarmnode/v1 (run by `make proto`).

    python proto/generate.py [OUTPUT_DIR]

The messages are used as they are, so that one word means one thing in proto and in Python. Output paths are
rewritten from the proto package (`swarmnode.v1`) to the Python package (`swarmnode.base.wire`).
"""

from __future__ import annotations

import pathlib
import shutil
import sys
import tempfile

import grpc_tools
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parent
SOURCES = sorted((ROOT / "swarmnode" / "v1").glob("*.proto"))
HEADER = '"""Generated from proto/swarmnode/v1 by `make proto`. Do not edit."""\n'


def generate(output: pathlib.Path) -> None:
    """Write `*_pb2.py`, `*_pb2.pyi` and, for a file with a service, `*_pb2_grpc.py` into `output`."""
    include = pathlib.Path(grpc_tools.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            "protoc",
            f"-I{ROOT}",
            f"-I{include}",
            f"--python_out={folder}",
            f"--pyi_out={folder}",
            f"--grpc_python_out={folder}",
            *[str(source) for source in SOURCES],
        ]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc failed: see its message above")
        output.mkdir(parents=True, exist_ok=True)
        for stale in output.glob("*_pb2*"):
            stale.unlink()
        for made in sorted((pathlib.Path(folder) / "swarmnode" / "v1").iterdir()):
            text = made.read_text().replace("from swarmnode.v1 import", "from swarmnode.base.wire import")
            if made.name.endswith("_grpc.py") and "class " not in text:  # a file without a service
                continue
            (output / made.name).write_text(text)
    (output / "__init__.py").write_text(HEADER)
    shutil.rmtree(output / "__pycache__", ignore_errors=True)


if __name__ == "__main__":
    generate(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "swarmnode" / "base" / "wire")
