"""How many samples the whole run has trained: a grow-only counter that any two nodes can merge (design section 5).

One entry a feeder, merged by maximum, so that word of it may travel by any way, twice, late, or out of order, and a
feeder's death loses nothing that anybody heard of.

Entries are bounded. When more feeders are known than fit, those whose entry has not changed for longest are *folded*:
their samples go into a base and their entry is forgotten, but for a local note of what was folded, so that late word of
it is not counted again. On the wire the entry "+" then carries the sender's total, a floor: whoever is below it raises
its own base to meet it. Totals therefore never shrink, and nothing is added twice however often two nodes merge. The
total is exact while no more than `ENTRIES_MAX - 1` feeders have ever been known; beyond that it can be off by what had
been folded somewhere before everybody had heard of it.

Calls carry a few entries only, and the total that the sender knows of. Whoever knows less takes that total until its
own entries say more: rounds begin by totals, and one number spreads faster than hundreds of entries. No total told so
is more than was trained, so that the larger of the two never is either.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping

from swarmnode.bounds import SAMPLES_MAX
from swarmnode.errors import RemoteFault
from swarmnode.ids import PeerId
from swarmnode.wire import record_pb2

ENTRIES_MAX = 4096  # guess: of 60 bytes; all of them travel once, with the state a joiner downloads
# Entries that ride on a call, the newest: 0.5 KiB. With 16 totals are 28 s less late of a round of 500 (simulated:
# thousand), for a tenth more of all CPU time.
NEWS_MAX = 8
FEEDER_CHARACTERS_MAX = 64  # a base58 Ed25519 peer id has 52
FOLDED_MAX = 4096  # guess: feeders whose late word is still recognised, about 0.5 MiB
FLOOR = "+"  # no base58 text contains it


def to_message(samples: Mapping[str, int], into: record_pb2.Progress | None = None) -> record_pb2.Progress:
    """`samples` by feeder as they travel; put into the empty message `into`, if that is given."""
    message = record_pb2.Progress() if into is None else into
    message.feeders.extend(list(samples))
    message.samples.extend(list(samples.values()))
    return message


def to_samples(message: record_pb2.Progress) -> dict[str, int]:
    """Samples by feeder. Raises RemoteFault when it is not as many feeders as counts, each feeder once."""
    feeders, samples = message.feeders[:], message.samples[:]  # slices are lists, read at once
    told = dict(zip(feeders, samples, strict=False))
    if not len(feeders) == len(samples) == len(told):
        raise RemoteFault(
            f"progress of {len(feeders)} feeders, {len(told)} of them distinct, and {len(samples)} counts"
        )
    return told


class Boast(RemoteFault):
    """More samples than the swarm can have trained."""

    def __init__(self, samples: int, top: float) -> None:
        super().__init__(f"progress of {samples} samples; {top:.0f} can have been trained at most")


class Progress:
    """Samples trained, by feeder. `own` is this node's feeder id where it feeds: its entry is never folded."""

    def __init__(self, own: PeerId | None = None, *, entries_max: int = ENTRIES_MAX) -> None:
        assert entries_max >= 2, f"{entries_max} entries; at least 2: one feeder and the floor"
        self._own = own
        self._entries_max = entries_max
        self._samples: dict[str, int] = {}  # the entry changed longest ago comes first
        self._listed = 0  # sum of the entries
        self._folded: dict[str, int] = {}
        self._base = 0
        self._counted = 0  # by `own` in this life
        self.version = 0  # grows with each change of an entry or of the base
        self._base_version = 0
        self._heard = 0  # the largest total that anybody told
        self._total = 0
        self.top = math.inf  # what others say is believed up to here (ceiling.py)

    @property
    def total(self) -> int:
        """Samples of the whole run, as far as known here. Never shrinks."""
        return self._total

    @property
    def feeders(self) -> Mapping[str, int]:
        """Entries not folded."""
        return self._samples

    def add(self, own: PeerId, samples: int) -> int:
        """Count `samples` more by this node's feeder; returns the total. Only a feeder itself may call this."""
        assert samples >= 0, f"{samples} samples cannot be added to a counter that only grows"
        assert self._own is None or own == self._own, f"entry of {own} added to by {self._own}"
        self._own = own
        self._counted += samples
        total = self._samples.get(own, self._folded.get(own, 0)) + samples
        if total > self._samples.get(own, -1):
            self._raise_entries({own: total})
        return self._settle()

    def merge(self, other: Progress) -> int:
        """Learn what `other` knows; returns the total. Idempotent; commutes with other merges as long as nothing was
        folded.

        An entry of our own that is ahead of us was counted in an earlier life of this node (nobody else writes it):
        what was counted in this life goes on top. Raises RemoteFault, and learns nothing, when the total would be
        absurd, Boast when it would be above `top`.
        """
        return self._merge(other._samples, other._sum(), other._heard)

    def merge_wire(self, message: record_pb2.Progress) -> int:
        """`merge` of what `from_wire` would give, and what either raises; most calls carry one."""
        told, total = _checked(message, self._entries_max)
        return self._merge(told, total, message.total)

    def merge_entries(self, told: Mapping[PeerId, int]) -> int:
        """`merge_wire` of many records at once, each of which tells of its own feeder; they are checked."""
        return self._merge(told, sum(told.values()))

    def _merge(self, told: Mapping[str, int] | Mapping[PeerId, int], total: int, heard: int = 0) -> int:
        if self._total + total > SAMPLES_MAX:
            raise RemoteFault(f"progress of {total} samples in all, here {self._total}; at most {SAMPLES_MAX}")
        known = self._samples.get
        news = {feeder: samples for feeder, samples in told.items() if samples > known(feeder, -1)}
        if not news and total <= self._sum() and heard <= self._total:
            return self._total
        if self._own in news:
            news[self._own] += self._counted
        before = sum(known(feeder, self._folded.get(feeder, 0)) for feeder in news)
        if (after := max(self._sum() - before + sum(news.values()), total, heard)) > max(self.top, self._total):
            raise Boast(after, self.top)
        self._heard = max(self._heard, heard)
        self._raise_entries(news)
        self._raise_base(max(0, total - self._sum()))
        return self._settle()

    def to_wire(self) -> record_pb2.Progress:
        """All entries, at most `entries_max` with the floor, which is there only once something was folded."""
        message = to_message(self._samples | {FLOOR: self._sum()} if self._base else self._samples)
        message.total = self._total
        return message

    def news(
        self,
        since: int,
        into: record_pb2.Progress | None = None,
        known: record_pb2.Progress | None = None,
    ) -> record_pb2.Progress:
        """The total, and what has changed after `version` was `since`, the newest NEWS_MAX of it, and is more than
        `known` says. As good as `to_wire` for whoever knows the rest, and small however many feeders there are: each
        tells of itself in its record besides. In the message `into`, if that is given."""
        # So many changes were at most of so many entries; one that changed twice is told beside one too many.
        newest = list(itertools.islice(reversed(self._samples.items()), min(NEWS_MAX, self.version - since)))
        told = dict(reversed(newest))
        # With entries left out, the floor would be counted for them, and they themselves when they come.
        if self._base and self._base_version > since and len(told) < NEWS_MAX:
            told[FLOOR] = self._sum()
        if known is not None and told:
            theirs = dict(zip(known.feeders, known.samples, strict=False))
            told = {feeder: samples for feeder, samples in told.items() if samples > theirs.get(feeder, -1)}
        message = to_message(told, into)
        if known is None or known.total < self._total:
            message.total = self._total
        return message

    def entry(self, feeder: PeerId) -> record_pb2.Progress:
        """Only `feeder`'s entry, if it has one, and the total: for its record."""
        samples = self._samples.get(feeder)
        message = to_message({} if samples is None else {feeder: samples})
        message.total = self._total
        return message

    @classmethod
    def from_wire(cls, message: record_pb2.Progress, *, entries_max: int = ENTRIES_MAX) -> Progress:
        """What a peer knows. Raises RemoteFault for too many entries, an impossible feeder id or count."""
        told, total = _checked(message, entries_max)
        progress = cls(entries_max=entries_max)
        progress._samples = told
        progress._listed, progress._heard = sum(told.values()), message.total
        progress._base = total - progress._sum()
        progress._settle()
        return progress

    def _sum(self) -> int:
        return self._base + self._listed

    def _raise_entries(self, news: dict[str, int]) -> None:
        """Take `news`, each more than its entry. In few steps for many: most calls bring news of most feeders."""
        if self._folded:
            news = {feeder: samples for feeder, samples in news.items() if samples > self._folded.get(feeder, -1)}
            for feeder in self._folded.keys() & news:  # it feeds again: its entry takes back what the base held for it
                self._base -= self._folded.pop(feeder)
        before = self._samples.pop  # they go to the end
        self._listed += sum(news.values()) - sum([before(feeder, 0) for feeder in news])
        self._samples.update(zip(map(sys.intern, news), news.values(), strict=True))
        self.version += len(news)

    def _raise_base(self, samples: int) -> None:
        if samples:
            self._base += samples
            self.version += 1
            self._base_version = self.version

    def _settle(self) -> int:
        """Fold what does not fit, then take the new total."""
        if len(self._samples) > self._entries_max - 1:
            idle = [feeder for feeder in self._samples if feeder != self._own]
            for feeder in idle[: len(self._samples) - (self._entries_max - 1)]:
                samples = self._samples.pop(feeder)
                self._listed -= samples
                self._folded[feeder] = samples
                self._raise_base(samples)
            for feeder in list(self._folded)[: max(0, len(self._folded) - FOLDED_MAX)]:
                del self._folded[feeder]
        total = max(self._sum(), self._heard)
        assert total >= self._total, f"samples of the run shrank from {self._total} to {total}"
        self._total = total
        return total


def _checked(message: record_pb2.Progress, entries_max: int) -> tuple[dict[str, int], int]:
    """(entries, their sum or the floor if that is more) of a peer's message. Raises RemoteFault, see
    `Progress.from_wire`."""
    if (count := len(message.feeders)) > entries_max:
        raise RemoteFault(f"progress of {count} entries; at most {entries_max}")
    told = to_samples(message)
    if told and ((wrong := max(map(len, told))) > FEEDER_CHARACTERS_MAX or (wrong := min(map(len, told))) == 0):
        raise RemoteFault(f"progress names a feeder of {wrong} characters; 1 to {FEEDER_CHARACTERS_MAX}")
    floor = told.pop(FLOOR, 0)
    if (known := max(listed := sum(told.values()), floor, message.total)) > SAMPLES_MAX:
        raise RemoteFault(f"progress of {known} samples in all; at most {SAMPLES_MAX}")
    return told, max(floor, listed)
