"""`python -m tests.fuzz [COUNT [NAME...]]`: so many damaged inputs for each target (10^6), with the share that
was accepted, the time and the memory they cost.

A failure prints the line that repeats it.
"""

import resource
import sys
import time

from swarmnode.base.ids import seeded
from tests.fuzz.mutate import inputs
from tests.fuzz.targets import targets

RSS_GROWTH_MAX = 200 << 20  # caches fill; anything beyond is memory that an input asked for


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    for name in sys.argv[2:] or list(targets()):
        target = targets()[name]
        begun = time.monotonic()
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        accepted = 0
        for number, raw in enumerate(inputs(target.seeds, count, seeded("soak", name), target.tokens)):
            try:
                accepted += target.take(raw)
            except BaseException:
                print(f"{name}, input {number}: targets()[{name!r}].take(bytes.fromhex({raw.hex()!r}))")
                raise
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - rss
        seconds = time.monotonic() - begun
        print(
            f"{name}: {count:,} inputs, {accepted / count:.1%} accepted, the rest refused; no finding; "
            f"{seconds:.0f} s, {grown >> 20} MiB more memory",
            flush=True,
        )
        assert grown < RSS_GROWTH_MAX, f"{name}: {grown >> 20} MiB"
    return 0


if __name__ == "__main__":
    sys.exit(main())
