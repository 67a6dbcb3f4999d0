"""What a training of a campaign notes while it runs, and its data. Imports nothing that takes time.

Each rank appends lines ``seconds name step`` (of the system's monotonic clock) to ``marks_{rank}`` in the directory
that CRASH_MARKS names. CRASH_HANG="place step rank" makes that rank hang there, once its training has come so far.
"""

import os
import time

MICRO_BATCH_SECONDS = 0.04
SAMPLE_SECONDS = 0.005
HANG_SECONDS = 60.0

_last_step = 0


def mark(name: str, step: int | None = None) -> None:
    global _last_step
    if step is not None:
        _last_step = step
    path = os.path.join(os.environ["CRASH_MARKS"], f"marks_{os.environ['RANK']}")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, f"{time.monotonic()} {name} {_last_step}\n".encode())
    os.close(descriptor)


def hang(place: str) -> None:
    """Sleep here if CRASH_HANG says so; a signal's handler may end it."""
    where, step, rank = os.environ.get("CRASH_HANG", "nowhere 0 0").split()
    if where == place and int(step) <= _last_step and rank == os.environ["RANK"]:
        mark("hang")
        time.sleep(HANG_SECONDS)


class Samples:
    """96 samples of 12 tokens that take their time; in training they can ``hang``."""

    def __init__(self, *, trains: bool = True) -> None:
        self.trains = trains

    def __len__(self) -> int:
        return 96 if self.trains else 16

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        time.sleep(SAMPLE_SECONDS)
        if self.trains:
            hang("data")
        tokens = [3 + (index * 7 + position * position * 11) % 120 for position in range(12)]
        return {"input_ids": tokens, "labels": tokens}
