"""Real processes on a machine that others load: each test has ten minutes, unless it says otherwise."""

import pytest

BOUND_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/live/" in item.path.as_posix() and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(BOUND_S))
