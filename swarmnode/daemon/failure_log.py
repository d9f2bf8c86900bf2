"""The error that ends a node: which one of several, and its line in the log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from swarmnode.errors import LocalFault, SwarmnodeError
from swarmnode.ports import Telemetry


@contextlib.contextmanager
def failure_logged(telemetry: Telemetry) -> Iterator[None]:
    """Log an error that ends the node, and pass it on."""
    try:
        yield
    except Exception as error:
        first = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        telemetry.event("node.failed", level="error", reason=f"{type(first).__name__}: {first}")
        raise


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error in a group to show to the user: the first SwarmnodeError, else the first of any."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack:
        error = stack.pop(0)
        if isinstance(error, BaseExceptionGroup):
            stack.extend(error.exceptions)
        else:
            leaves.append(error)
    ours = [error for error in leaves if isinstance(error, SwarmnodeError)]
    faults = [error for error in ours if isinstance(error, LocalFault)]
    return (faults or ours or leaves)[0]
