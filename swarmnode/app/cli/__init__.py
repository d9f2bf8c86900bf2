"""The command line. `run` is what the installed command calls; nothing of weight is imported before it."""

import _signal  # type: ignore[import-not-found]  # `signal` imports enum: 5 ms on an idle machine, 170 on a busy one


def run() -> int:
    """`swarmnode.app.cli.main.main`; Ctrl-C ends the process without a word until that runs."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    from swarmnode.app.cli.main import main

    return main()
