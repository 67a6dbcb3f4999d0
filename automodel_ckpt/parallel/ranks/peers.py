"""What the launcher of this process knows about the other ranks. The module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection

find_dead: Callable[[], Collection[int]] = tuple
"""Returns the ranks of this node whose processes have ended before they were done. A launcher replaces it."""


def dead_ranks() -> Collection[int]:
    """Return the ranks of this node whose processes have ended before they were done, as far as it is known."""
    return find_dead()
