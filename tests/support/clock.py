"""Wall clocks of tests: the machine's, and one that stands until a test moves it."""

import time


class WallClock:
    def unix_s(self) -> float:
        return time.time()


class ManualClock:
    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def unix_s(self) -> float:
        return self.now_s
