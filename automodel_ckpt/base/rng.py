"""The random generators of a process: seeding them, and their state as tensors and plain numbers."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from automodel_ckpt.base.units import counted

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
        version, words, gauss_next = random.getstate()
        name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
        return {
            "grid": self._grid,
            "python": {
                "version": version,
                "words": torch.tensor(words, dtype=torch.int64, device="cpu"),
                "gauss_next": gauss_next,
            },
            "numpy": {
                "name": str(name),
                "words": torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(gauss),
            },
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore all generators; CUDA's only if as many devices are visible as in the state, otherwise logs a line."""
        # Restore it last: building objects and iter() of a torch DataLoader draw random numbers.
        python, arrays = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss_next"]))
        words = arrays["words"].numpy().astype(numpy.uint32)
        place = (arrays["position"], arrays["has_gauss"], arrays["gauss"])
        numpy.random.set_state((arrays["name"], words, *place))
        torch.set_rng_state(state["torch"])
        num_saved = len(state["cuda"])
        num_visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if num_saved == num_visible:
            if num_visible:
                torch.cuda.set_rng_state_all(state["cuda"])
        elif self._place[1] == 0:
            # One line is enough: nodes with other numbers of GPUs are an exception.
            log.warning(
                "this resume is not bit-exact: the checkpoint has the random state of %s, and %s can be used now, so "
                "dropout on GPUs draws other numbers (CUDA_VISIBLE_DEVICES selects GPUs)",
                counted(num_saved, "GPU"),
                counted(num_visible, "GPU"),
            )

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Leave the generators as they were found, whatever is drawn inside."""
        state = self.state_dict()
        try:
            yield
        finally:
            self.load_state_dict(state)


def _mixed(seed: int, *parts: int) -> int:
    """A seed per rank that neighbouring seeds and ranks do not share (``SeedSequence`` spreads the bits)."""
    sequence = numpy.random.SeedSequence([seed % 2**64, *parts])
    return int(sequence.generate_state(1, numpy.uint64)[0]) % 2**63
