"""Which device the tests of tests/gpu use: a GPU; without one they are skipped, except for some that run on the CPU.

With GPU_TESTS_ON_CPU=1, those that can run on the CPU all do, so that a mistake in a test is found without a GPU.
"""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
ALL_ON_CPU = os.environ.get("GPU_TESTS_ON_CPU") == "1"
DEVICE = "cuda" if HAS_GPU else "cpu"
"""Where tests marked by needs_gpu compute."""
needs_gpu = pytest.mark.skipif(
    not HAS_GPU and not ALL_ON_CPU, reason="this machine has no CUDA device"
)
"""For tests whose code also runs on a CPU."""
only_gpu = pytest.mark.skipif(not HAS_GPU, reason="this machine has no CUDA device")
"""For tests of what a CPU does not have: its memory, its kernels."""


def both_devices() -> list[object]:
    """Parameters for a test that runs on the CPU always, and on a GPU where there is one."""
    return ["cpu", pytest.param("cuda", marks=only_gpu)]
