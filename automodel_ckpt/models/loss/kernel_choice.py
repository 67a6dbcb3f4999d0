"""Whether Triton or torch computes the loss head, gated layers and rotary embeddings on a device."""

from __future__ import annotations

import functools
import importlib.util

import torch

from automodel_ckpt.base.kernel_trial import has_triton, succeeds

KERNELS = {"cuda": ("triton", "torch"), "cpu": ("torch",)}
"""What computes them, by type of device. The first that is installed is used.

tools/bench/loss_kernels.py compares them on a device.
"""


def kernel_for(device_type: str, logits_dtype: torch.dtype) -> str:
    """The entry of :data:`KERNELS` that computes losses of chunks: ``triton`` or ``torch``."""
    for name in KERNELS.get(device_type, KERNELS["cpu"]):
        if name != "triton":
            return name
        # The kernels compute in float32.
        if logits_dtype == torch.float32 and _has_triton(device_type) and _runs_triton():
            return name
    return "torch"


def _has_triton(device_type: str) -> bool:
    """Whether Triton is installed; also True for the forecast of a GPU elsewhere, by PyTorch for CPUs.

    PyTorch for CUDA depends on Triton.
    """
    is_elsewhere = device_type == "cuda" and not torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    return is_elsewhere or has_triton()


def _runs_triton() -> bool:
    """Whether Triton's kernels run on the GPU that this process uses; not tried before it uses one."""
    return not torch.cuda.is_initialized() or try_kernels()  # type: ignore[no-untyped-call]


@functools.cache
def try_kernels() -> bool:
    """Run a kernel once on the GPU. Logs the reason, and returns False, if it fails."""

    def trial() -> None:
        from automodel_ckpt.models.loss import loss_kernels

        logits = torch.zeros(1, 2, device="cuda")
        labels = torch.zeros(1, dtype=torch.int64, device="cuda")
        loss_kernels.losses_and_errors(logits, labels, 1.0, None, torch.float32, True)

    return succeeds(trial, "the loss is computed")


@functools.cache
def is_installed(package: str) -> bool:
    """Whether a package could be imported; it is not imported."""
    return importlib.util.find_spec(package) is not None
