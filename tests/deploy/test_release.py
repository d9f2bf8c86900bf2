"""A release says what changed, and what was made of what."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "deploy"))
from release import notes, provenance, version_in  # type: ignore[import-not-found]  # noqa: E402


def test_its_notes_are_the_changelogs_section_and_nothing_is_unreleased() -> None:
    log = "# Changelog\n\n## Unreleased\n\n### Added\n\n## 0.2.0 (not released yet)\n\n* One.\n\n## 0.1.0\n\n* Older.\n"
    assert notes(log, "0.2.0") == "# swarmnode 0.2.0\n\n* One.\n"
    with pytest.raises(SystemExit, match="no section"):
        notes(log, "0.3.0")
    with pytest.raises(SystemExit, match="unreleased"):
        notes(log.replace("### Added\n", "### Added\n\n* Two.\n"), "0.2.0")
    assert notes((ROOT / "CHANGELOG.md").read_text(), version_in(ROOT))


def test_its_provenance_names_each_file_by_its_hash_and_the_commit() -> None:
    told = provenance({"b.whl": "2" * 64, "a.tar.gz": "1" * 64}, "https://example.org/x", "c" * 40, "3" * 64)
    assert [one["name"] for one in told["subject"]] == ["a.tar.gz", "b.whl"] and json.dumps(told)
    made_of = told["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert made_of[0]["digest"] == {"gitCommit": "c" * 40}


def test_changes_that_are_in_no_commit_are_released_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy/release.py").write_text((ROOT / "deploy/release.py").read_text())
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    done = subprocess.run(
        [sys.executable, "deploy/release.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode and "in no commit" in done.stderr
