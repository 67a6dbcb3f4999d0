"""Pausing Python's garbage collector while thousands of objects are created that all stay alive. Imports no torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Run a block, or as a decorator a function, without the garbage collector.

    A save or a load of tens of thousands of tensors creates a million objects. The collector visits all of them, and
    those of the whole program, several times, and finds nothing: a third of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
