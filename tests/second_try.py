"""The second try of `make test`: tests that failed beside others run once more, alone.

A loaded machine must not fail the suite. A fault in the code fails both times; what passes here is named all the same.

    python -m tests.second_try build/rest-tests.txt build/live-tests.txt ...
"""

import re
import subprocess
import sys
from pathlib import Path

FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/[^\n]*?)(?: - .*)?$", re.MULTILINE)
ENDED = re.compile(r"^\d+ .* in [\d.]+s", re.MULTILINE)
MANY = 8  # more than these are no accident


def second_try(reports: list[Path]) -> int:
    """Exit code of the suite: 0 if each part of `reports` ended, and its failures pass now."""
    texts = [(path, path.read_text(encoding="utf-8", errors="replace") if path.exists() else "") for path in reports]
    if cut := [path.name for path, text in texts if not ENDED.search(text)]:
        print(f"did not end: {', '.join(cut)}")
        return 1
    failed = sorted({name for _, text in texts for name in FAILED.findall(text)})
    if not failed:
        return 0
    if len(failed) > MANY or any("::" not in name for name in failed):
        print(f"{len(failed)} failures: no second try")
        return 1
    print(f"\nsecond try, alone: {len(failed)} of the tests", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *failed]
    if (code := subprocess.run(command, check=False).returncode) == 0:
        print("passed at the second try only: " + ", ".join(failed))
    return code


if __name__ == "__main__":
    sys.exit(second_try([Path(name) for name in sys.argv[1:]]))
