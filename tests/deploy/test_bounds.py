"""The wheel takes no version that nobody meant: each package has both ends, and the tested version lies between."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALLED_ALONE = {"lint", "dev"}  # for those who change the code: constraints.txt pins them


def needed() -> list[Requirement]:
    extras = [texts for extra, texts in PROJECT["optional-dependencies"].items() if extra not in INSTALLED_ALONE]
    return [Requirement(text) for texts in (PROJECT["dependencies"], *extras) for text in texts]


def pinned() -> dict[str, str]:
    lines = [line.split(";")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name): version.strip() for name, version in pairs}


@pytest.mark.parametrize("need", needed(), ids=lambda need: need.name)
def test_a_package_that_users_install_has_both_ends_and_holds_the_tested_version(need: Requirement) -> None:
    operators = {each.operator for each in need.specifier}
    assert operators == {"=="} or operators >= {">=", "<"}, f"{need}: give >= and <"
    assert need.specifier.contains(pinned()[canonicalize_name(need.name)]), f"{need}: constraints.txt tests another"
