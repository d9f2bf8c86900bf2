"""Service of a node that only feeds to auditors: the tokens of samples, to compare with what another feeder sent."""

from __future__ import annotations

import asyncio

from swarmnode.errors import Busy, RemoteFault, Unavailable
from swarmnode.ids import PeerId
from swarmnode.manifest import Manifest
from swarmnode.manifest.check import COUNT_MAX
from swarmnode.membership.place import feeder_place
from swarmnode.pipeline.caller_rate import CallerRate
from swarmnode.pipeline.recompute import CALLERS_MAX, PER_MINUTE_MAX, Text
from swarmnode.pipeline.request_check import check_samples
from swarmnode.ports import Answer, Call
from swarmnode.wire import call_pb2 as wire


class TextService:
    """Handler of method "recompute" at a node without a stage."""

    def __init__(self, manifest: Manifest, text: Text) -> None:
        """`text` returns the tokens [B, T+1] of training samples, None if they are not at hand."""
        self._manifest = manifest
        self._text = text
        self._rate = CallerRate(PER_MINUTE_MAX, CALLERS_MAX)

    async def serve(self, peer: PeerId, call: Call) -> Answer:
        """The tokens of the samples named. Raises RemoteFault for a malformed request, Busy for one too many,
        Unavailable where the text is not at hand."""
        asked = call.header.recompute
        if asked.stage != feeder_place(self._manifest):
            raise RemoteFault(f"hop of stage {asked.stage} sent to a feeder without a stage")
        check_samples(self._manifest, asked.samples, b"", b"")
        if call.tensors or asked.first_sample >= COUNT_MAX:
            raise RemoteFault(f"{len(call.tensors)} tensors for samples from {asked.first_sample}; expected none")
        if not self._rate.admit(peer, asyncio.get_running_loop().time()):
            raise Busy(f"{PER_MINUTE_MAX} texts were read for you within a minute", retry_after_s=10.0)
        tokens = await self._text(range(asked.first_sample, asked.first_sample + asked.samples))
        if tokens is None:
            raise Unavailable("this feeder has not that text at hand")
        return Answer(wire.Reply(recompute=wire.Recomputed()), (tokens,))
