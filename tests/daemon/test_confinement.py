"""A node opens none of its user's other files, and neither does what it starts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnode import landlock

CHILD = """
import ctypes, os, subprocess, sys
from pathlib import Path
from swarmnode.daemon.launch import _confine
from swarmnode.daemon.options import NodeOptions
from swarmnode.landlock import DENIED
home = Path(sys.argv[1])
node = NodeOptions("0" * 64, (), None, "", home / "node", 0, home / ".cache" / "swarmnode", "", data_root=home / "data")
_confine(node)
(node.home / "mine").write_text("x")
(node.home / "mine").rename(node.cache / "mine")
assert (home / "data" / "text").read_text() == "text"
def denied(command):
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True)
    assert "ermission denied" in done.stderr, command
traced = ctypes.CDLL(None, use_errno=True)
assert traced.syscall(DENIED[os.uname().machine][0], 0, 0, 0, 0) == -1 and ctypes.get_errno() == 13, "ptrace"
denied(f"cat {home}/.ssh/id")
denied(f"echo x > {home}/data/text")
denied(f"mkdir {home}/new")
try:
    (home / ".ssh" / "id").read_text()
except PermissionError:
    print("closed")
"""


@pytest.mark.skipif(not landlock.available(), reason="this kernel has no Landlock of Linux 6.2")
def test_a_node_opens_what_its_options_name_and_nothing_else_of_its_user() -> None:
    home = Path.home() / f".swarmnode-test-{os.getpid()}"  # below a home: the folder for temporary files is open
    try:
        for name, text in ((".ssh/id", "secret"), ("data/text", "text")):
            (home / name).parent.mkdir(parents=True)
            (home / name).write_text(text)
        environment = {**os.environ, "HOME": str(home)}
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(home)], env=environment, capture_output=True, text=True, check=False
        )
        assert done.stdout == "closed\n", done.stderr
    finally:
        shutil.rmtree(home)


OLD_GATE = """
import ctypes, mmap, os
from swarmnode.limited_child import deny_calls
from swarmnode.landlock import DENIED
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20; int 0x80; ret: getpid by the numbers of i386
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
deny_calls(DENIED["x86_64"])
print(call() == os.getpid())
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="this machine has one architecture")
def test_calls_by_the_numbers_of_another_architecture_are_refused() -> None:
    done = subprocess.run([sys.executable, "-c", OLD_GATE], capture_output=True, text=True, check=False)
    assert done.stdout != "True\n", "the call came through"  # without that gate in the kernel the process ends
