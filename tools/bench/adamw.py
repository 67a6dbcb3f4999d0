"""Compare AdamW's kernels on a GPU: torch's, and this project's for large tensors with several sizes of blocks.

    python -m tools.bench.adamw [--dry-run] [--moments float32|8-bit] [--layers 7] [--rounds 10] [--json FILE]

The tensors are the matrices of Llama 8B with 7 of its 32 layers, in float32: 2.1e9 parameters, 33 GB. The bytes of an
update are 28 per parameter: parameter, gradient and two moments are read, all but the gradient written. torch's kernel
also writes the gradient if it divides it. After a measurement, put the fastest block, number of warps and cache policy
into automodel_ckpt/optim/adamw_kernel.py. A dry run uses small tensors on the CPU, with TRITON_INTERPRET=1.

With 8-bit moments, whole steps of AdamW8bit are compared: in compiled chunks, and by its kernel with several sizes of
blocks (automodel_ckpt/optim/adam8bit_kernel.py). Weights are in float32, then in bfloat16 with further bits.
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

from automodel_ckpt.optim import adam8bit
from automodel_ckpt.optim.adam8bit import AdamW8bit
from automodel_ckpt.optim.build import LEAST_ELEMENTS

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
CANDIDATES_8_BIT = ((1024, 4), (2048, 8), (2048, 4), (512, 2), (512, 1), (256, 1))
"""Elements of a block, and warps."""
BYTES_8_BIT = {torch.float32: 16.0625, torch.bfloat16: 14.0625}
"""Of a parameter: weights and codes are read and written, and 1/256 of the scales; gradients are read."""
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
def changed(module: Any, **values: Any) -> Iterator[None]:
    """Let *module* have other values of its constants and functions."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


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


def measured(
    name: str, nbytes: float, work: Callable[[], Any], device: str, rounds: int
) -> dict[str, Any]:
    """The time of *work*, which reads and writes *nbytes*, or its error. Prints a line."""
    try:
        found = milliseconds(work, device, rounds)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:300]
        print(f"{name:42} {text}", flush=True)
        return {"error": text}
    rate = nbytes / found / 1e9
    print(f"{name:42} {found:8.2f} ms {rate:6.2f} TB/s", flush=True)
    return {"ms": found, "TB/s": rate}


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
        figures[name] = measured(name, nbytes * num_parameters, work, device, rounds)

    print(f"{num_parameters:,} parameters in {len(shapes)} tensors", flush=True)
    add("copies", 8, lambda: torch._foreach_copy_(rows[2], rows[1]))
    theirs: Kernel = by_torch
    add("torch", 28, lambda: theirs(*rows, **SETTINGS))
    add("torch, divided", 32, lambda: theirs(*rows, **SETTINGS, **divided))
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        print("without Triton's interpreter, only torch's kernel")
        return figures
    from automodel_ckpt.optim import adamw_kernel

    ours: Kernel = adamw_kernel.update
    for candidate in CANDIDATES:
        block, num_warps, eviction = candidate
        name = f"block {block}, {num_warps} warps, {eviction or 'no policy'}"
        with changed(adamw_kernel, _BLOCK=block, _WARPS=num_warps, _EVICTION=eviction):
            if candidate is CANDIDATES[0]:
                add(f"{name}, not divided", 28, lambda: ours(*rows, **SETTINGS))
            add(f"{name}, divided", 28, lambda: ours(*rows, **SETTINGS, **divided))
    sample = [row[1:3] for row in rows]
    options = {**divided, "grad_scale": torch.full((), 1.7, device=device)}
    figures["differences"] = differences(ours, sample, options)
    num_values = sum(each.numel() for each in sample[0])
    print(f"differences from torch's among {num_values:,}: {figures['differences']}", flush=True)
    return figures


def made_8_bit(shapes: list[tuple[int, ...]], device: str, dtype: torch.dtype) -> AdamW8bit:
    """An optimizer of random parameters with gradients."""
    generator = torch.Generator(device).manual_seed(0)
    parameters = []
    for shape in shapes:
        options: dict[str, Any] = {"device": device, "generator": generator}
        weights = torch.randn(shape, **options).mul_(0.02).to(dtype)
        parameters.append(torch.nn.Parameter(weights))
        parameters[-1].grad = torch.randn(shape, **options).mul_(1e-4).to(dtype)
    return AdamW8bit(parameters, lr=1e-5, betas=(0.9, 0.95), float32_weights=True)


def differences_8_bit(
    shapes: list[tuple[int, ...]], device: str, dtype: torch.dtype, kernel: Any
) -> dict[str, float]:
    """How many codes and weights of the kernel differ after some steps from those in chunks, and by how much."""
    optimizers = []
    for module in (kernel, None):
        optimizer = made_8_bit(shapes, device, dtype)
        with changed(adam8bit, _row_kernel=lambda _, module=module: module):
            for _ in range(CHECKED_STEPS):
                optimizer.step()
        optimizers.append(optimizer)
    found = {"weights_differ": 0.0, "codes_differ": 0.0, "largest_in_rates": 0.0}
    states = zip(*(each.state.items() for each in optimizers), strict=True)
    for (weights, state), (others, other_state) in states:
        distances = (weights.detach().float() - others.detach().float()).abs()
        found["weights_differ"] += float((distances > 0).sum())
        found["largest_in_rates"] = max(found["largest_in_rates"], float(distances.max()) / 1e-5)
        for name in ("exp_avg_codes", "exp_avg_sq_codes"):
            found["codes_differ"] += float((state[name] != other_state[name]).sum())
    return found


def compare_8_bit(
    shapes: list[tuple[int, ...]], device: str, rounds: int
) -> dict[str, dict[str, Any]]:
    """Time steps with 8-bit moments on *shapes*, and print a line for each. Returns the figures by name."""
    figures: dict[str, dict[str, Any]] = {}
    num_parameters = sum(rows * columns for rows, columns in shapes)
    print(f"8-bit moments: {num_parameters:,} parameters in {len(shapes)} tensors", flush=True)
    has_kernel = device != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"
    for dtype, bytes_of_each in BYTES_8_BIT.items():
        optimizer = made_8_bit(shapes, device, dtype)
        nbytes = bytes_of_each * num_parameters
        kind = str(dtype).removeprefix("torch.")
        name = f"{kind}, chunks"
        with changed(adam8bit, _row_kernel=lambda _: None):
            figures[name] = measured(name, nbytes, optimizer.step, device, rounds)
        if not has_kernel:
            continue
        from automodel_ckpt.optim import adam8bit_kernel

        for block, num_warps in CANDIDATES_8_BIT:
            name = f"{kind}, block {block}, {num_warps} warps"
            with (
                changed(adam8bit, _row_kernel=lambda _: adam8bit_kernel),
                changed(adam8bit_kernel, _BLOCK=block, _WARPS=num_warps),
            ):
                figures[name] = measured(name, nbytes, optimizer.step, device, rounds)
        del optimizer
        found = differences_8_bit(shapes[1:3], device, dtype, adam8bit_kernel)
        figures[f"{kind}, differences"] = found
        num_values = sum(rows * columns for rows, columns in shapes[1:3])
        print(f"differences from chunks among {num_values:,}: {found}", flush=True)
    return figures


def main(arguments: list[str] | None = None) -> None:
    """Compare all, and write the figures as JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="small tensors on the CPU")
    parser.add_argument("--moments", choices=("float32", "8-bit"), help="both by default")
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
    device = "cpu" if given.dry_run else "cuda"
    figures: dict[str, Any] = {}
    if given.moments != "8-bit":
        figures |= compare(shapes, device, given.rounds)
    if given.moments != "float32":
        of_8_bit: list[tuple[int, ...]] = (
            [(100, 64), (16, 512), (64, 96)] if given.dry_run else shapes
        )
        figures["8-bit moments"] = compare_8_bit(of_8_bit, device, given.rounds)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
