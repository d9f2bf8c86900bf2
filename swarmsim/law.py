"""Laws that must hold during the storm. A broken law ends the world at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from swarmsim.learned import LearnedSamples

LOOKS_MAX = 60  # a look a second or rarer: at least the minute in which a swarm must be one again (issue 37)
LIE = 2**64 - 1
"""The mark of a liar's non-finite activations; fake arithmetic does not notice them."""


class LawBroken(AssertionError):
    """A law was broken; `labels` are the nodes involved."""

    def __init__(self, law: str, what: str, labels: Sequence[str]) -> None:
        super().__init__(f"{law}: {what}")
        self.law = law
        self.labels = list(labels)


class Laws:
    """The events of a world, checked as they come: of replicas, machines and transports."""

    def __init__(self, group: int = 2) -> None:
        """`group`: replicas that meet in a round (gossip.group); 0: all of a stage."""
        self._group = group
        self.broken: list[LawBroken] = []
        self.checks = 0
        self.onesided = 0
        """Exchanges applied by one side only, each explained by a death, a liar or a counted one-sided commit."""
        self.fallbacks = 0
        """Packets taken from a fallback partner, in place of a partner that failed."""
        self.doubled = 0
        """Gradients added by a second replica of a stage. This breaks no law, as the asking node cannot know what was
        done."""
        self.owners: dict[int, str] = {}  # replica number -> label of its node
        self.excused: set[str] = set()  # labels of liars and dead nodes, which are exempt
        self.notified: Callable[[], None] = lambda: None
        self.learned: LearnedSamples | None = None  # kept where no replica dies, whose last samples are lost with it
        self._counted: set[tuple[int, int]] = set()
        self._counted_at: set[tuple[int, int]] = set()  # (stage, mark)
        self._boundary: dict[int, int] = {}
        self._stepped: dict[int, int] = {}
        self._applied: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (replica, round) -> packets
        self._takers: dict[tuple[int, int], set[int]] = {}  # (giver, round) -> replicas that applied its packet
        self._fell_back: dict[tuple[int, int], int] = {}  # (giver, round) -> replica that got its packet as a fallback
        self._helped: dict[tuple[int, int], int] = {}  # (taker, round) -> its fallback partner
        self._late: dict[str, int] = {}  # looks at which a node was too many rounds behind, one after the other
        self._given: set[tuple[int, bytes]] = set()
        self._commits: set[tuple[str, int]] = set()  # (label, round) of counted one-sided commits

    def breaks(self, law: str, what: str, *labels: str) -> None:
        self.broken.append(LawBroken(law, what, labels))
        self.notified()

    def _label(self, replica: int) -> str:
        return self.owners.get(replica, f"replica {replica}")

    # ---- microbatches

    def counted(self, replica: int, stage: int, mark: int, samples: int) -> None:
        """Check that `replica` of `stage` adds the gradient of microbatch `mark` only once."""
        self.checks += 1
        if mark == LIE:
            return
        if self.learned is not None:
            self.learned.trained(replica, stage, mark, samples)
        key = (replica, mark)
        if key in self._counted:
            self.breaks(
                "a microbatch is counted once", f"{mark:#x} twice by {self._label(replica)}", self._label(replica)
            )
        self._counted.add(key)
        self.doubled += (stage, mark) in self._counted_at
        self._counted_at.add((stage, mark))

    def mixed(self, replica: int, sent: int, got: int) -> None:
        """Report a gradient that came back for another microbatch than was sent."""
        label = self._label(replica)
        self.breaks("a gradient belongs to its microbatch", f"{label} sent {sent:#x} and got {got:#x}", label)

    # ---- rounds

    def boundary(self, replica: int, stage: int, round_index: int) -> None:
        """Check that rounds only advance. A round may be marked after a later one that was not applied: a leaving node
        makes its message again for the round that is next at its successor (train/gossip/final_delta.py)."""
        self.checks += 1
        before = self._boundary.get(replica, -1)
        applied = self._stepped.get(replica, -1) >= before
        if round_index == before or (round_index < before and applied):
            label = self._label(replica)
            self.breaks("rounds only go on", f"{label} marked round {round_index} after {before}", label)
        self._boundary[replica] = round_index
        if self.learned is not None:
            self.learned.marked(replica, round_index)

    def applied(self, replica: int, stage: int, round_index: int, packets: Sequence[tuple[int, int]]) -> None:
        """Check the outer step of `replica` in `round_index` with `packets`: (giver, the round it was made in)."""
        self.checks += 1
        self._stepped[replica] = round_index
        self._applied[replica, round_index] = list(packets)
        if self.learned is not None:
            self.learned.record_meeting(replica, packets)
        for giver, made_in in packets:
            other = self._label(giver)
            if not self._took(replica, round_index, giver, made_in):
                continue
            takers = self._takers.setdefault((giver, round_index), set())
            takers.add(replica)
            if self._group and len(takers) >= self._group:
                labels = [self._label(taker) for taker in sorted(takers)]
                what = f"{other} gave its packet of round {round_index} to {', '.join(labels)}"
                self.breaks("a node is in one exchange of its group at a time", what, other, *labels)

    def fell_back(self, replica: int, round_index: int, giver: int, made_in: int) -> None:
        """Check that `replica`, which had no believed partner, took the packet that `giver` made in round `made_in` as
        a fallback."""
        self.checks += 1
        self.fallbacks += 1
        label = self._label(replica)
        other = self._label(giver)
        if not self._took(replica, round_index, giver, made_in):
            return
        taker = self._fell_back.setdefault((giver, round_index), replica)
        helper = self._helped.setdefault((replica, round_index), giver)
        if taker != replica or helper != giver:
            what = f"{other} stood in for the partners of {label} and {self._label(taker)} in round {round_index}"
            if taker == replica:
                what = f"{other} and {self._label(helper)} stood in for one partner of {label} in round {round_index}"
            self.breaks("a packet is given again once", what, label, other)

    def _took(self, replica: int, round_index: int, giver: int, made_in: int) -> bool:
        """Check the laws of every packet; return False if they do not bind one of the two."""
        label = self._label(replica)
        other = self._label(giver)
        if label in self.excused or other in self.excused:
            return False
        if made_in != round_index:
            what = f"{label} applied in round {round_index} what {other} made in round {made_in}"
            self.breaks("no packet of another round is applied", what, label, other)
        if giver == replica:
            self.breaks("a node meets others", f"{label} applied its own packet", label)
        return True

    def left_out(self, label: str, other: str, reason: str) -> None:
        """Check that `label` had reason to exclude `other`."""
        self.checks += 1
        if label not in self.excused and other not in self.excused:
            self.breaks("no honest replica is left out", f"{label} leaves out {other}: {reason}", label, other)

    def commit_unsure(self, label: str, round_index: int) -> None:
        """Record that `label` counted an exchange whose commit may not have arrived."""
        self._commits.add((label, round_index))

    def settle(self) -> None:
        """After the storm, check that all one-sided exchanges are explained. (Apart from them the population mean
        follows NoLoCo's recursion.)"""
        counts: Counter[str] = Counter()
        for (replica, round_index), packets in self._applied.items():
            label = self._label(replica)
            for giver, _ in packets:
                self.checks += 1
                theirs = self._applied.get((giver, round_index))
                if theirs is not None and any(back == replica for back, _ in theirs):
                    continue
                other = self._label(giver)
                accounted = (label, round_index) in self._commits or (other, round_index) in self._commits
                if accounted or theirs is None or label in self.excused or other in self.excused:
                    self.onesided += 1
                    continue
                counts[
                    f"{label} applied round {round_index} of {other}, which did not apply its; no node counted it"
                ] += 1
        for what in counts:
            words = what.split()
            self.breaks("one-sided exchanges are counted", what, words[0], words[5].rstrip(","))

    # ---- state

    def loaded(self, replica: int, giver: int) -> None:
        if self.learned is not None:
            self.learned.loaded(replica, giver)

    def in_weights(self, counted: int, stages: Mapping[int, Iterable[int]], most: int) -> None:
        """Check that at most `most` of the samples `counted` are in the weights of no replica of a stage. `stages` are
        the numbers of their replicas."""
        if self.learned is None:
            return
        for stage, replicas in stages.items():
            self.checks += 1
            learned = self.learned.together(replicas)
            if counted - learned > most:
                what = f"{counted} are counted, stage {stage} has learned {learned}"
                self.breaks("no sample is counted twice", what)

    def given(self, chunks: Sequence[tuple[int, bytes]]) -> None:
        """Record the chunks of a state that a replica gave: (index, hash)."""
        self._given.update(chunks)

    def taken(self, replica: int, chunks: Sequence[tuple[int, bytes]]) -> None:
        self.checks += 1
        if not self._given.issuperset(chunks):
            label = self._label(replica)
            self.breaks("state is what a replica was", f"{label} loaded a state that no replica gave", label)

    def began(self, label: str, trained: int, reason: str) -> None:
        """Check that `label` begins at the seed only where nothing was `trained`, in samples."""
        self.checks += 1
        if trained > 0:
            self.breaks("a run never begins again", f"{label} after {trained} samples: {reason}", label)

    def behind(self, rounds: Mapping[str, int], most: int) -> None:
        """Check that no replica serves weights more than `most` rounds behind the run's newest at LOOKS_MAX looks one
        after the other. `rounds` behind, by label."""
        self.checks += 1
        late = {label: looks + 1 for label, looks in self._late.items() if rounds.get(label, 0) > most}
        self._late = {label: late.get(label, 1) for label, count in rounds.items() if count > most}
        for label, looks in self._late.items():
            if looks > LOOKS_MAX and label not in self.excused:
                self.breaks("who serves is with the run", f"{label} is {rounds[label]} rounds behind", label)

    # ---- processes

    def acted(self, label: str, what: str) -> None:
        self.breaks("who has stopped acts no more", f"{label} {what} after its end", label)

    def bound(self, label: str, what: str, value: int, most: int) -> None:
        self.checks += 1
        if value > most:
            self.breaks("every queue is bounded", f"{label}: {what} is {value}; at most {most}", label)
