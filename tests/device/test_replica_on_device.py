"""A replica lives on this machine's accelerator as it does on the CPU; without one, in bfloat16 on the CPU."""

import gc
from collections.abc import Generator, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.errors import Busy
from swarmnode.base.parted_work import run_whole
from swarmnode.base.ports import Packet, State, WireTensor
from swarmnode.model.device import devices, free_nbytes, half_dtype, use_device
from swarmnode.run.manifest import DataSpec, GossipSpec, Manifest, TrainingSpec
from tests.support.tiny_model import FAMILIES, TINY, manifest, token_batch, token_wire

DEVICE = devices()[0]
NEAR = {False: 2e-3, True: 6e-2}  # relative to the CPU's float32; kernels add up in another order, or in 16 bits
COARSE = {"int8": 10.0, "int4_int2": 100.0}  # times as far: other codes where a number lies between two of them
WIDE = replace(TINY, width=64, ffn=128, context=32)
SPARSE = {"experts": 8, "experts_active": 2, "expert_ffn": 32, "shared_expert_ffn": 16, "router_balance": 0.01}

ADAPTERS = replace(
    manifest(WIDE, 2, optimizer="adamw"), training=TrainingSpec(kind="adapters", rank=4, base_format="bf16")
)
RUNS = {
    **{name: manifest(model, 3) for name, model in FAMILIES.items() if not model.experts},
    "adamw": manifest(WIDE, 2, optimizer="adamw"),
    "wide experts": manifest(replace(WIDE, **SPARSE), 2),  # type: ignore[arg-type]
    "narrow experts": manifest(FAMILIES["olmoe"], 2),
    "subspace": manifest(WIDE, 3, "subspace", 16),
    "subspace, adamw": manifest(WIDE, 3, "subspace", 16, optimizer="adamw"),
    "int8": manifest(WIDE, 3, "int8"),
    "int4_int2": manifest(WIDE, 3, "int4_int2"),
    "bf16": manifest(WIDE, 3, "bf16"),
    "documents": replace(manifest(WIDE, 2), data=DataSpec(documents="masked", end_token=3)),
    "adapters": ADAPTERS,
    "int8 base": replace(ADAPTERS, training=replace(ADAPTERS.training, base_format="int8")),
    "4-bit base": replace(ADAPTERS, training=replace(ADAPTERS.training, base_format="nf4")),
}


@pytest.fixture(autouse=True)
def used_device() -> Iterator[None]:
    use_device(DEVICE)
    yield
    use_device("cpu")


def made(run: Manifest, device: str, *, autocast: bool, **options: str) -> list[TorchReplica]:
    return [
        TorchReplica(run, stage, device, autocast=autocast, sender="a", **options)  # type: ignore[arg-type]
        for stage in range(run.pipeline.stages)
    ]


def descend(chain: list[TorchReplica], tokens: WireTensor, *, train: bool = True, late: bool = False) -> float:
    """One microbatch there and back. Returns the summed loss."""
    x = tokens
    tapes = []
    for number, replica in enumerate(chain[:-1]):
        x, tape = replica.forward(x, keep=train, graph=number % 2 == 0, tokens=tokens, late=late)
        tapes.append(tape)
    result = chain[-1].loss(x, tokens, tokens.shape[0], train=train)
    gradient = result.gradient
    for replica, tape in zip(chain[-2::-1], tapes[::-1], strict=True) if train else ():
        assert gradient is not None and tape is not None
        gradient = replica.backward(tape, gradient, tokens.shape[0])
    return result.loss_sum


def life(run: Manifest, device: str, *, autocast: bool, **options: str) -> list[float]:
    """Losses, and gradient norms of inner steps, of a pipeline that trains, meets a second one twice, hands its state
    to a third and trains on there."""
    one, other = (made(run, device, autocast=autocast, **options) for _ in range(2))
    found = list[float]()
    draw = iter(range(100))

    def batch() -> WireTensor:
        return token_wire(token_batch(run.model, seed=next(draw)))

    def step(chain: list[TorchReplica], samples: int) -> None:
        tokens = [batch() for _ in range(2)]
        found.extend(descend(chain, each) for each in tokens)
        found.extend(replica.step(samples).gradient_norm for replica in chain)

    for round_index in (1, 2):
        for chain in (one, other):
            step(chain, 100 * round_index)
            step(chain, 200 * round_index)
        for a, b in zip(one, other, strict=True):
            packets = [Packet(1.0, 8, who.message(round_index), sender=name) for name, who in (("a", a), ("b", b))]
            a.apply(round_index, 1.0, packets[1:], lone=False)
            b.apply(round_index, 1.0, packets[:1], lone=False)
        found.append(descend(one, batch(), train=False))
    third = made(run, device, autocast=autocast, **options)
    for number, (old, new) in enumerate(zip(one, third, strict=True)):
        new.load(_travelled(old.snapshot(packed=number % 2 > 0)))
        assert run.pipeline.boundary == "subspace" or new.digest() == old.digest()  # a load projects, with rounding
    step(third, 1000)
    return found


def _travelled(state: State) -> State:
    """As another machine gets it: sections of their own bytes."""
    return replace(state, sections={name: memoryview(bytes(data)) for name, data in state.sections.items()})


@pytest.mark.parametrize("name", RUNS if DEVICE != "cpu" else ("llama", "subspace", "adapters"))
def test_a_life_is_that_on_the_cpu(name: str) -> None:
    run = RUNS[name]
    wanted = np.array(life(run, "cpu", autocast=False))
    for autocast in (False, True) if DEVICE != "cpu" else (True,):
        found = np.array(life(run, DEVICE, autocast=autocast))
        apart = np.abs(found - wanted) / np.abs(wanted)
        assert apart.max() < NEAR[autocast] * COARSE.get(name, 1.0), (autocast, apart.argmax(), apart)


@pytest.mark.parametrize(
    ("state", "optimizer"),
    [("host", "adamw"), ("8bit", "muon")] + ([("8bit", "adamw"), ("host", "muon")] if DEVICE != "cpu" else []),
)
def test_moments_may_lie_elsewhere(state: str, optimizer: str) -> None:
    run = manifest(WIDE, 2, optimizer=optimizer)
    wanted = np.array(life(run, DEVICE, autocast=True))
    found = np.array(life(run, DEVICE, autocast=True, optimizer_state=state))
    assert np.abs(found / wanted - 1.0).max() < NEAR[True]


@pytest.mark.parametrize("documents", ["joined", "masked"])
def test_late_forwards_and_steps_between(documents: str) -> None:
    """A backward uses the weights of its forward, whatever steps came between."""
    run = replace(manifest(WIDE, 2), data=DataSpec(documents=documents, end_token=3))
    (chain,) = [made(run, DEVICE, autocast=True)]
    tokens = [token_wire(token_batch(WIDE, seed=seed)) for seed in range(6)]
    waiting = [chain[0].forward(each, keep=True, graph=seed % 2 > 0, late=True) for seed, each in enumerate(tokens)]
    for number, ((x, tape), each) in enumerate(zip(waiting, tokens, strict=True)):
        assert tape is not None
        result = chain[1].loss(x, each, 4, train=True)
        assert result.gradient is not None
        chain[0].backward(tape, result.gradient, 4)
        if number % 2:
            assert all(replica.step(100 + number).gradient_norm > 0.0 for replica in chain)
    assert chain[0].recomputed == 3


@pytest.mark.skipif(not DEVICE.startswith("cuda"), reason="needs a CUDA device: on the CPU nothing is in parts")
def test_training_goes_on_beside_rounds_and_copies() -> None:
    """An outer step in parts, with a microbatch and an inner step between them, ends where a whole one does; and so
    does a copy of the state."""
    run = replace(manifest(WIDE, 2), gossip=GossipSpec(codec="modular4"))
    tokens = [token_wire(token_batch(WIDE, seed=seed)) for seed in range(3)]
    other = made(run, DEVICE, autocast=True)
    packets = [Packet(1.0, 8, partner.message(1), sender="b") for partner in other]
    ends = []
    for beside in (True, False):
        chain = made(run, DEVICE, autocast=True)
        descend(chain, tokens[0])
        for replica in chain:
            replica.step(100)
            replica.message(1)
        found = []
        for replica, packet in zip(chain, packets, strict=True) if beside else ():
            parts = replica.apply_in_parts(1, 1.0, [packet], lone=False)
            assert isinstance(parts, Generator)
            found.append((parts, next(parts)()))
        descend(chain, tokens[1])
        for replica in chain:
            replica.step(200)
        for parts, value in found:
            with pytest.raises(StopIteration) as end:
                parts.send(value)
            assert end.value.value.believed
        for replica, packet in zip(chain, packets, strict=True) if not beside else ():
            replica.apply(1, 1.0, [packet], lone=False)
        for replica in chain:
            copy = replica.snapshot_in_parts(packed=True)
            assert isinstance(copy, Generator)
            assert _travelled(run_whole(copy)) == _travelled(replica.snapshot(packed=True))
        slow = [float(replica.outer.phi.double().square().sum()) for replica in chain]
        ends.append([descend(chain, tokens[2], train=False), *slow])
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)


def test_weights_are_drawn_alike_everywhere() -> None:
    """Members of a run begin with the same bits, whatever their devices."""
    one, other = (TorchReplica(manifest(WIDE, 2), 0, device, draw=False) for device in ("cpu", DEVICE))
    for replica in (one, other):
        assert replica.undrawn
        replica.draw_weights()
    assert one.digest() == other.digest()
    ones = [replica.stage.theta.cpu() for replica in (one, other)]
    assert torch.equal(*ones)


@pytest.mark.skipif(not DEVICE.startswith("cuda"), reason="needs a CUDA device: its allocator is asked")
class TestMemory:
    """What only a card shows."""

    def test_a_replica_gives_all_back(self) -> None:
        made(manifest(WIDE, 1), DEVICE, autocast=True)[0].draw_weights()  # libraries' own workspaces stay
        gc.collect()
        before = torch.cuda.memory_allocated()
        chain = made(manifest(WIDE, 2), DEVICE, autocast=True)
        descend(chain, token_wire(token_batch(WIDE)))
        assert torch.cuda.memory_allocated() > before
        del chain
        assert torch.cuda.memory_allocated() <= before + (1 << 20)

    def test_memory_that_runs_out_costs_a_microbatch_at_most(self) -> None:
        """A real allocator says no: the microbatch goes on in smaller passes, or is refused as Busy, and the node
        trains on."""
        model = replace(WIDE, layers=8, width=512, heads=8, kv_heads=4, ffn=2048, context=512)
        run = replace(manifest(model, 1), inner=replace(manifest(model, 1).inner, microbatch=32))
        (replica,) = made(run, DEVICE, autocast=True)
        tokens = token_wire(token_batch(model, samples=32))
        wanted = descend([replica], tokens)
        replica.stage.discard()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        try:
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + (400 << 20)) / total)
            before = replica.out_of_memory
            for _ in range(8):
                try:
                    found = descend([replica], tokens)
                except Busy:
                    assert replica.accumulated == 0
                    continue
                break
            assert replica.out_of_memory > before
            assert found == pytest.approx(wanted, rel=1e-2) and replica.accumulated == 32
            assert replica.step(100).gradient_norm > 0.0
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def test_free_memory_is_asked_from_the_driver(self) -> None:
        free = free_nbytes(DEVICE)
        kept = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
        after = free_nbytes(DEVICE)
        assert free is not None and after is not None and free - after >= kept.nbytes // 2
        assert half_dtype(torch.device(DEVICE)) in (torch.bfloat16, torch.float16)
