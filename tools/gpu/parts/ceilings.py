"""The limits of the machine: matrix products, copies, registration of host memory, and attention by document."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tools.gpu.session import Figures, PartRun

_ROUNDS = 10
_DOCUMENT = 512


_LARGE = {"product": 8192, "copy": 8 << 30, "host copy": 4 << 30, "row": 8192, "optimizer": 1 << 28}
_SMALL = {"product": 64, "copy": 1 << 20, "host copy": 1 << 20, "row": 64, "optimizer": 1 << 10}
"""Rows of matrices, bytes, tokens and parameters; the small ones for a dry run."""


def run(part: PartRun) -> None:
    """Measure each limit in a separate process."""
    device, is_small = part.session.device, part.session.is_dry_run
    sizes = _SMALL if is_small else _LARGE
    part.measure("products", products, device, sizes["product"], is_small, limit=90)
    part.measure("device copies", device_copies, device, sizes["copy"], limit=60)
    part.measure("host copies", host_copies, device, sizes["host copy"], limit=90)
    part.measure("attention", attention, device, sizes["row"], limit=120)
    part.measure("optimizer", optimizer_step, device, sizes["optimizer"], limit=60)


def seconds_of(function: Callable[[], Any], device: str, rounds: int = _ROUNDS) -> float:
    """Median seconds of a call after three that do not count; on a GPU by its events."""
    import torch

    for _ in range(3):
        function()
    measured = []
    if device != "cuda":
        for _ in range(rounds):
            started = time.perf_counter()
            function()
            measured.append(time.perf_counter() - started)
        return statistics.median(measured)
    event: Any = torch.cuda.Event
    events = []
    for _ in range(rounds):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        function()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    for begin, end in events:
        measured.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(measured)


def products(device: str, size: int, is_small: bool) -> Figures:
    """Matrix products of random values: square ones by dtype, and those of an 8B model's layers for 4,096 tokens."""
    import torch

    def product(rows: int, inner: int, columns: int, dtype: torch.dtype) -> dict[str, float]:
        a = torch.randn(rows, inner, device=device, dtype=dtype)
        b = torch.randn(columns, inner, device=device, dtype=dtype)
        seconds = seconds_of(lambda: a @ b.T, device)
        return {"tflops": 2e-12 * rows * inner * columns / seconds, "seconds": seconds}

    yield "bf16 product", product(size, size, size, torch.bfloat16)
    yield "fp32 product", product(size, size, size, torch.float32)
    torch.set_float32_matmul_precision("high")
    yield "tf32 product", product(size, size, size, torch.float32)
    if is_small:
        return
    yield "bf16 product, mlp of 8B", product(4096, 4096, 14_336, torch.bfloat16)
    yield "bf16 product, head of 8B", product(4096, 4096, 128_256, torch.bfloat16)


def device_copies(device: str, nbytes: int) -> Figures:
    """A copy within the device's memory, counting bytes read and written, and a fill."""
    import torch

    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), device)
    yield "device copy", {"gb_per_second": 2e-9 * nbytes / seconds, "seconds": seconds}
    seconds = seconds_of(lambda: target.zero_(), device)
    yield "device fill", {"gb_per_second": 1e-9 * nbytes / seconds, "seconds": seconds}


def host_copies(device: str, nbytes: int) -> Figures:
    """Copies between host and device with pinned and pageable memory, and the registration of shared host memory."""
    import torch

    on_device = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    pageable = torch.zeros(nbytes, dtype=torch.uint8)
    places = {"pageable": pageable}
    if device == "cuda":
        started = time.perf_counter()
        places["pinned"] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        seconds = time.perf_counter() - started
        yield "pin memory", {"gb_per_second": nbytes / 1e9 / seconds, "seconds": seconds}
    for name, host in places.items():
        for direction, target, source in (("to", host, on_device), ("from", on_device, host)):
            seconds = seconds_of(lambda t=target, s=source: t.copy_(s), device, 3)  # type: ignore[misc]
            rate = nbytes / 1e9 / seconds
            yield (
                f"copy {direction} {name} host memory",
                {"gb_per_second": rate, "seconds": seconds},
            )
    if device == "cuda":
        yield from _registration(on_device)


def register(shared: Any) -> int:
    """Register host memory with CUDA; returns CUDA's error code, 0 for success."""
    import torch

    library: Any = torch.cuda.cudart  # type: ignore[no-untyped-call, unused-ignore]
    return int(library().cudaHostRegister(shared.data_ptr(), shared.nbytes, 0))


def _registration(on_device: Any) -> Figures:
    """Register the memory of a memfd with CUDA, as asynchronous saves do, and copy to it."""
    import torch

    nbytes = on_device.nbytes
    descriptor = os.memfd_create("gpu-ceilings")
    os.ftruncate(descriptor, nbytes)
    shared = torch.frombuffer(memoryview(mmap.mmap(descriptor, nbytes)), dtype=torch.uint8)
    started = time.perf_counter()
    shared.zero_()
    touched = time.perf_counter()
    status = register(shared)
    registered = time.perf_counter()
    figures = {
        "status": status,
        "seconds_to_touch": touched - started,
        "seconds_to_register": registered - touched,
    }
    if status == 0:
        seconds = seconds_of(lambda: shared.copy_(on_device, non_blocking=True), "cuda", 3)
        figures["gb_per_second"] = nbytes / 1e9 / seconds
    yield "host registration", figures


def attention(device: str, length: int) -> Figures:
    """Causal attention of a row of *length* tokens (8B's heads), and of documents of 512 tokens in it."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from automodel_ckpt.models.attention.documents import Documents, document_kernel

    dtype = torch.bfloat16
    q, k, v = (
        torch.randn(1, 32, length, 128, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )

    def both_ways(function: Callable[[], Any]) -> dict[str, float]:
        forward = seconds_of(function, device, 5)
        seconds = seconds_of(lambda: function().float().sum().backward(), device, 5)
        return {"seconds": seconds, "seconds_forward": forward}

    yield "causal row", both_ways(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
    documents = torch.arange(length, device=device) // min(_DOCUMENT, length // 2)
    rows = torch.arange(length, device=device)
    mask = (documents[:, None] == documents) & (rows[:, None] >= rows)
    yield "documents, mask", both_ways(lambda: scaled_dot_product_attention(q, k, v, mask))
    runs = ((min(_DOCUMENT, length // 2), length // min(_DOCUMENT, length // 2)),)
    of_row = Documents(runs, None, torch.device(device))
    kernel = document_kernel(device)
    if kernel is not None:
        attend = partial(kernel.attend, q, k, v, kernel.prepare(of_row), {})
        yield f"documents, {kernel.label}", both_ways(attend)


def optimizer_step(device: str, numel: int) -> Figures:
    """A step of fused AdamW over *numel* float32 values: it reads four tensors and writes three."""
    import torch

    parameter = torch.nn.Parameter(torch.randn(numel, device=device))
    parameter.grad = torch.randn(numel, device=device)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    seconds = seconds_of(optimizer.step, device)
    rate = 7 * 4 * numel / 1e9 / seconds
    yield "fused AdamW", {"gb_per_second": rate, "seconds": seconds}
