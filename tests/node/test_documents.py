"""Whole nodes train on documents read apart, with a loss mask: as one process would, and checked by each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from swarmnode.data.sample import SampleBatch, counted_targets
from swarmnode.manifest import Manifest
from swarmnode.model.stage import StageReplica
from swarmnode.ports import WireTensor
from tests.support.village import Numbers, manifest, village


class Documents(Numbers):
    """Documents of 7 tokens, 0 at their end; in every third sample half does not count, in every seventh nothing."""

    def train(self, indices: Sequence[int]) -> WireTensor:
        tokens = self.tokens(indices)
        tokens = np.where(tokens % 7, tokens, 0).astype("<u2")
        mask = np.ones(tokens.shape, np.bool_)
        mask[np.asarray(indices) % 3 == 0, ::2] = False
        mask[np.asarray(indices) % 7 == 0] = False
        return SampleBatch(tokens, mask).to_wire()


def documents(run: Manifest) -> Manifest:
    return replace(run, data=replace(run.data, documents="masked"))


async def test_a_pipeline_of_whole_nodes_is_one_process() -> None:
    """Equal to 1e-5 after 12 inner steps, loss included: what counts is known at every stage."""
    run = documents(manifest(method="none", window_max=1))
    limits = replace(run.limits, record_ttl_s=60.0, hop_timeout_min_s=60.0, microbatch_timeout_s=100.0)
    run = replace(run, limits=limits)

    async with village(run, Documents, stages=(0, 1, 2)) as v:
        await v.until(lambda: v.total() >= 12 * run.inner.inner_batch, "12 inner steps")
        await v.leave()
    replicas = [p.replica for p in v.people]
    assert replicas[0] is not None
    steps, text, size = replicas[0].inner_steps, Documents(run), run.inner.microbatch
    alone = [StageReplica(run, stage) for stage in range(3)]
    for first in range(0, steps * run.inner.inner_batch, size):
        tokens = text.train(range(first, first + size))
        y0, tape0 = alone[0].forward(tokens, keep=True)
        y1, tape1 = alone[1].forward(y0, keep=True, tokens=tokens)
        result = alone[2].loss(y1, tokens, size, train=True)
        assert tape0 is not None and tape1 is not None and result.gradient is not None
        dy1 = alone[1].backward(tape1, result.gradient, size)
        assert dy1 is not None
        alone[0].backward(tape0, dy1, size)
        if alone[0].accumulated >= run.inner.inner_batch:
            for each in alone:
                each.step(first)
    for each, replica in zip(alone, replicas, strict=True):
        assert replica is not None and replica.inner_steps == steps
        torch.testing.assert_close(replica.stage.theta, each.theta, rtol=0, atol=1e-5)
    fed, done = [text.train(range(first, first + size)) for first in range(0, v.total(), size)], v.people[0].quiet.total
    assert done("swarmnode_tokens_total") == sum(counted_targets(tokens, 0) for tokens in fed)
    assert done("swarmnode_samples_total") == v.total(), "samples are counted whatever counts in them"


async def test_honest_nodes_confirm_each_other_and_a_false_mask_is_found_out() -> None:
    """A feeder that has prompts trained as if they were answers sends no other tokens, only another mask."""
    run = documents(manifest(stages=2))
    run = replace(run, pipeline=replace(run.pipeline, audit_share=0.2))

    async with village(run, Documents, stages=(0, 0, 1, 1, 1)) as v:

        def found(outcome: str) -> float:
            return sum(person.quiet.total("swarmnode_audits_total", outcome=outcome) for person in v.people)

        def excluded() -> set[str]:
            events = [one for person in v.people for one in person.quiet.events]
            return {str(fields["peer"]) for event, fields in events if event == "peer.excluded"}

        await v.until(lambda: found("right") >= 12, "answers are checked")
        assert not excluded() and found("wrong") == 0
        liar = v.people[0]
        run_microbatch = liar.served.hop.run_microbatch

        async def lying(process, x, tokens, *rest):  # type: ignore[no-untyped-def]
            ids = np.frombuffer(tokens.data, "<u4").reshape(tokens.shape) & 0x7FFFFFFF
            unmasked = replace(tokens, data=ids.tobytes())
            return await run_microbatch(process, unmasked, unmasked, *rest)

        liar.served.hop.run_microbatch = lying  # type: ignore[method-assign]
        await v.until(lambda: liar.node.me in excluded(), "the false mask is found out")
        assert excluded() == {liar.node.me}
