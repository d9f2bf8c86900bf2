"""int8 and modular codecs: bounds, twins that go element by element, wraps, and nothing believed."""

import contextlib
import hashlib
import math
from dataclasses import replace

import pytest
import torch

from swarmnode.base.errors import ManifestError, RemoteFault
from swarmnode.base.ports import Packet, WireTensor
from swarmnode.train.gossip.compression import Codec, build, codec
from swarmnode.train.gossip.compression.codec import CHUNK, TILE
from swarmnode_methods.modular import ESCAPE_NBYTES, HEADER, Modular4, SpreadObservation
from swarmnode_methods.noloco import NoLoCo
from tests.support.method_tables import without_c

pytestmark = pytest.mark.node  # some seconds

MODULAR = ("modular6", "modular4", "modular3")
NAMES = ("int8", *MODULAR)
SIZES = (1, 63, 64, 65, 1000, CHUNK + 5, TILE + CHUNK + 70)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(size: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(size, generator=generator(seed)) * scale


def three(size: int, seed: int = 0, step: float = 1e-3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(slow weights, the sender's fast ones, the receiver's fast ones), which moved by step / 2 to step everywhere."""
    phi = normal(size, seed)
    moves = torch.empty(2, size).uniform_(0.5, 1.0, generator=generator(seed + 1))
    moves *= torch.empty(2, size).bernoulli_(0.5, generator=generator(seed + 2)) * 2 - 1
    return phi, phi + step * moves[0], phi + step * moves[1]


def block_steps(name: str, flat: torch.Tensor, phi: torch.Tensor) -> torch.Tensor:
    """At least the step of each element's block, [P], of a first message."""
    size = flat.numel()
    padded = torch.zeros(-(-size // 64) * 64)
    padded[:size] = flat if name == "int8" else flat - phi
    scale = 1 / 127 if name == "int8" else 8 / 2 ** int(name[-1])
    largest = padded.view(-1, 64).abs().amax(1)
    if name != "int8":
        largest = largest.clamp(min=float(padded.view(-1, 64)[: max(size // 64, 1)][::16].abs().amax(1).mean()))
    steps = largest * scale * (1 + 2**-7)
    if name != "int8":
        steps = steps.clamp(min=float(flat.abs().max()) * 2.0**-15 * (1 + 2**-7))
    return steps.repeat_interleave(64)[:size] + 1e-30


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_there_and_back(name: str, size: int) -> None:
    phi, flat, ours = three(size)
    sender = codec(name)
    receiver = codec(name)
    tensors = sender.encode(flat, reference=phi, seed=7)
    out = torch.empty(size)
    receiver.decode(tensors, out, ours)
    bound = block_steps(name, flat, phi) * (1.0 if name == "int8" else 0.5)
    assert ((out - flat).abs() <= bound * 1.03 + flat.abs() * 2e-6).all()
    if size >= 1000:
        assert bytes(codec(name).encode(flat, reference=phi, seed=8)[0].data)[40:] != bytes(tensors[0].data)[40:]
        assert abs(float((out - flat).mean())) < 4 * float(bound.mean()) / math.sqrt(3 * size)


def test_layouts_are_frozen() -> None:
    """A change here would make two versions misread each other: it needs a new codec name."""
    flat = torch.arange(130, dtype=torch.float32) / 7 - 9
    found = {
        name: hashlib.sha256(
            bytes(codec(name).encode(flat, reference=flat * 0.999, seed=2**63 + 11)[0].data)
        ).hexdigest()
        for name in NAMES
    }
    assert found == FROZEN
    short = codec("int8").encode(torch.tensor([0.0, 127.0, -127.0, 1.0]), seed=5)[0]
    assert bytes(short.data).hex() == "803f80ff0181"  # step 1.0 as bfloat16; 128, 128 + 127, 128 - 127, 128 + 1


FROZEN = {
    "int8": "c0c0cbcea95837b973fea06f9840be57c1de3ace4f71dfa9df3be0462e91fd01",
    "modular3": "0881f7f4ad2b0a41a6b9b1462621c7cc7f5d4fffe61ab9fc51a7bd53ea3edca9",
    "modular4": "27c2c2dffee91621519a41e06338419881720bd26afe9d949afdbcbc207d90fc",
    "modular6": "b36cef803a0d71cf0c2f1dd0dfadf079658c0c85279e8223721888217cf7598a",
}


def far(size: int, where: int, distance: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three whose fast weights are nearly equal, but one element of the receiver's is `distance` off."""
    phi, flat, ours = three(size)
    ours = ours.clone()
    ours[where] = flat[where] + distance
    return phi, flat, ours


@pytest.mark.parametrize("name", MODULAR)
@pytest.mark.parametrize("distance", [0.03, -0.05, 1.0])
def test_a_wrap_is_seen_and_mended_in_the_next_message(name: str, distance: float) -> None:
    """One element off by more than half the range: its block keeps our values, and is sent in int8 next time."""
    size = 1000
    where = 300
    phi, flat, ours = far(size, where, distance)
    a = codec(name)
    b = codec(name)
    out = torch.empty(size)
    b.decode(a.encode(flat, reference=phi, seed=1), out, ours)
    assert torch.equal(out[256:320], ours[256:320])
    good = torch.ones(size, dtype=torch.bool)
    good[256:320] = False
    assert ((out - flat)[good].abs() < 0.002).all()
    reply = b.encode(ours, reference=phi, seed=2)
    plain = a.encode(flat, reference=phi, seed=3)
    assert reply[0].nbytes == plain[0].nbytes + ESCAPE_NBYTES <= b.nbytes(size)
    a.decode(reply, out, flat)
    assert ((out - ours)[256:320].abs() <= ours[256:320].abs().max() / 120).all()
    assert a.encode(flat, reference=phi, seed=4)[0].nbytes == plain[0].nbytes  # nothing failed at a
    after = b.encode(ours, reference=phi, seed=5)
    assert after[0].nbytes == plain[0].nbytes  # one wrap, one escape


def test_escapes_are_bounded() -> None:
    size = 6400
    phi, flat, ours = three(size)
    coder = Modular4()
    coder.decode(Modular4().encode(flat, reference=phi, seed=1), torch.empty(size), ours + 0.05)
    assert coder.seen.wrapped > 50
    message = coder.encode(ours, reference=phi, seed=2)
    assert message[0].nbytes == coder.nbytes(size)
    coder.check(message, size)


def test_kappa_follows_the_spread() -> None:
    assert SpreadObservation().wanted(12.0, 32.0) == 12.0
    near = SpreadObservation(shares=0.05 * 100, blocks=100)
    assert near.wanted(20.0, 32.0) == pytest.approx(20 + 0.5 * (20 * 0.05 / 0.2 - 20))
    assert near.wanted(6.5, 32.0) == 6.0
    wide = SpreadObservation(shares=0.5 * 100, blocks=100)
    assert wide.wanted(12.0, 32.0) == pytest.approx(12 * 0.5 / 0.2)
    assert SpreadObservation(shares=0.2 * 100, blocks=100, wrapped=4).wanted(12.0, 32.0) == 15.0
    assert wide.wanted(30.0, codec("modular6").kappa_most) == 32.0  # type: ignore[attr-defined]
    assert wide.wanted(30.0, Modular4().kappa_most) == 24.0
    a = Modular4()
    b = Modular4()
    phi, flat, ours = three(20000, step=1e-3)
    # Both moved alike, from elsewhere.
    phi2 = phi + normal(20000, 9, 2e-3)
    ours = ours + normal(20000, 9, 2e-3)
    for round_index in range(6):
        to_b = a.encode(flat, reference=phi, seed=round_index)
        to_a = b.encode(ours, reference=phi2, seed=100 + round_index)
        b.decode(to_b, torch.empty(20000), ours)
        a.decode(to_a, torch.empty(20000), flat)
    assert 12 < a.kappa <= 24 and b.seen.wrapped < 0.01 * b.seen.blocks


def test_a_block_that_stood_still_has_the_step_of_the_mean_block() -> None:
    """What did not move here may have moved at the partner."""
    phi = normal(6400, 1)
    flat = phi + normal(6400, 2, 1e-3)
    flat[640:704] = phi[640:704]
    steps = block_steps("modular4", flat, phi)
    assert float(steps[10]) == pytest.approx(float(steps.mean()), rel=0.2)
    ours = flat.clone()
    ours[640:704] += normal(64, 3, 1e-3)
    out = torch.empty(6400)
    codec("modular4").decode(codec("modular4").encode(flat, reference=phi, seed=1), out, ours)
    assert float((out - flat).abs().max()) <= 0.53 * float(steps.max())


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_nobody_sends_is_refused(name: str) -> None:
    """Below 2^-100, which is bfloat16 0d80: our theta in such steps need not be finite."""
    phi, flat, _ = three(70)
    tensor = codec(name).encode(flat, reference=phi, seed=1)[0]
    at = 0 if name == "int8" else HEADER.size
    for step, refused in ((b"\x80\x0d", False), (b"\x7f\x0d", True), (b"\x00\x00", True)):
        data = bytes(tensor.data)[:at] + step + bytes(tensor.data)[at + 2 :]
        with pytest.raises(RemoteFault, match="a step below") if refused else contextlib.nullcontext():
            codec(name).check([replace(tensor, data=data)], 70)


def of_torch_alone(name: str) -> Codec:
    with without_c(name):
        made = codec(name)
        made.encode(torch.zeros(1), reference=torch.zeros(1))  # now it has the engine, which it shares with another
        return made.another()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("size", "step"),
    [(1, 1e-3), (70, 1e-6), (70, 10.0), (CHUNK + 64, 1e-6), (CHUNK + 64, 10.0), (TILE + CHUNK + 70, 1e-3)],
)
def test_c_and_torch_agree_to_the_bit(name: str, size: int, step: float) -> None:
    if not build(name):
        pytest.skip("no C compiler on this machine")
    phi, flat, ours = three(size, step=step)
    flat[size // 2] += 3 * step  # some blocks wrap, or nearly
    ours[::71] += 7 * step
    fast = codec(name)
    slow = of_torch_alone(name)
    receivers = [codec(name), of_torch_alone(name)]
    for seed in (1, 2**64 - 1):
        messages = [coder.encode(flat, reference=phi, seed=seed) for coder in (fast, slow)]
        assert bytes(messages[0][0].data) == bytes(messages[1][0].data)
        outs = [torch.empty(size) for _ in receivers]
        for receiver, out in zip(receivers, outs, strict=True):
            receiver.decode(messages[0], out, ours)
        assert torch.equal(outs[0], outs[1])
        replies = [receiver.encode(ours, reference=phi, seed=seed - 1) for receiver in receivers]
        assert bytes(replies[0][0].data) == bytes(replies[1][0].data)


def test_modular_needs_gamma_equal_to_beta() -> None:
    with pytest.raises(ManifestError, match="gossip.gamma must equal gossip.beta"):
        NoLoCo(torch.zeros(10), codec("modular4"), 0.5, 0.7, 0.4)


@pytest.mark.parametrize(("name", "bound"), [("modular6", 1.02), ("modular4", 1.1), ("modular3", 1.5)])
def test_pairs_stay_together(name: str, bound: float) -> None:
    """Six replicas that move apart by chance each round: their spread stays about what it is in fp32.
    Without a block's memory of far partners, single blocks drift apart for good: 1.39 times at 6 bits."""
    spreads = {}
    for kind in ("fp32", name):
        replicas = [NoLoCo(normal(4000, 0), codec(kind), 0.5, 0.7, 0.7) for _ in range(6)]
        for i, replica in enumerate(replicas):
            replica.sender = f"r{i}"
        for round_index in range(25):
            for i, replica in enumerate(replicas):
                replica.theta.add_(normal(4000, 1000 + 10 * round_index + i, 1e-3))
            order = torch.randperm(6, generator=generator(round_index)).tolist()
            messages = [replica.message(round_index) for replica in replicas]
            for a, b in zip(order[::2], order[1::2], strict=True):
                replicas[a].apply(round_index, 1.0, [Packet(1.0, 0, messages[b])])
                replicas[b].apply(round_index, 1.0, [Packet(1.0, 0, messages[a])])
        spreads[kind] = float(torch.stack([r.phi for r in replicas]).std(0).mean())
    assert spreads[name] < bound * spreads["fp32"]


@pytest.mark.parametrize("size", SIZES)
def test_products_and_sums_of_packets_are_those_of_the_decoded_ones_with_and_without_c(size: int) -> None:
    packets = [codec("int8").encode(normal(size, number, 1 + number), seed=number) for number in range(3)]
    shares = [0.5, 1.0, 1 / 3]
    like = torch.empty(size)
    room = torch.empty(min(size, 1 << 18))
    decoded = torch.stack([read_all("int8", tensors, size) for tensors in packets])
    found = list[tuple[torch.Tensor, torch.Tensor]]()
    for place in (contextlib.nullcontext(), without_c("int8")):
        with place:
            out = torch.full((size,), math.nan)
            codec("int8").add_up(packets, shares, out, room)
            found.append((codec("int8").products(packets, like, len(room)), out))
    assert all(torch.equal(*both) for both in zip(*found, strict=True)), "to the bit: members must stay equal"
    products, total = found[0]
    torch.testing.assert_close(products, decoded.double() @ decoded.double().T, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total, torch.tensor(shares) @ decoded, rtol=1e-5, atol=1e-6)


def read_all(name: str, tensors: list[WireTensor], size: int) -> torch.Tensor:
    out = torch.empty(size)
    codec(name).decode(tensors, out)
    return out
