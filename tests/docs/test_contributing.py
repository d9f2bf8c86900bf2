"""The recipes of docs/architecture.md, carried out on a copy of the tree."""

from pathlib import Path

import pytest

from tests.recipes import RECIPES, carry_out

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_ends_green_without_touching_other_code(name: str, tmp_path: Path) -> None:
    output = carry_out(name, tmp_path)
    if output:
        pytest.fail(f"{name}: {output}", pytrace=False)


def test_the_page_names_the_files_that_a_recipe_changes() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    recipes = page[page.index("## Recipes") :]
    changed = {one.path for recipe in RECIPES.values() for one in recipe.insertions}
    reader = {"swarmnode/app/daemon/process.py", "swarmnode/train/node/regulator.py"}  # "read where it has its effect"
    named = {
        path for path in changed if path.removeprefix("swarmnode/") in recipes or Path(path).parent.name in recipes
    }
    assert changed - named <= reader
