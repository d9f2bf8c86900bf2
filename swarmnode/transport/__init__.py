"""The world behind the ports: libp2p streams and the DHT, through hivemind, which is imported nowhere else.

hivemind's own front door imports its trainers, and with them SciPy and pydantic: 46 MiB and 0.6 s for each process
(measured), for parts that fork. So only the package's rooms are opened: a bare `hivemind` module stands in for it.
"""

import importlib.util
import sys
import types


def _open_rooms_only() -> None:
    """Make `import hivemind.p2p` and `hivemind.dht` possible without running hivemind/__init__.py."""
    if "hivemind" in sys.modules:
        return
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.submodule_search_locations is None:
        return  # the import that follows says what is missing
    package = types.ModuleType("hivemind")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules["hivemind"] = package


_open_rooms_only()
