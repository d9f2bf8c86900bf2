"""What must never happen while the storm rages. A law that is broken ends the world at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

LIE = 2**64 - 1
"""The mark on a liar's activations that are not finite; fake arithmetic does not notice."""


class LawBroken(AssertionError):
    """`labels` are the nodes involved."""

    def __init__(self, law: str, what: str, labels: Sequence[str]) -> None:
        super().__init__(f"{law}: {what}")
        self.law = law
        self.labels = list(labels)


class Laws:
    """Implements replica.Witness. Told by wrappers around replicas, machines and transports."""

    def __init__(self, group: int = 2) -> None:
        """`group`: replicas that meet in a round (gossip.group); 0: all of a stage."""
        self._group = group
        self.broken: list[LawBroken] = []
        self.checks = 0
        self.onesided = 0
        """Exchanges applied by one side only, each accounted for by a death, a liar or a counted one-sided commit."""
        self.stoodin = 0
        """Packets taken besides, of replicas that met another one: in place of a partner that failed."""
        self.doubled = 0
        """Gradients added by a second replica of a stage: no law, as who asks again cannot know what was done."""
        self.owners: dict[int, str] = {}  # replica number -> label of the node it is on
        self.excused: set[str] = set()  # labels of liars and of the dead: what they did not do is nobody's fault
        self.notified: Callable[[], None] = lambda: None
        self._counted: set[tuple[int, int]] = set()
        self._counted_at: set[tuple[int, int]] = set()  # (stage, mark)
        self._boundary: dict[int, int] = {}
        self._stepped: dict[int, int] = {}
        self._applied: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (replica, round) -> packets
        self._takers: dict[tuple[int, int], set[int]] = {}  # (giver, round) -> replicas that applied its packet
        self._stood_in: dict[tuple[int, int], int] = {}  # (giver, round) -> who was given its packet besides
        self._helped: dict[tuple[int, int], int] = {}  # (taker, round) -> who gave it one besides
        self._given: set[tuple[int, bytes]] = set()
        self._commits: set[tuple[str, int]] = set()  # (label, round): a one-sided commit that was counted

    def breaks(self, law: str, what: str, *labels: str) -> None:
        self.broken.append(LawBroken(law, what, labels))
        self.notified()

    def _label(self, replica: int) -> str:
        return self.owners.get(replica, f"replica {replica}")

    # ---- microbatches

    def counted(self, replica: int, stage: int, mark: int) -> None:
        """`replica` of `stage` added the gradient of microbatch `mark`."""
        self.checks += 1
        if mark == LIE:
            return
        key = (replica, mark)
        if key in self._counted:
            self.breaks(
                "a microbatch is counted once", f"{mark:#x} twice by {self._label(replica)}", self._label(replica)
            )
        self._counted.add(key)
        self.doubled += (stage, mark) in self._counted_at
        self._counted_at.add((stage, mark))

    def mixed(self, replica: int, sent: int, got: int) -> None:
        """A gradient came back for another microbatch than was sent."""
        label = self._label(replica)
        self.breaks("a gradient belongs to its microbatch", f"{label} sent {sent:#x} and got {got:#x}", label)

    # ---- rounds

    def boundary(self, replica: int, stage: int, round_index: int) -> None:
        """A round may be marked after a later one that was not applied: the message of who leaves is made again for
        the round that is next at whoever takes it (gossip/bequest.py)."""
        self.checks += 1
        before = self._boundary.get(replica, -1)
        applied = self._stepped.get(replica, -1) >= before
        if round_index == before or (round_index < before and applied):
            label = self._label(replica)
            self.breaks("rounds only go on", f"{label} marked round {round_index} after {before}", label)
        self._boundary[replica] = round_index

    def applied(self, replica: int, stage: int, round_index: int, packets: Sequence[tuple[int, int]]) -> None:
        """`replica` took its outer step of `round_index` with `packets`: (giver, the round it was made in)."""
        self.checks += 1
        self._stepped[replica] = round_index
        self._applied[replica, round_index] = list(packets)
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

    def stood_in(self, replica: int, round_index: int, giver: int, made_in: int) -> None:
        """`replica`, who met nobody it believed, took what `giver` made in round `made_in` into its own outer step."""
        self.checks += 1
        self.stoodin += 1
        label, other = self._label(replica), self._label(giver)
        if not self._took(replica, round_index, giver, made_in):
            return
        taker = self._stood_in.setdefault((giver, round_index), replica)
        helper = self._helped.setdefault((replica, round_index), giver)
        if taker != replica or helper != giver:
            what = f"{other} stood in for the partners of {label} and {self._label(taker)} in round {round_index}"
            if taker == replica:
                what = f"{other} and {self._label(helper)} stood in for one partner of {label} in round {round_index}"
            self.breaks("a packet is given again once", what, label, other)

    def _took(self, replica: int, round_index: int, giver: int, made_in: int) -> bool:
        """Laws of every packet taken; False where they do not bind one of the two."""
        label, other = self._label(replica), self._label(giver)
        if label in self.excused or other in self.excused:
            return False
        if made_in != round_index:
            what = f"{label} applied in round {round_index} what {other} made in round {made_in}"
            self.breaks("no packet of another round is applied", what, label, other)
        if giver == replica:
            self.breaks("a node meets others", f"{label} applied its own packet", label)
        return True

    def left_out(self, label: str, other: str, reason: str) -> None:
        """`label` meets `other` no more, for what it sent."""
        self.checks += 1
        if label not in self.excused and other not in self.excused:
            self.breaks("no honest replica is left out", f"{label} leaves out {other}: {reason}", label, other)

    def commit_unsure(self, label: str, round_index: int) -> None:
        """`label` counted an exchange whose commit may not have arrived."""
        self._commits.add((label, round_index))

    def settle(self) -> None:
        """After the storm: what was applied by one side only must be accounted for (the population mean then follows
        NoLoCo's recursion but for these)."""
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
                counts[f"{label} applied round {round_index} of {other}, who did not apply its; nobody counted it"] += 1
        for what in counts:
            words = what.split()
            self.breaks("one-sided exchanges are counted", what, words[0], words[5].rstrip(","))

    # ---- state

    def given(self, chunks: Sequence[tuple[int, bytes]]) -> None:
        """A replica gave a state of these chunks: (index, hash)."""
        self._given.update(chunks)

    def taken(self, replica: int, chunks: Sequence[tuple[int, bytes]]) -> None:
        self.checks += 1
        if not self._given.issuperset(chunks):
            label = self._label(replica)
            self.breaks("state is what a replica was", f"{label} loaded a state that no replica gave", label)

    # ---- processes

    def acted(self, label: str, what: str) -> None:
        self.breaks("who has stopped acts no more", f"{label} {what} after its end", label)

    def bound(self, label: str, what: str, value: int, most: int) -> None:
        self.checks += 1
        if value > most:
            self.breaks("every queue is bounded", f"{label}: {what} is {value}; at most {most}", label)
