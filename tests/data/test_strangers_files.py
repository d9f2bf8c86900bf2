"""Files of a model that a stranger made: no link leads out, each is read as data, and what hangs is stopped."""

import hashlib
import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from click.testing import CliRunner
from tokenizers import Regex, normalizers, pre_tokenizers

from swarmnode.app.cli.data import make
from swarmnode.app.cli.init import command
from swarmnode.base import limited_child
from swarmnode.base.errors import DataError, NotPermitted
from swarmnode.base.limited_child import run_limited
from swarmnode.data.base_index import small_files, written_anew
from swarmnode.data.chat_template import ChatTemplate
from swarmnode.data.tokenizer_file import check_tokenizer
from swarmnode.model.export_tokenizer import byte_tokenizer
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
    return Path(shutil.copytree(model, tmp_path / "model"))


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
    snapshot = tmp_path / "models--me--m" / "snapshots" / "abc"
    blobs = tmp_path / "models--me--m" / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(model, blobs)
    for path in model.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    done = CliRunner().invoke(command, [str(tmp_path / "run"), "--from", str(snapshot)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    base = tmp_path / "run" / "base"
    assert base.stat().st_mode & 0o77 == 0
    assert all(path.stat().st_mode & 0o77 == 0 for path in base.iterdir() if not path.is_symlink())
    index = hashlib.sha256((base / "base.json").read_bytes()).hexdigest()
    assert "config.json" in small_files(base, index)
    (base / "chat_template.jinja").symlink_to("../../secret")  # of a run's folder that somebody else made
    (tmp_path / "secret").write_text("a secret of this machine")
    with pytest.raises(NotPermitted, match="link leads out"):
        small_files(base, index)


def test_a_file_written_anew_does_not_grow() -> None:
    deep = b'{"a": ' + b"[" * 900 + b"0," * 10_000 + b"0" + b"]" * 900 + b"}"
    assert len(written_anew(deep, "config.json")) < 2 * len(deep)


@pytest.mark.parametrize("text", ['["a", "list"]', "AKIA-a-secret", '{"a": ' * 100_000, None])
def test_small_files_are_json_objects_or_the_model_is_refused(model: Path, tmp_path: Path, text: str | None) -> None:
    path = copied(model, tmp_path) / "special_tokens_map.json"
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text)
    with pytest.raises(DataError, match="JSON|not a regular file"):
        CliRunner().invoke(command, [str(tmp_path / "run"), "--from", str(path.parent)], catch_exceptions=False)


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
        "named": (
            tokenizer(normalizer=normalizers.Sequence([normalizers.Replace("ж", "жж")] * 40)),
            "trial takes more",
        ),
        "another": (tokenizer(), "breaks off|trial"),  # transformers takes one for its version, which hangs
    }
    for name, (text, why) in wrong.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(text)
        if name == "another":
            (tmp_path / name / "tokenizer.4.0.0.json").write_text(tokenizer(pre_tokenizer=ENDLESS))
            (tmp_path / name / "tokenizer_config.json").write_text('{"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}')
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


@pytest.mark.parametrize("loop", [LOOP.replace("99999", "9999"), "{{ ('a' * 9000000)|wordwrap(1) }}"])
def test_a_template_that_hangs_on_one_text_is_stopped(monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    monkeypatch.setattr(limited_child, "CPU_S", 1)
    template = ChatTemplate("{% if messages[0].content == 'now' %}" + loop + "{% endif %}{{ messages[0].content }}")
    assert template.render_prompt([{"role": "user", "content": "not yet"}])[0] == "not yet"
    with pytest.raises(NotPermitted, match="more than 1 s of processor time"):
        template.render_prompt([{"role": "user", "content": "now"}])
    with ThreadPoolExecutor(1) as other, pytest.raises(NotPermitted, match="more than 1 s of processor time"):
        other.submit(template.render_prompt, [{"role": "user", "content": "now"}]).result()


def test_a_child_has_little_time_and_memory() -> None:
    with pytest.raises(DataError, match="1 s of processor time"):
        run_limited("timeit:repeat", "while True: pass", what="a loop", cpu_s=1)
    with pytest.raises(DataError, match="memory"):
        run_limited("builtins:eval", "bytearray(3 << 30)", what="a file")
    run_limited("builtins:eval", "bytearray(1 << 20)", what="a file")
    if sys.platform == "linux":  # seccomp
        with pytest.raises(DataError, match="PermissionError"):
            run_limited("_socket:socket", what="a file")
