"""Measure by how much the anonymous memory of this process grows while a function runs (Linux: /proc/self/status)."""

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path

_PAUSE_SECONDS = 0.001


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process, shared memory included: memory that no file on a disk backs."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def give_back_free_memory() -> None:
    """What was freed and not yet given back, in a forked process its parent's too, would be taken again uncounted."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def growth(function: Callable[[], object]) -> int:
    """By how many bytes such memory grew at most while *function* ran."""
    give_back_free_memory()
    before, peak, stop = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(_PAUSE_SECONDS):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        function()
    finally:
        stop.set()
        watcher.join()
    return max(peak[0], anonymous_bytes()) - before
