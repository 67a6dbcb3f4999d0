"""The random generators of a process: seeding them, and their state as tensors and plain numbers."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch

log = logging.getLogger("automodel_ckpt")


def seed_everything(seed: int, *, devices: bool = True) -> None:
    """Seed all generators with *seed*, an integer of at most 64 bits.

    Without *devices*, only the generators of the CPU are seeded. This is what data loading needs: its random numbers
    must not change those that the model draws on an accelerator, and a forked worker must not initialize CUDA.
    """
    random.seed(seed)
    # NumPy's global generator accepts seeds of 32 bits only.
    numpy.random.seed(seed % 2**32)
    if devices:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class StatefulRNG:
    """Seeds python, numpy, torch's CPU and CUDA generators for *rank*, and saves and restores them.

    Ranks draw different numbers (dropout masks must differ), all derived from *seed*. The state holds tensors and
    ints only, so that it is read back as plain data. *grid* is how the ranks share the work: it decides which of them
    have to draw the same numbers. Without *reseed*, the generators stay as they are until a state is loaded.
    """

    checkpoint_scope = "rank_rng"

    def __init__(
        self, seed: int, rank: int = 0, grid: Sequence[int] = (), *, reseed: bool = True
    ) -> None:
        self._place, self._grid = (seed, rank), list(grid)
        if reseed:
            seed_everything(_mixed(seed, rank))

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether the ranks of a saved state divided the work as the ranks here do."""
        return bool(state.get("grid", self._grid) == self._grid)  # none is noted in older states

    def derive(self, step: int) -> None:
        """Seed anew for a run that continues after *step* on other ranks. The stored states do not fit them."""
        seed_everything(_mixed(*self._place, step))

    def state_dict(self) -> dict[str, Any]:
        return {
            "grid": self._grid,
            "python": _python_state(),
            "numpy": _numpy_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore all generators; CUDA's only if as many devices are visible as in the state, otherwise logs a line."""
        # Restore it last: building objects and iter() of a torch DataLoader draw random numbers.
        _set_python_state(state["python"])
        _set_numpy_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        num_visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
        difference = device_difference(len(state["cuda"]), num_visible)
        if difference is None and num_visible:
            torch.cuda.set_rng_state_all(state["cuda"])
        if difference is not None and self._place[1] == 0:
            # One line is enough: nodes with other numbers of GPUs are an exception.
            log.warning("%s", difference)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Leave the generators as they were found, whatever is drawn inside."""
        state = self.state_dict()
        try:
            yield
        finally:
            self.load_state_dict(state)


def device_difference(num_saved: int, num_visible: int) -> str | None:
    """Why the random states of *num_saved* GPUs cannot be restored on *num_visible*; None when they can."""
    if num_saved == num_visible:
        return None
    return (
        f"this resume is not bit-exact: the checkpoint has the random state of {_gpus(num_saved)}, and "
        f"{_gpus(num_visible)} can be used now, so dropout on GPUs draws other numbers "
        "(CUDA_VISIBLE_DEVICES selects GPUs)"
    )


def _gpus(count: int) -> str:
    if count == 0:
        return "no GPU"
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _mixed(seed: int, *parts: int) -> int:
    """A seed per rank that neighbouring seeds and ranks do not share (``SeedSequence`` spreads the bits)."""
    sequence = numpy.random.SeedSequence([seed % 2**64, *parts])
    return int(sequence.generate_state(1, numpy.uint64)[0]) % 2**63


def _python_state() -> dict[str, Any]:
    version, words, gauss_next = random.getstate()
    return {
        "version": version,
        "words": torch.tensor(words, dtype=torch.int64, device="cpu"),
        "gauss_next": gauss_next,
    }


def _set_python_state(state: Mapping[str, Any]) -> None:
    random.setstate((state["version"], tuple(state["words"].tolist()), state["gauss_next"]))


def _numpy_state() -> dict[str, Any]:
    name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    words = torch.from_numpy(numpy.asarray(keys).astype(numpy.int64))
    return {
        "name": str(name),
        "words": words,
        "position": int(position),
        "has_gauss": int(has_gauss),
        "gauss": float(gauss),
    }


def _set_numpy_state(state: Mapping[str, Any]) -> None:
    words = state["words"].numpy().astype(numpy.uint32)
    numpy.random.set_state(
        (state["name"], words, state["position"], state["has_gauss"], state["gauss"])
    )
