"""The number of samples the whole run has trained: a grow-only counter that any two nodes can merge.

It has one entry per feeder, merged by maximum. So updates may arrive by any path, twice, late, or out of order, and a
feeder's death loses nothing that another node has heard.

The number of entries is bounded. When more feeders are known than fit, those whose entry changed longest ago are
*folded*: their samples go into a base and the entry is dropped, except for a local note of the folded amount, so that a
late update is not counted again. On the wire the entry "+" then carries the sender's total, a floor: a node below it
raises its own base to meet it. So totals never shrink, and nothing is added twice however often two nodes merge. The
total is exact while at most `ENTRIES_MAX - 1` feeders have ever been known. Beyond that it can be off by amounts that
were folded somewhere before all nodes had heard of them.

Calls carry only a few entries, and the sender's total. A node with a lower total adopts it until its own entries exceed
it: rounds begin by totals, and one number spreads faster than hundreds of entries. No total so announced exceeds what
was trained, so the larger of two does not either.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping

from swarmnode.base.bounds import SAMPLES_MAX
from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import PeerId
from swarmnode.base.remembered import REMEMBERED_MAX
from swarmnode.base.wire import record_pb2
from swarmnode.base.work import SampleCount

ENTRIES_MAX = REMEMBERED_MAX  # of 60 bytes; all are sent once, with the state a joiner downloads
# The newest entries, sent with a call: 0.5 KiB. With 16 totals are 28 s less late of a round of 500 (simulated:
# thousand), for a tenth more of all CPU time.
NEWS_MAX = 8
FEEDER_CHARACTERS_MAX = 64  # a base58 Ed25519 peer id has 52
FOLDED_MAX = REMEMBERED_MAX  # folded feeders whose late updates are recognised, about 0.5 MiB
FLOOR = "+"  # no base58 text contains it


def to_message(samples: Mapping[str, int], into: record_pb2.Progress | None = None) -> record_pb2.Progress:
    """`samples` by feeder in wire form, in the empty message `into` if given."""
    message = record_pb2.Progress() if into is None else into
    message.feeders.extend(list(samples))
    message.samples.extend(list(samples.values()))
    return message


def to_samples(message: record_pb2.Progress) -> dict[str, int]:
    """Samples by feeder. Raises RemoteFault unless there is one count per feeder and no feeder twice."""
    # Slices are lists, which are read at once.
    feeders = message.feeders[:]
    samples = message.samples[:]
    by_feeder = dict(zip(feeders, samples, strict=False))
    if not len(feeders) == len(samples) == len(by_feeder):
        raise RemoteFault(
            f"progress of {len(feeders)} feeders, {len(by_feeder)} of them distinct, and {len(samples)} counts"
        )
    return by_feeder


class ProgressOverclaim(RemoteFault):
    """A peer claims more samples than the swarm can have trained."""

    def __init__(self, samples: int, top: float) -> None:
        super().__init__(f"progress of {samples} samples; {top:.0f} can have been trained at most")


class Progress:
    """Samples trained, by feeder. `own` is this node's feeder id, if it feeds; its entry is never folded."""

    def __init__(self, own: PeerId | None = None, *, entries_max: int = ENTRIES_MAX) -> None:
        assert entries_max >= 2, f"{entries_max} entries; at least 2: one feeder and the floor"
        self._own = own
        self._entries_max = entries_max
        self.feeders: dict[str, int] = {}  # in the order of their last change, oldest first
        self._listed = 0  # sum of the entries
        self._folded: dict[str, int] = {}
        self._base = 0
        self.counted = SampleCount(0)  # by `own` since start
        self.version = 0  # grows with each change of an entry or of the base
        self._base_version = 0
        self._heard = 0  # the largest total that any peer announced
        self.total = 0  # known samples of the whole run. Never shrinks
        self.top = math.inf  # samples up to which other nodes are believed

    def believe_up_to(self, top: float) -> None:
        """Believe other nodes up to `top` samples (net/membership/clock.py); inf: whatever they tell."""
        self.top = top

    def add(self, own: PeerId, samples: int) -> int:
        """Count `samples` more for this node's own feeder; return the total. Only the feeder itself may call this."""
        assert samples >= 0, f"{samples} samples cannot be added to a counter that only grows"
        assert self._own is None or own == self._own, f"entry of {own} added to by {self._own}"
        self._own = own
        self.counted = SampleCount(self.counted + samples)
        total = self.feeders.get(own, self._folded.get(own, 0)) + samples
        if total > self.feeders.get(own, -1):
            self._raise_entries({own: total})
        return self._settle()

    def merge(self, other: Progress) -> int:
        """Adopt what `other` knows; return the total. Idempotent; commutes with other merges as long as nothing was
        folded.

        An entry of our own that is ahead of us was counted before a restart of this node, as no other node writes it.
        What was counted since the start is added on top. Raises RemoteFault, and changes nothing, if the total would be
        absurd, ProgressOverclaim if it would exceed `top`.
        """
        return self._merge(other.feeders, other._sum(), other._heard)

    def merge_wire(self, message: record_pb2.Progress) -> int:
        """Same as `merge` of `from_wire`, including the errors, but faster: most calls carry such a message."""
        theirs, total = _checked(message, self._entries_max)
        return self._merge(theirs, total, message.total)

    def merge_entries(self, told: Mapping[PeerId, int]) -> int:
        """Same as `merge_wire` for many checked records at once, each with its own feeder's entry."""
        return self._merge(told, sum(told.values()))

    def _merge(self, told: Mapping[str, int] | Mapping[PeerId, int], total: int, heard: int = 0) -> int:
        if self.total + total > SAMPLES_MAX:
            raise RemoteFault(f"progress of {total} samples in all, here {self.total}; at most {SAMPLES_MAX}")
        known = self.feeders.get
        news = {feeder: samples for feeder, samples in told.items() if samples > known(feeder, -1)}
        if not news and total <= self._sum() and heard <= self.total:
            return self.total
        if self._own in news:
            news[self._own] += self.counted
        before = sum(known(feeder, self._folded.get(feeder, 0)) for feeder in news)
        if (after := max(self._sum() - before + sum(news.values()), total, heard)) > max(self.top, self.total):
            raise ProgressOverclaim(after, self.top)
        self._heard = max(self._heard, heard)
        self._raise_entries(news)
        self._raise_base(max(0, total - self._sum()))
        return self._settle()

    def to_wire(self) -> record_pb2.Progress:
        """All entries, at most `entries_max` including the floor, which exists only if something was folded."""
        message = to_message(self.feeders | {FLOOR: self._sum()} if self._base else self.feeders)
        message.total = self.total
        return message

    def news(
        self,
        since: int,
        into: record_pb2.Progress | None = None,
        known: record_pb2.Progress | None = None,
    ) -> record_pb2.Progress:
        """The total, and the newest NEWS_MAX entries changed after `version` was `since` that exceed those in `known`.

        As good as `to_wire` for a receiver that knows the rest, and small for any number of feeders, each of which also
        publishes its entry in its record. Written into `into`, if given.
        """
        # At most so many entries changed; if one changed twice, one too many is sent.
        newest = list(itertools.islice(reversed(self.feeders.items()), min(NEWS_MAX, self.version - since)))
        newer = dict(reversed(newest))
        # If entries were left out, the floor would count for them, and they would count again later.
        if self._base and self._base_version > since and len(newer) < NEWS_MAX:
            newer[FLOOR] = self._sum()
        if known is not None and newer:
            theirs = dict(zip(known.feeders, known.samples, strict=False))
            newer = {feeder: samples for feeder, samples in newer.items() if samples > theirs.get(feeder, -1)}
        message = to_message(newer, into)
        if known is None or known.total < self.total:
            message.total = self.total
        return message

    def remind(self, feeder: PeerId, told: record_pb2.Progress, into: record_pb2.Progress) -> None:
        """Write the entry of `feeder` into `into` if it `told` of less than half of it: it began again, and counts from
        nothing what it trains. Else nobody counts that before it is as much as in its former life."""
        said = dict(zip(told.feeders, told.samples, strict=False)).get(feeder)
        known = self.feeders.get(feeder, 0)
        if said is not None and 2 * said < known and feeder not in into.feeders:
            to_message({feeder: known}, into)

    def entry(self, feeder: PeerId) -> record_pb2.Progress:
        """The entry of `feeder`, if any, and the total: for its record."""
        samples = self.feeders.get(feeder)
        message = to_message({} if samples is None else {feeder: samples})
        message.total = self.total
        return message

    @classmethod
    def from_wire(cls, message: record_pb2.Progress, *, entries_max: int = ENTRIES_MAX) -> Progress:
        """The counter of a peer. Raises RemoteFault for too many entries or an impossible feeder id or count."""
        by_feeder, total = _checked(message, entries_max)
        progress = cls(entries_max=entries_max)
        progress.feeders = by_feeder
        progress._listed = sum(by_feeder.values())
        progress._heard = message.total
        progress._base = total - progress._sum()
        progress._settle()
        return progress

    def _sum(self) -> int:
        return self._base + self._listed

    def _raise_entries(self, news: dict[str, int]) -> None:
        """Adopt `news`, each larger than its entry. Optimised for many, as most calls change most feeders' entries."""
        if self._folded:
            news = {feeder: samples for feeder, samples in news.items() if samples > self._folded.get(feeder, -1)}
            for feeder in self._folded.keys() & news:  # it feeds again: its entry takes back its part of the base
                self._base -= self._folded.pop(feeder)
        before = self.feeders.pop  # changed entries move to the end
        self._listed += sum(news.values()) - sum([before(feeder, 0) for feeder in news])
        self.feeders.update(zip(map(sys.intern, news), news.values(), strict=True))
        self.version += len(news)

    def _raise_base(self, samples: int) -> None:
        if samples:
            self._base += samples
            self.version += 1
            self._base_version = self.version

    def _settle(self) -> int:
        """Fold entries that do not fit, then update the total."""
        if len(self.feeders) > self._entries_max - 1:
            idle = [feeder for feeder in self.feeders if feeder != self._own]
            for feeder in idle[: len(self.feeders) - (self._entries_max - 1)]:
                samples = self.feeders.pop(feeder)
                self._listed -= samples
                self._folded[feeder] = samples
                self._raise_base(samples)
            for feeder in list(self._folded)[: max(0, len(self._folded) - FOLDED_MAX)]:
                del self._folded[feeder]
        total = max(self._sum(), self._heard)
        assert total >= self.total, f"samples of the run shrank from {self.total} to {total}"
        self.total = total
        return total


def _checked(message: record_pb2.Progress, entries_max: int) -> tuple[dict[str, int], int]:
    """(entries, the larger of their sum and the floor) of a peer's message. Raises RemoteFault, see
    `Progress.from_wire`."""
    if (count := len(message.feeders)) > entries_max:
        raise RemoteFault(f"progress of {count} entries; at most {entries_max}")
    counts = to_samples(message)
    if counts and ((wrong := max(map(len, counts))) > FEEDER_CHARACTERS_MAX or (wrong := min(map(len, counts))) == 0):
        raise RemoteFault(f"progress names a feeder of {wrong} characters; 1 to {FEEDER_CHARACTERS_MAX}")
    floor = counts.pop(FLOOR, 0)
    if (known := max(listed := sum(counts.values()), floor, message.total)) > SAMPLES_MAX:
        raise RemoteFault(f"progress of {known} samples in all; at most {SAMPLES_MAX}")
    return counts, max(floor, listed)
