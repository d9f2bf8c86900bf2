"""Real processes on a machine that others load: each test has ten minutes, unless it or `--timeout` says otherwise."""

import pytest

BOUND_S = 600


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    given_s = config.getoption("timeout", None)  # without a marker pytest-timeout would heed it, with one it would not
    for item in items:
        if "/live/" in item.path.as_posix() and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(given_s or BOUND_S))
