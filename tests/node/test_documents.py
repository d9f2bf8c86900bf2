"""Whole nodes on documents read apart, with a loss mask, check each other; test_swarm.py: as one process would."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from swarmnode.base.ports import WireTensor
from swarmnode.data.sample import SampleBatch
from swarmnode.run.manifest import Manifest
from tests.support.village import Numbers, excluded, manifest, village


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


async def test_honest_nodes_confirm_each_other_and_a_false_mask_is_found_out() -> None:
    """A feeder that has prompts trained as if they were answers sends no other tokens, only another mask."""
    run = documents(manifest(stages=2))
    run = replace(run, pipeline=replace(run.pipeline, audit_share=0.5))

    async with village(run, Documents, stages=(0, 0, 1, 1, 1)) as v:

        def found(outcome: str) -> float:
            return sum(person.quiet.total("swarmnode_audits_total", outcome=outcome) for person in v.people)

        await v.until(lambda: found("right") >= 12, "answers are checked")
        assert not any(map(excluded, v.people)) and found("wrong") == 0
        liar = v.people[0]
        run_microbatch = liar.served.hop.run_microbatch

        async def lying(process, x, tokens, *rest):  # type: ignore[no-untyped-def]
            ids = np.frombuffer(tokens.data, "<u4").reshape(tokens.shape) & 0x7FFFFFFF
            unmasked = replace(tokens, data=ids.tobytes())
            return await run_microbatch(process, unmasked, unmasked, *rest)

        liar.served.hop.run_microbatch = lying  # type: ignore[method-assign]
        await v.until(lambda: any(map(excluded, v.people)), "the false mask is found out")
        assert set().union(*map(excluded, v.people)) == {liar.node.me}
