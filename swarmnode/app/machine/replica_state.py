"""The state of a replica: its sections, copies of them for others, and the weights that it begins with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import stage_name
from swarmnode.base.parted_work import Parts
from swarmnode.base.ports import Neighbour, State, WireTensor
from swarmnode.model.running_mean import RunningMean
from swarmnode.model.section import SECTIONS, section_sizes
from swarmnode.model.split import TABLE, ends, is_writer, stages_of
from swarmnode.model.stage import BUMP_STEPS, StageReplica
from swarmnode.model.state_stream import Buffers, GivenState, Part, section_parts, spans_of
from swarmnode.model.tensor import check_finite, decode, decode_flat, encode
from swarmnode.run.manifest import from_base
from swarmnode.train.gossip.outer import Outer

if TYPE_CHECKING:
    from swarmnode.model.tied_table import TiedTable


class ReplicaState:
    """Fast weights and moments of `stage`, slow weights and momentum of `outer`. Other weights end the running mean
    `average`, if there is one."""

    def __init__(self, stage: StageReplica, outer: Outer, average: RunningMean | None, buffers: Buffers) -> None:
        """`buffers` makes room for copies."""
        self._stage = stage
        self._outer = outer
        self._average = average
        self._buffers = buffers
        self._stages = stages_of(stage.manifest)
        self._sizes = self.sizes_of(stage.part.stage)
        self.tied: TiedTable | None = None  # where both ends of the pipeline train a tied model's table
        if "table" in self._sizes:
            from swarmnode.model.tied_table import TiedTable  # few models have one that two stages train

            at = slice(*spans_of(stage.shapes, TABLE.__eq__)[0])
            self.tied = TiedTable(outer.phi[at], outer.theta[at], first=stage.part.has_embedding)
        sizes = {name: len(part) for name, part in self._parts().items()}
        assert self._sizes == sizes, (self._sizes, sizes)

    def sizes_of(self, stage: int) -> dict[str, int]:
        """Elements of each section of `stage`."""
        return section_sizes(self._stage.manifest, self._stages[stage])

    def ends_of(self, stage: int) -> tuple[int, int]:
        """(first element, count) of the embedding or head of `stage`; count 0 for an inner stage, and if the base
        model has them."""
        if from_base(self._stage.manifest):
            return 0, 0
        return ends(self._stage.manifest.model, self._stages[stage])

    def _parts(self) -> dict[str, Part]:
        """The live buffers of the run's sections."""
        outer = self._outer
        parts: dict[str, Part] = {"theta": self._stage.theta.data, "phi": outer.phi, "momentum": outer.momentum}
        parts |= self._stage.moments
        if self.tied is not None:
            parts["table"] = self.tied
        return {name: parts[name] for name in SECTIONS if name in parts and len(parts[name])}

    # ---- copies

    def copied(self, packed: bool, only: Sequence[str]) -> Parts[State]:
        """A copy of the sections `only`, of all if none is given: 12 to 20 bytes a parameter, 8 to 12 if `packed`
        (model/section.py). Accumulated gradients are not included."""
        stage = self._stage
        parts = self._parts()
        at_once = spans_of(stage.shapes, is_writer) if stage.subspace is not None else ()  # or they leave the span
        sections = yield from section_parts(
            parts, tuple(only or parts), self._buffers, packed=packed, theta_at_once=at_once
        )
        return State(sections, stage.inner_steps, stage.gradient_norm, bump_steps=stage.bump_steps, packed=packed)

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Adopt `state`. Raises RemoteFault, with nothing changed, if sections are missing, of the wrong size or not
        finite, a second moment is negative or, as sent and where rounds mix none, too small for its first, or weights
        are outside this run's subspace."""
        sections = GivenState(state, self._sizes)
        self._check(state, sections)
        parts = self._parts()
        for name in ("theta", "exp_avg", "exp_avg_sq"):
            if name in sections.sections:
                sections.copy_to(name, parts[name])
        self._outer.reset(sections.sections["phi"], sections.sections.get("momentum"))
        if self.tied is not None:
            sections.copy_to("table", self.tied)
        if sections.outer_alone:
            self._stage.theta.data.copy_(self._outer.phi)
        self._stage.hold(self._stage.theta, self._outer.phi)
        self._stage.loaded(state.inner_steps, state.gradient_norm, state.bump_steps, fresh=sections.outer_alone)
        self._restart_mean()

    def _check(self, state: State, sections: GivenState) -> None:
        """Raises RemoteFault if numbers of `state`, whose `sections` these are, can be no state of this stage."""
        sections.check()
        if not 0 <= state.bump_steps <= BUMP_STEPS:
            raise RemoteFault(f"state with {state.bump_steps} steps at a higher rate; expected 0 to {BUMP_STEPS}")
        if state.inner_steps < 0 or not (math.isfinite(state.gradient_norm) and state.gradient_norm >= 0.0):
            raise RemoteFault(f"state after {state.inner_steps} inner steps with gradient norm {state.gradient_norm}")
        stage = self._stage
        if stage.subspace is not None:
            for section in ("theta", "phi") if "theta" in sections.sections else ("phi",):
                name = stage.subspace.stray(sections.by_name(section, stage.shapes))
                if name is not None:
                    raise RemoteFault(
                        f"state whose {name} is not in this run's subspace: was it trained in another run?"
                    )
        if state.packed and "exp_avg_sq" in sections.sections and not self._outer.averages_moments:
            sections.check_moments(stage.manifest, stage.part)

    # ---- beginnings

    def draw_weights(self) -> None:
        """Begin with the weights drawn from the manifest's seed."""
        self._stage.draw_weights()
        self._outer.reset(self._stage.theta)
        if self.tied is not None:
            self.tied.begin()
        self._restart_mean()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again with what the run begins with."""
        self._stage.initialize()
        self._begin(raised=False)

    @torch.no_grad()
    def place_weights(self, name: str, first: int, values: WireTensor) -> None:
        """Write `values` into the parameter `name` from its element `first` on. Raises RemoteFault."""
        stage = self._stage
        flat = decode(values).view(-1)
        check_finite(flat, f"weights of {name}")
        if stage.frozen is not None:
            stage.frozen.place(name, first, flat)
            return
        stage.named(stage.theta)[name].view(-1)[first : first + flat.numel()].copy_(flat)

    @torch.no_grad()
    def begin_placed(self) -> None:
        """Begin with the weights that were placed; adapters stay as they are."""
        if self._stage.frozen is not None:
            self._stage.touched()
            return
        self._begin(raised=False)

    @torch.no_grad()
    def rebuild(self, method: str, neighbours: Sequence[Neighbour], mirrored: memoryview | None) -> None:
        """Begin with weights made of the neighbours' (keep/recovery/checkfree.py). Raises RemoteFault, with nothing
        changed."""
        from swarmnode.keep.recovery import checkfree  # few stages are rebuilt

        stage = self._stage.part.stage
        tensors: dict[int, Tensor] = {}
        for one in neighbours:
            tensors[one.stage] = decode_flat(
                one.phi, self.sizes_of(one.stage)["phi"], f"slow weights of {stage_name(one.stage)}"
            )
        norms = {one.stage: one.gradient_norm for one in neighbours}
        flat = checkfree.rebuild(self._stage.manifest.model, self._stages, stage, method, tensors, norms)
        first, count = self.ends_of(stage)
        if count and mirrored is not None:
            flat[first : first + count] = decode_flat(mirrored, count, f"embedding or head of {stage_name(stage)}")
        elif count:  # no neighbour kept them: use the values drawn from the seed
            if self._stage.undrawn:
                self.draw_weights()
            flat[first : first + count] = self._stage.theta[first : first + count]
        self._stage.theta.copy_(flat)
        self._begin(raised=True)
        if self.tied is not None and mirrored is not None:
            self.tied.begin(known=False)

    def _begin(self, *, raised: bool) -> None:
        """Slow weights and a tied table follow the fast ones; `raised`: at a higher rate for a while."""
        self._stage.hold(self._stage.theta)
        self._outer.reset(self._stage.theta)
        if self.tied is not None:
            self.tied.begin()
        self._stage.begin_anew(raised=raised)
        self._restart_mean()

    def _restart_mean(self) -> None:
        if self._average is not None:
            self._average.forget()

    # ---- the table of a tied model

    @torch.no_grad()
    def table_part(self) -> WireTensor:
        """This end's part of the table."""
        assert self.tied is not None
        return encode(self.tied.read(0, len(self.tied)).to(torch.float16))

    @torch.no_grad()
    def take_table(self, other: WireTensor) -> bool:
        """Take the `other` end's part. False, and nothing is done, within a round. Raises RemoteFault."""
        assert self.tied is not None
        if other.dtype != "f16" or tuple(other.shape) != (len(self.tied),):
            raise RemoteFault(f"a tied table of {other.shape} {other.dtype[:8]}; ours has {len(self.tied)} f16")
        theirs = decode(other)
        check_finite(theirs, "the other end's part of the tied table")
        if self._outer.round is not None:
            return False
        self._stage.stash.before_step(inner=False)
        self.tied.take(theirs)
        return True
