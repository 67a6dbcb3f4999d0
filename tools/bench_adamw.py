"""Compare AdamW's kernels on a GPU: torch's, and this project's for large tensors with several sizes of blocks.

    python -m tools.bench_adamw [--dry-run] [--layers 7] [--rounds 10] [--json FILE]

The tensors are the matrices of Llama 8B with 7 of its 32 layers, in float32: 2.1e9 parameters, 33 GB. The bytes of an
update are 28 per parameter: parameter, gradient and two moments are read, all but the gradient written. torch's kernel
also writes the gradient if it divides it. After a measurement, put the fastest block, number of warps and cache policy
into automodel_ckpt/training/adamw_kernel.py. A dry run uses small tensors on the CPU, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from automodel_ckpt.training.optim import LEAST_ELEMENTS

CANDIDATES = (
    (2048, 4, "evict_first"),
    (1024, 4, "evict_first"),
    (1024, 2, "evict_first"),
    (2048, 8, "evict_first"),
    (4096, 8, "evict_first"),
    (4096, 16, "evict_first"),
    (2048, 4, ""),
    (1024, 4, ""),
)
"""Elements of a block, warps, and the policy of the cache."""
EMBEDDING = (128_256, 4096)
LAYER = ((4096, 4096),) * 2 + ((1024, 4096),) * 2 + ((14_336, 4096),) * 3
SETTINGS: dict[str, Any] = {
    "lr": 1e-5,
    "beta1": 0.9,
    "beta2": 0.95,
    "weight_decay": 0.1,
    "eps": 1e-8,
}
CHECKED_STEPS = 3
Rows = list[list[torch.Tensor]]
"""Parameters, gradients, averages, squares and steps."""
Kernel = Callable[..., None]


def by_torch(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    averages: list[torch.Tensor],
    squares: list[torch.Tensor],
    steps: list[torch.Tensor],
    **options: Any,
) -> None:
    """torch's kernel, with the arguments of ours."""
    torch._fused_adamw_(
        parameters,
        gradients,
        averages,
        squares,
        [],
        steps,
        **options,
        amsgrad=False,
        maximize=False,
    )


def made(shapes: list[tuple[int, ...]], device: str) -> Rows:
    """Random parameters, with gradients and moments that are about as large as those of a language model."""
    generator = torch.Generator(device).manual_seed(0)

    def numbers(scale: float) -> list[torch.Tensor]:
        options: dict[str, Any] = {"device": device, "generator": generator}
        return [torch.randn(shape, **options).mul_(scale) for shape in shapes]

    squares = [each.square_() for each in numbers(1e-4)]
    steps = [torch.full((), 9.0, device=device) for _ in shapes]
    return [numbers(0.02), numbers(1e-4), numbers(1e-5), squares, steps]


@contextmanager
def tuned(block: int, num_warps: int, eviction: str) -> Iterator[None]:
    """Let our kernel use these constants."""
    from automodel_ckpt.training import adamw_kernel as kernel

    before = kernel._BLOCK, kernel._WARPS, kernel._EVICTION
    kernel._BLOCK, kernel._WARPS, kernel._EVICTION = block, num_warps, eviction
    try:
        yield
    finally:
        kernel._BLOCK, kernel._WARPS, kernel._EVICTION = before


def milliseconds(work: Callable[[], Any], device: str, rounds: int) -> float:
    """The median of *rounds* calls after two that do not count, on a GPU by its clock."""
    if device == "cpu":
        started = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - started)
    event: Any = torch.cuda.Event
    pairs = []
    for _ in range(rounds + 2):
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        work()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    measured: list[float] = [start.elapsed_time(end) for start, end in pairs[2:]]
    return statistics.median(measured)


def differences(kernel: Kernel, rows: Rows, options: dict[str, Any]) -> dict[str, float]:
    """The largest difference from torch's kernel after some steps, relative to the rate; and how many values differ."""
    ours, theirs = ([[each.clone() for each in row] for row in rows] for _ in range(2))
    pairs: list[tuple[Kernel, Rows]] = [(kernel, ours), (by_torch, theirs)]
    for _ in range(CHECKED_STEPS):
        for update, changed in pairs:
            torch._foreach_add_(changed[4], 1)
            # torch's kernel stores divided gradients.
            changed[1] = [each.clone() for each in rows[1]]
            update(*changed, **SETTINGS, **options)
    found = {"parameters_differ": 0.0, "moments_differ": 0.0, "largest_in_rates": 0.0}
    for each, other in zip(ours[0], theirs[0], strict=True):
        found["parameters_differ"] += float((each != other).sum())
        largest = float((each - other).abs().max()) / SETTINGS["lr"]
        found["largest_in_rates"] = max(found["largest_in_rates"], largest)
    for each, other in zip(ours[2] + ours[3], theirs[2] + theirs[3], strict=True):
        found["moments_differ"] += float((each != other).sum())
    return found


def compare(shapes: list[tuple[int, ...]], device: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Time all kernels on *shapes*, and print a line for each. Returns the figures by name."""
    rows = made(shapes, device)
    num_parameters = sum(each.numel() for each in rows[0])
    divided: dict[str, Any] = {
        "grad_scale": torch.full((), 1.0, device=device),
        "found_inf": torch.zeros((), device=device),
    }
    figures: dict[str, dict[str, Any]] = {}

    def add(name: str, nbytes: int, work: Callable[[], Any]) -> None:
        try:
            found = milliseconds(work, device, rounds)
        except Exception as error:
            figures[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(f"{name:42} {figures[name]['error']}", flush=True)
            return
        rate = nbytes * num_parameters / found / 1e9
        figures[name] = {"ms": found, "TB/s": rate}
        print(f"{name:42} {found:8.2f} ms {rate:6.2f} TB/s", flush=True)

    print(f"{num_parameters:,} parameters in {len(shapes)} tensors", flush=True)
    add("copies", 8, lambda: torch._foreach_copy_(rows[2], rows[1]))
    theirs: Kernel = by_torch
    add("torch", 28, lambda: theirs(*rows, **SETTINGS))
    add("torch, divided", 32, lambda: theirs(*rows, **SETTINGS, **divided))
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        print("without Triton's interpreter, only torch's kernel")
        return figures
    from automodel_ckpt.training import adamw_kernel

    ours: Kernel = adamw_kernel.update
    for candidate in CANDIDATES:
        block, num_warps, eviction = candidate
        name = f"block {block}, {num_warps} warps, {eviction or 'no policy'}"
        with tuned(*candidate):
            if candidate is CANDIDATES[0]:
                add(f"{name}, not divided", 28, lambda: ours(*rows, **SETTINGS))
            add(f"{name}, divided", 28, lambda: ours(*rows, **SETTINGS, **divided))
    sample = [row[1:3] for row in rows]
    options = {**divided, "grad_scale": torch.full((), 1.7, device=device)}
    figures["differences"] = differences(ours, sample, options)
    num_values = sum(each.numel() for each in sample[0])
    print(f"differences from torch's among {num_values:,}: {figures['differences']}", flush=True)
    return figures


def main(arguments: list[str] | None = None) -> None:
    """Compare all, and write the figures as JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="small tensors on the CPU")
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    shapes: list[tuple[int, ...]] = [EMBEDDING, *LAYER * given.layers]
    if given.dry_run:
        shapes = [(100, 41), (64, 64), (5, 7)]
    else:
        assert all(rows * columns >= LEAST_ELEMENTS for rows, columns in shapes)
        print(torch.cuda.get_device_name())
    figures = compare(shapes, "cpu" if given.dry_run else "cuda", given.rounds)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
