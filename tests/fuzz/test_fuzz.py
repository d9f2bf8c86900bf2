"""Seconds' worth of fuzzing: damaged valid inputs, and what Hypothesis thinks of. `python -m tests.fuzz` does more."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmnode.base.ids import seeded
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
    **dict.fromkeys(("base/header.py",), "frame"),
    **dict.fromkeys(
        ("net/membership/record.py", "train/node/piggyback.py", "net/transport/record_book.py"), "record inside"
    ),
    "net/transport/directory.py": "record",
    **dict.fromkeys(
        ("run/admission/access.py", "run/admission/admission.py", "train/node/access_list.py"), "access list inside"
    ),
    **dict.fromkeys(("app/daemon/admission.py", "run/manifest/issued.py"), OWN),
    "run/admission/invite.py": "invite",
    "run/admission/amendment.py": "amendment inside",
    "app/daemon/archive.py": "warrant",
    "run/manifest/signed.py": "manifest inside",
    "run/manifest/text.py": "manifest",
    "app/local/model_source.py": "signed manifest",
    "app/control/verb.py": "control message",
    "app/dashboard/totals.py": "receipt",
    "app/local/contribution.py": "receipt line",
    "app/local/chat_page.py": "question",
    "app/local/starter.py": "recipe",
    "data/index.py": "index",
    "data/base_index.py": "base index",
    "data/base_maker.py": "safetensors header",
    "keep/recovery/tensorfile.py": "tensor file",
    "keep/recovery/checkpoint.py": "checkpoint",
    **dict.fromkeys(("data/tokens.py", "data/tokenizer_file.py", "model/gather.py"), "small file"),
    **dict.fromkeys(("data/arrow_row.py", "data/input_folder.py"), OWN),
    **dict.fromkeys(
        ("data/document_row.py", "data/message.py", "data/set_maker.py", "app/machine/receipt_store.py"), OWN
    ),
    **dict.fromkeys(("app/dashboard/history.py", "app/dashboard/server.py", "app/dashboard/run_report.py"), OWN),
    **dict.fromkeys(
        (
            "keep/recovery/archive.py",
            "app/cli/owner.py",
            "app/cli/look.py",
            "app/cli/quickstart.py",
            "app/cli/schema.py",
            "net/transport/contact.py",
        ),
        OWN,
    ),
    **dict.fromkeys(
        ("app/cli/option/config_file.py", "app/cli/manifest.py", "app/api.py", "app/daemon/process.py"), OWN
    ),
    **dict.fromkeys(
        ("base/damaged_file.py", "app/daemon/ready_file.py", "app/machine/sensors.py", "app/local/node_page.py"), OWN
    ),
    **dict.fromkeys(("net/transport/dial_filter.py",), CHILD),
    **dict.fromkeys(
        ("app/local/fork_server.py", "app/control/client.py", "app/cli/init.py", "train/node/notice.py"), CHILD
    ),
}


def test_every_module_that_parses_has_a_target_or_a_reason() -> None:
    found = set()
    for package in ("swarmnode", "swarmnode_methods"):
        for path in (ROOT / package).rglob("*.py"):
            if "wire" not in path.parts and PARSES.search(path.read_text()):
                found.add(path.relative_to(ROOT / package).as_posix())
    assert found == set(PARSERS), "a parser without a line here, or a line without a parser"
    assert set(PARSERS.values()) <= {*NAMES, OWN, CHILD}
