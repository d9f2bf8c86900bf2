"""Replicas that train some experts each beside replicas that train all: held-out loss, bytes and memory on the same
text, seeds and number of steps. `swarmnode bench experts` prints a table.

Every replica has a small model of experts in one stage, real arithmetic and the real outer step; all of them meet at
the end of each round [SPES, arXiv 2602.11543]. `swarmnode up` on examples/moe-small does the same live.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from swarmnode.bench.method.replica_batch import read_text
from swarmnode.errors import UsageError
from swarmnode.machine.replica import TorchReplica
from swarmnode.manifest import GossipSpec, InnerSpec, Manifest, ModelSpec, PipelineSpec, TrainingSpec
from swarmnode.model.device import use_one_thread
from swarmnode.model.tensor import encode
from swarmnode.ports import Packet, WireTensor

MODEL = ModelSpec(
    layers=3,
    width=96,
    heads=4,
    kv_heads=2,
    context=64,
    experts=8,
    experts_active=2,
    expert_ffn=128,
    router_normalised=True,
    router_balance=0.01,
)
BATCH, INNER_STEPS, HELD_OUT = 8, 8, 128  # samples of a step, steps of a round, held-out samples


def run(
    trained: Sequence[int], replicas: int, rounds: int, seeds: int, text: str | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """{"experts": a row for each of `trained` experts of a layer, the mean over `seeds`}. Raises UsageError."""
    if any(MODEL.experts % one for one in trained):
        raise UsageError(f"--trained: parts of the model's {MODEL.experts} experts, such as 8, 4, 2")
    use_one_thread()
    data = read_text(text)
    rows = []
    for one in trained:
        found = []
        for seed in range(seeds):
            found.append(_measure(one % MODEL.experts, replicas, rounds, seed, data))
            say(f"{one} of {MODEL.experts} experts, seed {seed}: {found[-1]['nats']:.3f} nats")
        row = {key: statistics.fmean(each[key] for each in found) for key in found[0]}
        rows.append({"experts trained by a replica": one, **row})
    return {"experts": rows}


def _manifest(trained: int, seed: int) -> Manifest:
    return Manifest(
        seed=seed,
        model=MODEL,
        pipeline=PipelineSpec(stages=1),
        inner=InnerSpec(microbatch=BATCH, inner_batch=BATCH, decay="constant"),
        gossip=GossipSpec(codec="int8", acceptance="clipped", group=0),
        training=TrainingSpec(experts_trained=trained),
    )


def _measure(
    trained: int, replicas: int, rounds: int, seed: int, data: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]
) -> dict[str, float]:
    manifest, draw = _manifest(trained, seed), np.random.default_rng(seed)
    members = [TorchReplica(manifest, 0, sender=f"replica {number}") for number in range(replicas)]
    sent, samples = 0, 0
    for round_index in range(1, rounds + 1):
        for member in members:
            for _ in range(INNER_STEPS):
                tokens = _tokens(data[0], BATCH, draw)
                member.loss(tokens, tokens, BATCH, train=True)
                member.step(samples + BATCH * replicas)
        samples += BATCH * INNER_STEPS * replicas
        packets = [Packet(1.0, BATCH * INNER_STEPS, m.message(round_index), sender=m.outer.sender) for m in members]
        sent += sum(tensor.nbytes for tensor in packets[0].tensors)
        for number, member in enumerate(members):
            member.apply(round_index, 1.0, packets[:number] + packets[number + 1 :], lone=False)
    held = _tokens(data[1], HELD_OUT, np.random.default_rng(0))
    losses = [member.loss(held, held, HELD_OUT, train=False).loss_sum for member in members]
    one = members[0].stage
    return {
        "nats": statistics.fmean(losses) / (HELD_OUT * MODEL.context),
        "bytes of a packet a parameter": sent / rounds / one.parameters,
        "bytes of gradients and moments a parameter": (one.grad.nbytes + one.exp_avg.nbytes + one.exp_avg_sq.nbytes)
        / one.parameters,
        "blocks trained by somebody": float(len({member.stage.block for member in members})),
    }


def _tokens(text: npt.NDArray[np.uint8], samples: int, draw: np.random.Generator) -> WireTensor:
    """Token ids [samples, T + 1] from random places of `text`."""
    starts = draw.integers(0, len(text) - MODEL.context - 1, samples)
    found = np.stack([text[start : start + MODEL.context + 1] for start in starts]).astype(np.int64)
    return encode(torch.from_numpy(found).to(torch.uint16))
