"""Seconds' worth of fuzzing: damaged valid inputs, and what Hypothesis thinks of. `python -m tests.fuzz` does more."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmnode.ids import seeded
from tests.fuzz.mutate import inputs
from tests.fuzz.targets import targets

ROOT = Path(__file__).parents[2]
NAMES = tuple(targets())
COUNT = {"amendment inside": 200, "manifest": 300, "manifest inside": 300, "packet": 300}  # slower ones


@pytest.mark.parametrize("name", NAMES)
def test_damaged_input_is_refused_quietly(name: str) -> None:
    target = targets()[name]
    for raw in inputs(target.seeds, COUNT.get(name, 1500), seeded("fuzz", name), target.tokens):
        target.take(raw)


@pytest.mark.parametrize("name", NAMES)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(raw=st.binary(max_size=300))
def test_any_bytes_are_refused_quietly(name: str, raw: bytes) -> None:
    targets()[name].take(raw)


PARSES = re.compile(
    r"(json|tomllib|MSGPackSerializer)\.loads|bounds\.(parse|opened)\(|unpack_from|object_of|read_own_json\("
)
OWN = "written by this user or its own processes"
CHILD = "what a child or service of this machine says"
PARSERS = {
    **dict.fromkeys(("header.py",), "frame"),
    **dict.fromkeys(("membership/record.py", "node/piggyback.py", "transport/record_book.py"), "record inside"),
    "transport/directory.py": "record",
    **dict.fromkeys(("membership/access.py", "membership/admission.py", "node/access_list.py"), "access list inside"),
    **dict.fromkeys(("daemon/admission.py", "manifest/issued.py"), OWN),
    "membership/invite.py": "invite",
    "membership/amendment.py": "amendment inside",
    "daemon/archive.py": "warrant",
    "manifest/signed.py": "manifest inside",
    "manifest/text.py": "manifest",
    "local/model_source.py": "signed manifest",
    "control/verb.py": "control message",
    "dashboard/totals.py": "receipt",
    "local/contribution.py": "receipt line",
    "local/chat_page.py": "question",
    "local/starter.py": "recipe",
    "data/index.py": "index",
    "data/base_index.py": "base index",
    "data/base_maker.py": "safetensors header",
    "recovery/tensorfile.py": "tensor file",
    "recovery/checkpoint.py": "checkpoint",
    **dict.fromkeys(("data/tokens.py", "data/tokenizer_file.py", "model/gather.py"), "small file"),
    **dict.fromkeys(("data/arrow_row.py", "data/input_folder.py"), OWN),
    **dict.fromkeys(("data/document_row.py", "data/set_maker.py", "machine/receipt_store.py"), OWN),
    **dict.fromkeys(("dashboard/history.py", "dashboard/server.py", "dashboard/run_report.py"), OWN),
    **dict.fromkeys(
        ("recovery/archive.py", "cli/owner.py", "cli/look.py", "cli/quickstart.py", "transport/contact.py"), OWN
    ),
    **dict.fromkeys(("cli/option/config_file.py", "cli/manifest.py", "api.py", "daemon/process.py"), OWN),
    **dict.fromkeys(("damaged_file.py", "daemon/ready_file.py", "machine/sensors.py", "local/node_page.py"), OWN),
    **dict.fromkeys(("transport/dial_filter.py",), CHILD),
    **dict.fromkeys(("local/fork_server.py", "control/client.py", "cli/init.py", "node/notice.py"), CHILD),
}


def test_every_module_that_parses_has_a_target_or_a_reason() -> None:
    found = set()
    for package in ("swarmnode", "swarmnode_methods"):
        for path in (ROOT / package).rglob("*.py"):
            if "wire" not in path.parts and PARSES.search(path.read_text()):
                found.add(path.relative_to(ROOT / package).as_posix())
    assert found == set(PARSERS), "a parser without a line here, or a line without a parser"
    assert set(PARSERS.values()) <= {*NAMES, OWN, CHILD}
