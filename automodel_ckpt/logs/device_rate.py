"""The rate at which a device multiplies matrices, which the model FLOPs utilization (MFU) is a share of."""

from __future__ import annotations

import logging
import time

import torch

log = logging.getLogger("automodel_ckpt")

# Rows and columns of the measured matrices: large enough that a GPU reaches its highest rate.
_SIZE = 8192
_NUM_PRODUCTS = 20
_NUM_WARMUP = 3


def device_rate(
    device: torch.device, dtype: torch.dtype, peak_tflops: float | None
) -> float | None:
    """FLOP/s of *device* for products in *dtype*. Returns None when the rate is unknown.

    *peak_tflops* is the rate that the recipe gives, in TFLOP/s. Without it, a GPU is measured; a CPU is not, because it
    takes longer than the first steps of a small run, and the result depends on what else the machine computes.
    """
    if peak_tflops is not None:
        return peak_tflops * 1e12
    if device.type != "cuda":
        return None
    try:
        rate = _measured_rate(device, dtype)
    except RuntimeError as error:
        # Out of memory, next to another process, or a dtype that the device does not multiply.
        log.debug("MFU is not logged: the rate of matrix products cannot be measured: %s", error)
        return None
    finally:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    name = str(dtype).removeprefix("torch.")
    log.debug(
        "MFU is relative to the measured %.0f TFLOP/s of %s products in %s (logging.peak_tflops)",
        rate / 1e12,
        f"{_SIZE}^3",
        name,
    )
    return rate


def _measured_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of products of square matrices on a GPU. It draws no random number of the run.

    Raises RuntimeError if the device does not have the memory for three such matrices.
    """
    # The values matter: a GPU multiplies zeros faster, because it uses less power for them.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(_SIZE, _SIZE, device=device, dtype=dtype, generator=generator) for _ in range(2)
    )
    product = torch.empty_like(left)
    for _ in range(_NUM_WARMUP):
        torch.mm(left, right, out=product)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(_NUM_PRODUCTS):
        torch.mm(left, right, out=product)
    torch.cuda.synchronize(device)
    return _NUM_PRODUCTS * 2 * _SIZE**3 / (time.perf_counter() - started)
