"""Files of a model that a stranger made: no link leads out, each is read as data, and what hangs is stopped."""

import errno
import json
import os
import socket
import sys
from pathlib import Path

import pytest
import tokenizers
from click.testing import CliRunner
from tokenizers import Regex, normalizers, pre_tokenizers

from swarmnode import limited_child
from swarmnode.cli.data import make
from swarmnode.cli.init import command
from swarmnode.data.tokenizer_file import check_tokenizer
from swarmnode.data.tokens import huggingface_tokenizer
from swarmnode.errors import DataError, NotPermitted
from swarmnode.limited_child import deny_calls, run_limited
from swarmnode.model.export import byte_tokenizer
from tests.support.published_model import llama

ENDLESS = pre_tokenizers.Split(Regex(r"(?:a|a|aa)+$"), "isolated")
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial ends by its processor time, however long a loaded machine takes for that; and it has little of it."""
    monkeypatch.setattr(limited_child, "WALL_SHARE", 300)
    defaults = limited_child.run_limited.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "cpu_s", 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stranger") / "model"
    llama(folder)
    return folder


def copied(model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json", "config.json", "model.safetensors"])
def test_no_link_leads_out_of_a_model(model: Path, tmp_path: Path, name: str) -> None:
    folder = copied(model, tmp_path)
    secret = tmp_path / "secret"
    secret.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../secret")
    with pytest.raises(NotPermitted, match="link leads out"):
        CliRunner().invoke(command, [str(tmp_path / "run"), "--from", str(folder)], catch_exceptions=False)
    assert not (tmp_path / "run").exists()


def test_links_in_the_hubs_own_cache_are_followed(model: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--me--m" / "snapshots" / "abc", tmp_path / "models--me--m" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in model.iterdir():
        (blobs / path.name).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    done = CliRunner().invoke(command, [str(tmp_path / "run"), "--from", str(snapshot)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    base = tmp_path / "run" / "base"
    assert base.stat().st_mode & 0o77 == 0
    assert all(path.stat().st_mode & 0o77 == 0 for path in base.iterdir() if not path.is_symlink())


@pytest.mark.parametrize("text", ['["a", "list"]', "AKIA-a-secret", '{"a": ' * 100_000])
def test_small_files_are_json_objects_or_the_model_is_refused(model: Path, tmp_path: Path, text: str) -> None:
    folder = copied(model, tmp_path)
    (folder / "special_tokens_map.json").write_text(text)
    with pytest.raises(DataError, match="JSON"):
        CliRunner().invoke(command, [str(tmp_path / "run"), "--from", str(folder)], catch_exceptions=False)


def test_a_pipe_is_no_file_of_a_model(model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path)
    os.mkfifo(folder / "special_tokens_map.json")
    with pytest.raises(DataError, match="not a regular file"):
        CliRunner().invoke(command, [str(tmp_path / "run"), "--from", str(folder)], catch_exceptions=False)


def test_data_make_reads_a_tokenizers_folder_so_too(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    (tmp_path / "key").write_text("a secret of this machine")
    (folder / "chat_template.jinja").symlink_to("../key")
    (tmp_path / "text.txt").write_text("some words\n" * 400)
    given = [str(tmp_path / "out"), "--from", str(tmp_path / "text.txt"), "--tokenizer", str(folder / "tokenizer.json")]
    with pytest.raises(NotPermitted, match="link leads out"):
        CliRunner().invoke(make, given, catch_exceptions=False)


def tokenizer(**parts: object) -> str:
    made = tokenizers.Tokenizer.from_str(json.dumps(byte_tokenizer()))
    for name, part in parts.items():
        setattr(made, name, part)
    return str(made.to_str())


def test_hostile_files_hang_or_allocate_in_a_child_only(tmp_path: Path) -> None:
    wrong = {
        "endless": (tokenizer(pre_tokenizer=ENDLESS), "breaks off|trial"),
        "bomb": (tokenizer(normalizer=normalizers.Sequence([normalizers.Replace("a", "aa")] * 40)), "trial takes more"),
        "none": ("{}", "not a Hugging Face tokenizer"),
    }
    for name, (text, why) in wrong.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(text)
        with pytest.raises(DataError, match=why):
            check_tokenizer(tmp_path / name / "tokenizer.json")


SOAK = pytest.mark.skipif("SWARMNODE_SOAK" not in os.environ, reason="ten seconds of a core each")


@pytest.mark.node
@pytest.mark.parametrize(
    "template",
    [
        pytest.param(LOOP, marks=SOAK),
        "{{ ('a' * 3000000000) }}",
        pytest.param("{% for m in messages %}{{ m.role", marks=SOAK),
    ],
)
def test_templates_that_hang_allocate_or_do_not_compile(tmp_path: Path, template: str) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer())
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(DataError, match="trial takes more|MemoryError|TemplateSyntaxError"):
        check_tokenizer(tmp_path / "tokenizer.json")


def test_a_panic_in_rust_is_a_fault_of_the_file() -> None:
    made = huggingface_tokenizer(tokenizer(pre_tokenizer=ENDLESS).encode(), "t.json")
    with pytest.raises(DataError, match="breaks off"):
        made.encode("a" * 60 + "!")


def test_a_child_has_little_time_and_memory() -> None:
    with pytest.raises(DataError, match="1 s of processor time"):
        run_limited("timeit:repeat", "while True: pass", what="a loop", cpu_s=1)
    with pytest.raises(DataError, match="memory"):
        run_limited("builtins:eval", "bytearray(3 << 30)", what="a file")
    run_limited("builtins:eval", "bytearray(1 << 20)", what="a file")


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp")
def test_a_child_has_no_network() -> None:
    child = os.fork()
    if not child:
        deny_calls((41, 198))
        try:
            socket.socket()
        except OSError as error:
            os._exit(error.errno or 0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == errno.EACCES
