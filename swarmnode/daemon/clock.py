"""The system clock as a port."""

from __future__ import annotations

import time


class SystemClock:
    """ports.Clock of this machine."""

    def unix_s(self) -> float:
        return time.time()
