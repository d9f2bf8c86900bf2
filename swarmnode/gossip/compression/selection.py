"""Select the elements of a chunk that topk.py sends, and their two magnitudes: the numpy version of topk.c.

A chosen element is one int64, its magnitude's bits above its place: whole numbers are sorted and partitioned several
times as fast as floats with an order beside them (measured: vectors of integers, 0.1 us to sort 64).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Keys = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

PLACE_BITS = 32
INFINITE = 0x7F800000  # the bits of infinity; NaN lies above


class Selector:
    """Finds the `k` largest of each `chunk` elements, of up to `rows` chunks at a time, in its own buffers.

    The k largest lie in the k groups with the largest maxima, so only some 2 n / sqrt(n / k) elements are partitioned.
    A group is every `step`-th element, so that maxima are those of whole vectors.
    """

    def __init__(self, k: int, chunk: int, rows: int) -> None:
        self.k, self.chunk = k, chunk
        self.layers = 1 << ((chunk // k).bit_length() - 1) // 2
        self.step = chunk // self.layers
        self._magnitude = np.empty((rows, chunk), np.int32)
        self._tops, self._parted = np.empty((2, rows, self.step), np.int32)
        self._reach = np.empty((rows, self.step), np.bool_)
        self._at = np.empty((rows, self.layers, k), np.int64)
        self._near, self._near_parted = np.empty((2, rows, self.layers * k), np.int32)
        self._taken = np.empty((rows, self.layers * k), np.bool_)
        self._layer_at = (np.arange(self.layers) * self.step)[:, None]
        self._row_at = (np.arange(rows) * (chunk - self.step))[:, None]

    def largest(self, rows: Floats) -> Keys:
        """int64 [C, k], ascending: magnitude and place of the k largest of each of `rows` [C, n]. Of equal ones the
        first are taken; NaN counts as infinity."""
        count, k = len(rows), self.k
        magnitude = np.bitwise_and(rows.view(np.int32), 0x7FFFFFFF, out=self._magnitude[:count])
        tops, parted = self._tops[:count], self._parted[:count]
        np.maximum.reduce(magnitude.reshape(count, self.layers, self.step), axis=1, out=tops)
        parted[:] = tops
        parted.partition(self.step - k, axis=1)
        reach = np.greater_equal(tops, parted[:, self.step - k, None], out=self._reach[:count])
        groups = np.flatnonzero(reach)
        if groups.size > count * k or int(parted[:, self.step - k :].max()) >= INFINITE:
            odd = (np.count_nonzero(reach, axis=1) > k) | (tops.max(axis=1) >= INFINITE)
            return self._apart(rows, odd)
        at = np.add(groups.reshape(count, 1, k) + self._row_at[:count, None], self._layer_at, out=self._at[:count])
        near, parted = self._near[:count], self._near_parted[:count]
        magnitude.reshape(-1).take(at, mode="clip", out=near.reshape(at.shape))  # clip: skips numpy's bounds check
        parted[:] = near
        parted.partition(near.shape[1] - k, axis=1)
        taken = np.greater_equal(near, parted[:, near.shape[1] - k, None], out=self._taken[:count])
        found = np.flatnonzero(taken)
        if found.size > count * k:
            return self._apart(rows, np.count_nonzero(taken, axis=1) > k)
        keys = near.reshape(-1).take(found).astype(np.int64)
        keys <<= PLACE_BITS
        keys |= at.reshape(-1).take(found) & (self.chunk - 1)
        keys = keys.reshape(count, k)
        keys.sort(axis=1)
        return keys

    def _apart(self, rows: Floats, odd: Flags) -> Keys:
        """`largest` for rows of which those in `odd` have several elements equal to the least one taken."""
        keys = np.empty((len(rows), self.k), np.int64)
        keys[odd] = self._of_equals(rows[odd])
        if not odd.all():
            keys[~odd] = self.largest(rows[~odd])
        return keys

    def _of_equals(self, rows: Floats) -> Keys:
        magnitude = np.minimum(rows.view(np.int32) & 0x7FFFFFFF, INFINITE).astype(np.int64)
        keys: Keys = (magnitude << PLACE_BITS) | np.arange(self.chunk - 1, -1, -1)  # the first is the greater
        keys.partition(self.chunk - self.k, axis=1)
        keys = keys[:, self.chunk - self.k :] ^ (self.chunk - 1)
        keys.sort(axis=1)
        return keys


def two_means(keys: Keys) -> tuple[Floats, Places]:
    """([C, 2], the mean of the smaller and of the greater magnitudes; [C], the index of the last smaller one) of each
    row of ascending `keys` [C, k], split at the least squared error: exact, by prefix sums."""
    k = keys.shape[1]
    sums = (keys >> PLACE_BITS).astype(np.int32).view(np.float32).astype(np.float64).cumsum(axis=1)
    counts = np.arange(1, k, dtype=np.float64)
    below, total = sums[:, :-1], sums[:, -1]
    above = total[:, None] - below
    above *= above
    above /= k - counts
    gain = below * below
    gain /= counts
    gain += above
    split = gain.argmax(axis=1)  # the first of equal gains
    least = sums[np.arange(len(keys)), split]
    means = np.empty((len(keys), 2), np.float32)
    means[:, 0], means[:, 1] = least / (split + 1), (total - least) / (k - 1 - split)
    return means, split
