"""Run a command that dies with its parent: `python -I parent_death.py PARENT_PID COMMAND...`.

On Linux the kernel sends SIGKILL when the thread that started us ends (PR_SET_PDEATHSIG holds across exec), however the
parent ends. Doing this here, after exec, avoids Python code in the forked child of a process with threads. On other
systems the command simply runs, and only an orderly end of the parent ends it.
"""

import os
import sys

PR_SET_PDEATHSIG = 1
SIGKILL = 9
EXIT_NOT_RUN = 127


def hold(parent: int) -> bool:
    """Make the kernel end this process with `parent`; return False if that has ended already."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    return os.getppid() == parent  # else it died before the kernel was told


def main(arguments: list[str]) -> int:
    """Become COMMAND. Returns only if it cannot be run or the parent has ended already."""
    parent = int(arguments[0])
    command = arguments[1:]
    if not hold(parent):
        return EXIT_NOT_RUN
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"swarmnode: cannot run {command[0]}: {error.strerror}\n")
        return EXIT_NOT_RUN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
