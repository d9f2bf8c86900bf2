"""A node opens none of its user's other files, and neither does what it starts. A probe runs inside each box, and tries
each row of the table in docs/volunteer.md on files and processes of this test's own."""

import ast
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.base import landlock
from swarmnode.net.transport import dial_filter

CHILD = """
import ctypes, os, subprocess, sys
from pathlib import Path
from swarmnode.app.daemon.launch import _confine
from swarmnode.app.daemon.options import NodeOptions
from swarmnode.base.landlock import DENIED
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
from swarmnode.base.limited_child import deny_calls
from swarmnode.base.landlock import DENIED
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


PROBE = """
import ctypes, encodings.idna, mmap, os, socket, subprocess, sys

def tried(what):
    try:
        what()
    except (OSError, AssertionError):
        return False
    return True

def calls_by_the_old_gate():
    "int 0x80 with the number of getpid there: a filter of this machine's numbers alone lets it through."
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20; int 0x80; ret
    call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    if (child := os.fork()) == 0:  # without that gate in the kernel the process ends
        os._exit(0 if call() == os.getpid() else 1)
    assert os.waitpid(child, 0)[1] == 0, "refused"

def reaches(name):
    with socket.socket(socket.AF_UNIX) as one:
        one.connect("\\0" + name)

def write(path):
    with open(path, "ab") as file:
        file.write(b"x")

def runs_a_copy(path):
    with open("/bin/true", "rb") as program, open(path, "wb") as copy:
        copy.write(program.read())
    os.chmod(path, 0o700)
    subprocess.run([path], check=True)

def probe(home, pid, name, port):
    rows = {
        "reads `~/.ssh`": lambda: open(f"{home}/.ssh/id").read(),
        "lists your home": lambda: os.listdir(home),
        "writes `~/.bashrc`": lambda: write(f"{home}/.bashrc"),
        "writes another program's folder in `~/.cache`": lambda: write(f"{home}/.cache/other/x"),
        "writes the node's home": lambda: write(f"{home}/node/state"),
        "writes in `/tmp`": lambda: write(f"/tmp/{name}"),
        "runs a program of the system": lambda: subprocess.run(["/bin/true"], check=True),
        "runs a program that it wrote": lambda: runs_a_copy(f"{home}/node/copy"),
        "reads another process's memory": lambda: open(f"/proc/{pid}/mem", "rb"),
        "signals another process": lambda: os.kill(int(pid), 0),
        "reaches another's abstract socket": lambda: reaches(name),
        "connects by TCP": lambda: socket.create_connection(("127.0.0.1", int(port)), timeout=60).close(),
        "calls by another architecture's numbers": calls_by_the_old_gate,
    }
    if os.uname().machine != "x86_64":
        rows.popitem()
    sys.stdout.write(repr({row: tried(what) for row, what in rows.items()}) + "\\n")
"""
FREE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[5])
import probe
home = Path(sys.argv[1])
"""
NODE = """
from swarmnode.app.daemon.launch import _confine
from swarmnode.app.daemon.options import NodeOptions
assert _confine(NodeOptions("0" * 64, (), None, "", home / "node", 0, home / ".cache" / "swarmnode", "")) == TOLD
"""
P2PD = """
from swarmnode.net.transport import dial_filter
dial_filter._confine(home / "sockets", home / "node" / "key", Path(sys.executable))
"""
PARSER = """
from swarmnode.base.limited_child import _limit
_limit(20, [])
"""
BOXES = {"a node": NODE, "its p2pd": NODE + P2PD, "the parsers": PARSER}
SCOPED = ("signals another process", "reaches another's abstract socket")  # from Linux 6.12 on


@pytest.fixture
def outside() -> Iterator[list[str]]:
    """A home with secrets, a process, an abstract socket and a port outside of the boxes."""
    home = Path.home() / f".swarmnode-test-{os.getpid()}-{time.monotonic_ns()}"
    for name in (".ssh/id", ".bashrc", ".cache/other/kept", "node/key", "sockets/one"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("secret\n")
    with socket.socket(socket.AF_UNIX) as abstract, socket.create_server(("127.0.0.1", 0)) as server:
        abstract.bind(f"\0{home.name}")
        abstract.listen()
        (home / "code").mkdir()
        (home / "code" / "probe.py").write_text(PROBE)
        yield [str(home), str(os.getpid()), home.name, str(server.getsockname()[1]), str(home / "code")]
    shutil.rmtree(home)
    Path("/tmp", home.name).unlink(missing_ok=True)


def probed(box: str, words: list[str]) -> dict[str, bool]:
    code = FREE + box.replace("TOLD", repr(landlock.missing())) + "probe.probe(*sys.argv[1:5])"
    environment = {**os.environ, "HOME": words[0]}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, bool] = ast.literal_eval(done.stdout)
    return found


def documented() -> dict[str, dict[str, str]]:
    """The table of docs/volunteer.md: what each box lets through, by its name and the row's."""
    lines = (Path(__file__).parents[2] / "docs" / "volunteer.md").read_text().split("\n")
    start = next(at for at, line in enumerate(lines) if line.startswith("| in the box |"))
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:])
    rows = rows[: next(at for at, row in enumerate(rows) if len(row) != len(heads))]
    return {box: {row[0]: row[at] for row in rows} for at, box in enumerate(heads) if at}


@pytest.mark.skipif(not landlock.available(), reason="this kernel has no Landlock of Linux 6.2")
@pytest.mark.parametrize("box", BOXES)
def test_a_probe_in_each_box_gets_what_the_documents_say_and_no_more(box: str, outside: list[str]) -> None:
    home = Path(outside[0])
    free = probed("", outside)
    del free["calls by another architecture's numbers"]  # some kernels have none
    assert all(free.values()), f"outside of a box the probe gets all of it: {free}"
    (home / ".bashrc").write_text("secret\n")
    found = probed(BOXES[box], outside)
    told = documented()[box]
    assert found.keys() <= told.keys()
    scoped = SCOPED if landlock.abi() < landlock.ABI_SCOPES else ()
    says = {row: told[row].startswith("yes") for row in found if row not in scoped}
    assert {row: found[row] for row in says} == says
    assert (home / ".bashrc").read_text() == "secret\n"


SHELL = """
try() {{ ( eval "$2" ) 2>/dev/null && echo "$1"; }}
try "reads a secret" "read x < {home}/.ssh/id"
try "writes beside it" "echo x >> {home}/.bashrc"
try "writes the node's home" "echo x > {home}/node/state"
try "runs a program" "/bin/true"
try "reads its key" "read x < {home}/node/key" >&2
echo x > {home}/sockets/one && echo "writes its sockets" >&2
exit 0
"""


@pytest.mark.skipif(not (landlock.available() and dial_filter.SUPPORTED), reason="needs Landlock and seccomp")
def test_what_becomes_p2pd_is_in_its_box(outside: list[str]) -> None:
    """A shell in p2pd's place tries it, with what it has built in."""
    home = Path(outside[0])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        first = [sys.executable, "-I", "-m", dial_filter.__name__, str(theirs.fileno()), str(home / "sockets")]
        shell = [str(Path("/bin/sh").resolve()), "-c", SHELL.format(home=home)]
        done = subprocess.run(
            [*first, str(home / "node" / "key"), *shell],
            pass_fds=(theirs.fileno(),),
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0 and done.stdout == "", f"p2pd's box lets through {done.stdout}: {done.stderr}"
    assert done.stderr.split("\n")[:2] == ["reads its key", "writes its sockets"], done.stderr


OLDER = """
import sys
from pathlib import Path
from swarmnode.base import landlock
from swarmnode.app.daemon.launch import _confine
from swarmnode.app.daemon.options import NodeOptions
home, landlock.abi = Path(sys.argv[1]), lambda: int(sys.argv[2])
print(_confine(NodeOptions("0" * 64, (), None, "", home / "node", 0, home / ".cache" / "swarmnode", "")))
try:
    print((home / ".ssh" / "id").read_text())
except PermissionError:
    print("closed")
"""


OLD = [(-1, "6.2", "secret"), (3, "6.12", "closed"), (4, "6.12", "closed"), (5, "6.12", "closed")]


@pytest.mark.parametrize(("abi", "told", "read"), OLD)
def test_a_node_starts_on_an_older_kernel_and_says_what_it_lacks(
    abi: int, told: str, read: str, outside: list[str]
) -> None:
    if abi > landlock.abi():
        pytest.skip("this kernel is older still")
    environment = {**os.environ, "HOME": outside[0]}
    done = subprocess.run(
        [sys.executable, "-c", OLDER, outside[0], str(abi)], env=environment, capture_output=True, text=True, check=True
    )
    assert f"Linux {told} " in done.stdout and done.stdout.strip().endswith(read), done.stdout
