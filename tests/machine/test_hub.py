"""Models on the Hub: the real library against a stand-in of the Hub on this machine."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from swarmnode.model.export import model_card
from swarmnode.run.manifest import AboutSpec
from swarmnode.run.manifest.recipe import PRESETS

REPO = "ada/model"
TOKEN = "hf_stand_in"


class Hub(ThreadingHTTPServer):
    """What the library asks of the Hub: repositories, commits with large files apart, tags."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.private: dict[str, bool] = {}
        self.blobs: dict[str, bytes] = {}
        self.commits: list[tuple[str, dict[str, bytes]]] = []  # message, all files after it
        self.tags: dict[str, str] = {}

    @property
    def files(self) -> dict[str, bytes]:
        return dict(self.commits[-1][1]) if self.commits else {".gitattributes": b""}

    def commit(self, lines: list[dict[str, Any]]) -> str:
        files = self.files
        message = ""
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    message = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.blobs[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        self.commits.append((message, files))
        return f"{len(self.commits):040x}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None: ...

    def _reply(self, body: object, code: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_PUT(self) -> None:
        data = self._body()
        self.server.blobs[hashlib.sha256(data).hexdigest()] = data
        self._reply({})

    def do_GET(self) -> None:
        if "/tree/" in self.path:
            rows = [
                {"type": "file", "path": path, "size": len(data), "oid": "0" * 40}
                for path, data in self.server.files.items()
            ]
            self._reply(rows)
        else:
            siblings = [{"rfilename": path} for path in self.server.files]
            self._reply({"id": REPO, "sha": f"{len(self.server.commits):040x}", "siblings": siblings})

    def do_POST(self) -> None:
        body = self._body()
        hub = self.server
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._reply({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            known = REPO in hub.private
            hub.private.setdefault(
                REPO, bool(json.loads(body).get("private") or json.loads(body).get("visibility") == "private")
            )
            self._reply({"url": f"{hub.url}/{REPO}", "name": REPO, "error": "exists"}, 409 if known else 200)
        elif self.path == "/api/validate-yaml":
            self._reply({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            rows = json.loads(body)["files"]
            mode = {row["path"]: "lfs" if row["path"].endswith(".safetensors") else "regular" for row in rows}
            self._reply({"files": [{"path": path, "uploadMode": mode[path], "shouldIgnore": False} for path in mode]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.url}/blob/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._reply({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            oid = hub.commit([json.loads(line) for line in body.splitlines()])
            self._reply({"commitUrl": f"{hub.url}/{REPO}/commit/{oid}", "commitOid": oid, "success": True})
        elif "/tag/" in self.path:
            hub.tags[json.loads(body)["tag"]] = self.path.rpartition("/")[2]
            self._reply({})
        else:
            self._reply({"error": self.path}, 404)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


PROGRAM = """
import sys
from pathlib import Path
from swarmnode.base.errors import SwarmnodeError
from swarmnode.app.machine.hub import push_folder
for folder, tag in zip(sys.argv[2::2], sys.argv[3::2]):
    try:
        print(push_folder(Path(folder), sys.argv[1], tag, f"at {tag}"))
    except SwarmnodeError as error:
        print(f"{type(error).__name__}: {error}")
"""


def push(hub: Hub, repo: str, *pairs: str, token: str = TOKEN) -> list[str]:
    """The lines of a process that pushes folders: the library reads its settings once."""
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, repo, *pairs],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_folder_becomes_a_tagged_revision(hub: Hub, tmp_path: Path) -> None:
    first = tmp_path / "first"
    second = tmp_path / "second"
    card = model_card(PRESETS["tiny"], {"run_id": "ab", "samples": 10, "round": 3})
    for folder, weights in ((first, "model.safetensors"), (second, "stage-0.safetensors")):
        folder.mkdir()
        (folder / weights).write_bytes(folder.name.encode() * 100)
        (folder / "README.md").write_text(card)
    told = push(hub, REPO, str(first), "round-3", str(second), "round-4")
    assert hub.private == {REPO: True}
    assert [line.rpartition("/")[2] for line in told] == [f"{1:040x}", f"{2:040x}"]
    assert [message for message, _ in hub.commits] == ["at round-3", "at round-4"]
    assert hub.commits[0][1]["model.safetensors"] == b"first" * 100
    assert set(hub.files) == {".gitattributes", "README.md", "stage-0.safetensors"}, "nothing of the first is left"
    assert hub.tags == {"round-3": f"{1:040x}", "round-4": f"{2:040x}"}
    (line,) = push(hub, REPO, str(first), "round-5", token="hf_wrong")
    assert line.startswith("Unavailable: the Hub did not take ada/model: ") and "hf auth login" in line
    (line,) = push(hub, "not a name/at/all", str(first), "round-5")
    assert line.startswith("UsageError: --push-to-hub 'not a name/at/all': ")


def test_a_model_card_says_how_and_by_whom_and_takes_nobodys_markup() -> None:
    about = AboutSpec(by="Ada", why="Stories for children", data="Tales of 1900", licence="Apache-2.0")
    members = [{"name": "<b>eve|[x](http://evil)", "hours": 1.5}, {"name": "ada", "hours": 0.5}]
    card = model_card(
        replace(PRESETS["tiny"], about=about),
        {"run_id": "ab" * 32, "samples": 1000, "round": 7, "validation": 2.34567, "members": members},
    )
    head, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert "license: apache-2.0" in head.splitlines() and "library_name: transformers" in head.splitlines()
    assert "Stories for children" in body and "Tales of 1900" in body and "Run by Ada." in body
    assert "| samples, tokens | 1,000, 32,000 |" in body and "2.3457" in body
    assert "| replicas meet by | average, modular4, every 64 samples |" in body
    assert "| bevex(http: //evil) | 1.5 |" in body
    assert "<b>" not in body and "2 machines computed for 2.0 hours" in body
    unknown = model_card(replace(PRESETS["tiny"], about=AboutSpec(licence="my own words")), {"samples": None})
    assert "license: other" in unknown and "Energy" not in unknown and "my own words" in unknown
