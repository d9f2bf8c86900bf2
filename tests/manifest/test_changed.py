"""A run's folder whose manifest was changed after it was signed: refused, with the difference and the ways out."""

from pathlib import Path

import pytest

from swarmnode.app.cli.bootstrap import signed_manifest
from swarmnode.app.cli.main import main
from swarmnode.base.errors import ManifestError
from swarmnode.run import manifest as manifests
from swarmnode.run.manifest.folder import MANIFEST_FILE, SIGNED_FILE, init, sign_folder
from swarmnode.run.manifest.recipe import PRESETS
from swarmnode.run.manifest.text import with_value


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    init(folder, PRESETS["tiny"])
    sign_folder(folder)
    return folder


def change(run: Path, name: str, value: str) -> None:
    path = run / MANIFEST_FILE
    path.write_text(with_value(path.read_text(), name, value))


@pytest.mark.parametrize(
    "verb",
    [
        ("coordinator",),
        ("bootstrap",),
        ("up", "--nodes", "3"),
        ("archive", "--once"),
        ("invite", "--home", "nowhere"),
        ("access",),
    ],
)
def test_every_verb_that_signs_refuses_a_changed_manifest(
    run: Path, verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / SIGNED_FILE).read_bytes()
    change(run, "seed", "5")
    change(run, "inner.warmup_samples", "164")
    assert main([verb[0], str(run), *verb[1:]]) == 78
    said = capsys.readouterr().err
    assert "seed: 0 -> 5" in said and "inner.warmup_samples:" in said, said
    assert f"swarmnode amend {run} FIELD=VALUE" in said and f"swarmnode init {run} --new-run" in said, said
    assert (run / SIGNED_FILE).read_bytes() == before, "the signed manifest was overwritten"


def test_comments_and_format_are_no_change(run: Path) -> None:
    before = (run / SIGNED_FILE).read_bytes()
    path = run / MANIFEST_FILE
    path.write_text("# mine\n" + "\n".join(line for line in path.read_text().splitlines() if line[:1] != "#"))
    assert signed_manifest(str(run)) == str(run / SIGNED_FILE)
    assert (run / SIGNED_FILE).read_bytes() == before


def test_a_new_run_keeps_the_signed_manifest_of_the_old_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / SIGNED_FILE).read_bytes()
    _, old = manifests.verify(manifests.read_signed(run / SIGNED_FILE)[0], None)
    change(run, "seed", "5")
    with pytest.raises(ManifestError):
        sign_folder(run)
    assert main(["init", str(run), "--new-run"]) in (0, None)
    kept = [path for path in run.glob("manifest-*.signed") if path.read_bytes() == before]
    assert len(kept) == 1 and str(kept[0]) in capsys.readouterr().out
    assert manifests.verify(sign_folder(run), None)[1] != old
