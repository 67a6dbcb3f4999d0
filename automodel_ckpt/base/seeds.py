"""Seeding the random generators of this process: Python's, NumPy's and torch's."""

from __future__ import annotations

import random

import numpy
import torch


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
