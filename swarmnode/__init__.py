"""swarmnode: train large language models over the internet on machines nobody controls."""

__version__ = "0.1.0"

_PLACES = {
    **dict.fromkeys(("Run", "connect", "plan", "up"), "swarmnode.app.api"),
    "RunHistory": "swarmnode.app.api",
    **dict.fromkeys(("Comparison", "compare", "simulate"), "swarmsim.api"),
    **dict.fromkeys(("PAPERS", "paper"), "swarmnode_methods.papers"),
}
"""What `import swarmnode` offers, imported when it is first used; __init__.pyi has the types."""


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'swarmnode' has no attribute {name!r}")
    import importlib

    globals()[name] = value = getattr(importlib.import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
