"""What the callbacks of this package share: random state that is restored later, and the group for collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from automodel_ckpt.base.rng import StatefulRNG


class DeferredRandomState:
    """The random state of a rank. A state that is loaded takes effect when :meth:`restore` is called.

    Trainers draw random numbers between the loading of a checkpoint and the first step.
    """

    checkpoint_scope = "rank_rng"

    def __init__(self, seed: int, rank: int) -> None:
        self._random = StatefulRNG(seed, rank, reseed=False)
        self._loaded: Mapping[str, Any] | None = None
        self._derive_after: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return self._random.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = state

    def derive(self, step: int) -> None:
        """Let :meth:`restore` seed the generators for a run that continues after *step* on other ranks."""
        self._derive_after = step

    def restore(self) -> None:
        """Restore the generators from the state that was loaded. Does nothing without one, and the second time."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._random.load_state_dict(loaded)
        step, self._derive_after = self._derive_after, None
        if step is not None:
            self._random.derive(step)


def gloo_group() -> ProcessGroup | None:
    """A new group of all ranks for collectives on the CPU; None in a single process. Collective."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    group: ProcessGroup = dist.new_group(backend="gloo")
    return group
