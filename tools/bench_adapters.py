"""Time the products of a linear layer with a LoRA adapter in both orders: python -m tools.bench_adapters [--rank R]

*base first* computes x W' and adds (x A') B' to it; *adapter first* computes (x A') B' and adds x W' to it. The
gradient of the input can be computed in the same two orders. The shapes are those of a Llama of 8B with 8,192 tokens,
in bfloat16 on a GPU; elsewhere, small ones in float32. The numbers are microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

SHAPES = {
    "q and o": (4096, 4096),
    "k and v": (4096, 1024),
    "gate and up": (4096, 14_336),
    "down": (14_336, 4096),
}
"""(features of the input, of the output) of the linear layers."""
ROUNDS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=16)
    given = parser.parse_args()
    for name, shape in SHAPES.items():
        print(json.dumps({"layer": name, **measure(*shape, given.rank)}), flush=True)


def measure(num_in: int, num_out: int, rank: int) -> dict[str, float]:
    """Microseconds of the products in both orders, forward and for the gradient of the input."""
    is_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if is_gpu else torch.float32
    tokens = 8192 if is_gpu else 64
    if not is_gpu:
        num_in, num_out = num_in // 64, num_out // 64
    place: dict[str, Any] = {"device": "cuda" if is_gpu else "cpu", "dtype": dtype}
    inputs: torch.Tensor = torch.randn(tokens, num_in, **place)
    weight: torch.Tensor = torch.randn(num_out, num_in, **place) * num_in**-0.5
    narrow: torch.Tensor = torch.randn(tokens, rank, **place)
    up = torch.randn(num_out, rank, **place)
    down = torch.randn(rank, num_in, **place)
    gradient: torch.Tensor = torch.randn(tokens, num_out, **place)

    def base_only() -> torch.Tensor:
        return inputs @ weight.t()

    def base_first() -> torch.Tensor:
        return (inputs @ weight.t()).addmm_(narrow, up.t(), alpha=2.0)

    def adapter_first() -> torch.Tensor:
        return (narrow @ up.t()).addmm_(inputs, weight.t(), beta=2.0)

    def gradient_base_first() -> torch.Tensor:
        return (gradient @ weight).addmm_(narrow, down)

    def gradient_adapter_first() -> torch.Tensor:
        return (narrow @ down).addmm_(gradient, weight)

    programs = (base_only, base_first, adapter_first, gradient_base_first, gradient_adapter_first)
    for program in programs:
        program()
    seconds: dict[str, list[float]] = {program.__name__: [] for program in programs}
    for _ in range(ROUNDS):
        for program in programs:
            seconds[program.__name__].append(_seconds(program))
    return {name: round(statistics.median(found) * 1e6, 1) for name, found in seconds.items()}


def _seconds(program: Callable[[], torch.Tensor], repeats: int = 3) -> float:
    """Seconds of one call, from several calls after each other."""
    _wait()
    started = time.perf_counter()
    for _ in range(repeats):
        program()
    _wait()
    return (time.perf_counter() - started) / repeats


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
