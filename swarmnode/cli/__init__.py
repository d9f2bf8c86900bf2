"""The command line. `run` is what the installed command calls; nothing of weight is imported before it."""

import signal


def run() -> int:
    """`swarmnode.cli.main.main`; Ctrl-C ends the process without a word until that runs."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from swarmnode.cli.main import main

    return main()
