"""Work in virtual time is charged what it takes."""

from dataclasses import replace
from typing import Any

import pytest

from swarmnode.model.adapter import trained_count
from swarmnode.model.split import stages_of
from swarmnode.run.gossip_rules import codecs
from swarmnode.run.manifest import GossipSpec, Manifest
from swarmsim.law import Laws
from swarmsim.machine import Meter
from swarmsim.metered_replica import MeteredReplica
from swarmsim.replica import PIECES


class Taking:
    """A replica that takes each piece."""

    def check_piece(self, *piece: Any) -> None:
        pass


def test_a_piece_costs_what_its_codec_takes_to_read_it() -> None:
    """The simulator charged a hash of the whole state for each piece: half a second, seventeen times a step."""
    run = Manifest(gossip=GossipSpec(method="gradient", codec="huffman", group=0, butterfly=True))
    run = replace(run, pipeline=replace(run.pipeline, stages=1))
    (part,) = stages_of(run)
    meter = Meter()
    meter.state_nbytes = 1e9
    laws = Laws.__new__(Laws)
    replica = MeteredReplica(Taking(), run, part, meter, laws, 0, 1.0)  # type: ignore[arg-type]
    replica.check_piece(1, 0, b"", None)
    flops, idle, nbytes, seconds = meter.take()
    assert (flops, idle, nbytes) == (0.0, 0.0, 0.0)
    read_s = 0.5e-9 * codecs()["huffman"].coding_ns * trained_count(run, part)
    assert PIECES * seconds == pytest.approx(read_s)
