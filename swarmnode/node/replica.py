"""A node's copy of a stage, whole: the model's arithmetic with the outer optimizer's slow weights beside it."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.errors import RemoteFault
from swarmnode.gossip.outer import DesLoc, Outer, outer
from swarmnode.gossip.robust import GUARDED
from swarmnode.manifest import Manifest
from swarmnode.model.average import RunningMean
from swarmnode.model.device import free_nbytes
from swarmnode.model.section import ITEMSIZE, PACKED_ITEMSIZE, SECTIONS, section_sizes
from swarmnode.model.split import Part, split
from swarmnode.model.stage import BUMP_STEPS, StageReplica
from swarmnode.model.stash import instead
from swarmnode.model.tensor import check_finite, decode
from swarmnode.ports import Draft, LossResult, Neighbour, OuterReport, Packet, State, StepReport, Tape, WireTensor
from swarmnode.recovery import checkfree
from swarmnode.recovery.second import apart


class TorchReplica:
    """`ports.Replica` on `device`, fresh from the manifest's seed: fast weights in `stage`, slow ones in `outer`."""

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        autocast: bool = False,
        sender: str = "",
    ) -> None:
        """`sender`, the peer id, decides how lossy codecs round: replicas should not all round alike."""
        self.stage = StageReplica(manifest, stage, device, dtype, autocast=autocast)
        # Autograd is not told of outer steps (`data`): tapes find theta as it was, see model/stash.py.
        self.outer: Outer = outer(manifest.gossip, self.stage.theta.data, sender)
        share = manifest.inner.average_share
        self.average = RunningMean(share) if share > 0.0 else None
        self._sizes = self.sizes_of(stage)
        assert self._sizes == {name: flat.numel() for name, flat in self._flats().items()}, self._sizes
        if isinstance(self.outer, DesLoc):
            self.outer.attend(self.stage.exp_avg, self.stage.exp_avg_sq)
        if manifest.gossip.acceptance == GUARDED:
            self.stage.keeps_probe, self.outer.probe = True, self.stage.probe

    @property
    def parameters(self) -> int:
        """Elements in the flat buffer."""
        return self.stage.parameters

    @property
    def accumulated(self) -> int:
        """Samples whose gradient waits for the next inner step."""
        return self.stage.accumulated

    @property
    def recomputed(self) -> int:
        """Tapes run forward again so far."""
        return self.stage.recomputed

    @property
    def clipped(self) -> int:
        """See ports.Replica."""
        return self.stage.incoming.clips

    @property
    def spare_nbytes(self) -> int:
        """See ports.Replica."""
        return free_nbytes(str(self.stage.device)) or 0

    @property
    def inner_steps(self) -> int:
        """Inner steps behind these weights, those before a download included."""
        return self.stage.inner_steps

    @property
    def message_nbytes(self) -> int:
        """Bytes of tensors in a round's message, at most."""
        return self.outer.message_nbytes

    def forward(
        self, x: WireTensor, *, keep: bool, graph: bool = True, tokens: WireTensor | None = None
    ) -> tuple[WireTensor, Tape | None]:
        with contextlib.nullcontext() if keep else self._averaged():
            return self.stage.forward(x, keep=keep, graph=graph, tokens=tokens)

    def backward(self, tape: Tape, gradient: WireTensor, samples: int, *, accumulate: bool = True) -> WireTensor | None:
        return self.stage.backward(tape, gradient, samples, accumulate=accumulate)

    def loss(
        self, x: WireTensor, tokens: WireTensor, samples: int, *, train: bool, accumulate: bool = True
    ) -> LossResult:
        with contextlib.nullcontext() if train else self._averaged():
            return self.stage.loss(x, tokens, samples, train=train, accumulate=accumulate)

    def fingerprint(self, tensor: WireTensor) -> bytes:
        """See ports.Replica."""
        found = hashlib.sha256(f"{tensor.dtype} {tensor.codec} {tensor.shape}".encode())
        found.update(tensor.data)
        return found.digest()

    def cosine(self, one: WireTensor, other: WireTensor, samples: int) -> float:
        """See ports.Replica."""
        return self.stage.cosine(one, other, samples)

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        """Meanwhile the weights are the running mean, if there is one: held-out losses are of what is exported."""
        if self.average is None or self.average.value is None:
            return contextlib.nullcontext()
        return instead(self.stage.theta, self.average.value)

    def release(self, tape: Tape) -> None:
        self.stage.release(tape)

    def step(self, samples_total: int, batch: float = math.inf) -> StepReport:
        report = self.stage.step(samples_total, batch)
        if self.average is not None:
            self.average.see(self.stage.theta, samples_total)
        return report

    def message(self, round_index: int) -> list[WireTensor]:
        """Mark the boundary of `round_index` and return what partners need of it; the tensors own their memory."""
        return list(self.draft(round_index).finish())

    def bequest(self, round_index: int) -> Sequence[WireTensor]:
        """See ports.Replica."""
        return self.outer.bequest(round_index)

    def draft(self, round_index: int) -> Draft:
        """The same, before the tensors are written."""
        return self.outer.draft(round_index)

    def apply(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport:
        """See ports.Replica."""
        self.stage.stash.before_step()
        report = self.outer.apply(round_index, own_weight, packets, lone=lone)
        if not lone and not report.believed:
            return report
        # What codecs left of the packets lies partly outside the subspace, and the outer step, which is linear, keeps
        # the parts apart: to project what it gives is to project each packet. The momentum's outer part never reaches
        # what is left of theta and phi, and fades by itself.
        self.stage.hold(self.outer.theta, self.outer.phi)
        return report

    def boundary_digest(self) -> bytes:
        """Of the frozen subspace that the stream is kept in, b"" where there is none: replicas of a run must agree."""
        return b"" if self.stage.subspace is None else self.stage.subspace.digest

    def digest(self) -> bytes:
        """SHA-256 of the slow weights as little-endian float32: equal at two replicas exactly when every bit is."""
        return hashlib.sha256(_bytes(self.outer.phi)).digest()

    @torch.no_grad()
    def snapshot(self, *, packed: bool = False) -> State:
        """A copy of everything that lasts: 12 to 20 bytes a parameter, 8 to 12 when `packed` (model/section.py).
        Gradients not yet stepped with are not part of it."""
        flats = self._flats()
        if packed:
            lead = flats["theta"] - flats["phi"]
            sections = {name: _bfloat16(lead if name == "theta" else flat) for name, flat in flats.items()}
            sections["phi"] = _bytes(flats["phi"].clone())
        else:
            sections = {name: _bytes(flat.clone()) for name, flat in flats.items()}
        stage = self.stage
        return State(sections, stage.inner_steps, stage.gradient_norm, bump_steps=stage.bump_steps, packed=packed)

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Become `state`; gradients accumulated, a marked boundary and tapes are void. Raises RemoteFault, having
        changed nothing, when sections are missing, of the wrong size, not finite, a second moment is negative, or the
        weights are not of this run's subspace."""
        flats = self._flats()
        given = {name: self._section(state, name) for name in self._sizes}
        if state.packed:
            given["theta"] += given["phi"]
            check_finite(given["theta"], "state, section theta")
        if len(state.sections) != len(self._sizes):
            raise RemoteFault(f"state with sections {list(state.sections)}; {', '.join(self._sizes)} belong there")
        if float(given["exp_avg_sq"].min()) < 0.0:
            raise RemoteFault("state with a negative second moment in exp_avg_sq")
        if not 0 <= state.bump_steps <= BUMP_STEPS:
            raise RemoteFault(f"state with {state.bump_steps} steps at a higher rate; 0 to {BUMP_STEPS} are due")
        if state.inner_steps < 0 or not (math.isfinite(state.gradient_norm) and state.gradient_norm >= 0.0):
            raise RemoteFault(f"state after {state.inner_steps} inner steps with gradient norm {state.gradient_norm}")
        self._check_stray(given["theta"], given["phi"])
        for name in ("theta", "exp_avg", "exp_avg_sq"):
            flats[name].copy_(given[name])
        self.outer.reset(given["phi"], given.get("momentum"))
        self.stage.hold(self.stage.theta, self.outer.phi)
        self.stage.moments_loaded()
        self.stage.inner_steps = state.inner_steps
        self.stage.gradient_norm = state.gradient_norm
        self.stage.bump_steps = state.bump_steps
        self.stage.discard()
        self.stage.touched()
        self._average_anew()

    def _average_anew(self) -> None:
        if self.average is not None:
            self.average.forget()

    def sizes_of(self, stage: int) -> dict[str, int]:
        """See ports.Replica."""
        return section_sizes(self.stage.manifest, self._parts()[stage])

    def ends_of(self, stage: int) -> tuple[int, int]:
        """(first element, count) of the embedding or head of `stage`; count 0 for an inner one."""
        return checkfree.ends(self.stage.manifest.model, self._parts()[stage])

    def apart(self, one: memoryview | bytes, other: memoryview | bytes) -> float:
        """See ports.Replica."""
        return apart(one, other)

    @torch.no_grad()
    def rebuild(self, method: str, neighbours: Sequence[Neighbour], ends: memoryview | None) -> None:
        """Become what they make probable (recovery/checkfree.py). Raises RemoteFault, having changed nothing."""
        given: dict[int, Tensor] = {}
        for one in neighbours:
            given[one.stage] = _flat(one.phi, self.sizes_of(one.stage)["phi"], f"slow weights of stage {one.stage}")
        norms = {one.stage: one.gradient_norm for one in neighbours}
        manifest, stage = self.stage.manifest, self.stage.part.stage
        flat = checkfree.rebuild(manifest.model, self._parts(), stage, method, given, norms)
        first, count = self.ends_of(stage)
        if count and ends is None:  # nobody kept them: as they were drawn from the seed
            flat[first : first + count] = self.stage.theta[first : first + count]
        elif count:
            assert ends is not None
            flat[first : first + count] = _flat(ends, count, f"embedding or head of stage {stage}")
        self.stage.theta.copy_(flat)
        self.stage.hold(self.stage.theta)
        self.outer.reset(self.stage.theta)
        self.stage.begin_anew()
        self._average_anew()

    def _parts(self) -> tuple[Part, ...]:
        return split(self.stage.manifest.model, self.stage.manifest.pipeline.stages)

    def _flats(self) -> dict[str, Tensor]:
        """The live buffers of the sections that the run has."""
        stage, slow = self.stage, self.outer
        flats = (stage.theta, slow.phi, slow.momentum, stage.exp_avg, stage.exp_avg_sq)
        return {name: flat for name, flat in zip(SECTIONS, flats, strict=True) if flat.numel()}

    def _check_stray(self, *flats: Tensor) -> None:
        """Raises RemoteFault when the weights `flats` were trained in another subspace than this run's, or in none."""
        if (subspace := self.stage.subspace) is None:
            return
        for flat in flats:
            if (name := subspace.stray(self.stage.named(flat.to(self.stage.theta)))) is not None:
                raise RemoteFault(f"state whose {name} is not in this run's subspace: was it trained in another run?")

    def _section(self, state: State, name: str) -> Tensor:
        """One section of `state` as flat float32 on the CPU, checked; it shares its memory where that is float32."""
        data = state.sections.get(name)
        if data is None:
            raise RemoteFault(f"state without section {name}")
        itemsize, count = PACKED_ITEMSIZE[name] if state.packed else ITEMSIZE, self._sizes[name]
        if data.nbytes != itemsize * count:
            raise RemoteFault(f"state with {data.nbytes} bytes of {name}; {itemsize * count} belong there")
        dtype = "f32" if itemsize == ITEMSIZE else "bf16"
        return _flat(data, count, f"state, section {name}", dtype)


def _bytes(flat: Tensor) -> memoryview:
    """The elements as little-endian float32, sharing memory where they lie so already."""
    return flat.to("cpu", torch.float32).view(torch.uint8).numpy().data.toreadonly()


def _bfloat16(flat: Tensor) -> memoryview:
    """The elements as little-endian bfloat16, rounded to nearest."""
    return flat.to(torch.bfloat16).cpu().view(torch.uint8).numpy().data.toreadonly()


def _flat(data: memoryview, elements: int, what: str, dtype: str = "f32") -> Tensor:
    """`data` as float32 [elements] on the CPU, checked. Raises RemoteFault that names `what`."""
    flat = decode(WireTensor(dtype, (elements,), data)).float()
    check_finite(flat, what)
    return flat
