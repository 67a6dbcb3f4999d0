"""The processor cores that a rank may use. Imports nothing of the package."""

from __future__ import annotations

import os


def cores_of_rank() -> int:
    """How many cores this process may keep busy: those of the node, divided among its ranks."""
    num_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)
