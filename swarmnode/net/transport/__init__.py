"""Real transport and directory: libp2p streams and the DHT through hivemind, which only this folder imports.

hivemind's package import loads its trainers, and with them SciPy and pydantic: 46 MiB and 0.6 s for each process
(measured), in parts that fork. So a bare `hivemind` module replaces the package, and only the needed submodules load.
"""

import importlib.util
import sys
import types


def _open_rooms_only() -> None:
    """Make `hivemind.p2p` and `hivemind.dht` importable without running hivemind/__init__.py."""
    if "hivemind" in sys.modules:
        return
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.submodule_search_locations is None:
        return  # the following import reports what is missing
    package = types.ModuleType("hivemind")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules["hivemind"] = package


_open_rooms_only()
