"""Time and memory of the loss head on a GPU with several sizes of its blocks and chunks, and the kernels of a call.

    python -m tools.bench_stored_errors [--tokens 4096 8192] [--dry-run]

The layer trains: 128,256 tokens, hidden states of 4,096 elements, bfloat16. The first row sums up the weight's gradient
in float32; the others store the gradients of logits (models/loss/head_gradients.py). A row has the columns of a block,
the
logits of a chunk, milliseconds, bytes and their share of full logits. 20 seconds on an H200. A dry run has small
sizes, and runs on the CPU, where errors are stored for this comparison only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from automodel_ckpt.models.loss import fused_cross_entropy, head_gradients
from automodel_ckpt.models.loss.fused_cross_entropy import linear_cross_entropy
from tools.bench_loss_kernels import median_seconds

COLUMNS = (2048, 4096, 8192, 16_384)
CHUNKS = (2**25, 2**27)
_ROUNDS = 6
_NUM_KERNELS = 9


@contextmanager
def sized(columns: int, hidden_size: int, chunk: int, *, stores: bool) -> Iterator[None]:
    """Let blocks have *columns*, and chunks *chunk* logits; without *stores*, gradients are summed up."""
    names: tuple[tuple[Any, str, Any], ...] = (
        (head_gradients, "BLOCK_ELEMENTS", columns * hidden_size),
        (fused_cross_entropy, "CHUNK_ELEMENTS_STORED", chunk),
        (fused_cross_entropy, "stores_errors", lambda *_, **__: stores),
        # A CPU computes all logits of a dry run otherwise.
        (fused_cross_entropy, "_FEW", 2**30),
    )
    before = [getattr(module, name) for module, name, _ in names]
    for module, name, value in names:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(names, before, strict=True):
            setattr(module, name, value)


class Head:
    """An output layer with hidden states and labels, random."""

    def __init__(self, device: str, num_tokens: int, vocabulary: int, hidden_size: int) -> None:
        generator = torch.Generator(device).manual_seed(0)
        options: dict[str, Any] = {
            "device": device,
            "generator": generator,
            "dtype": torch.bfloat16,
        }
        self.device = device
        self.hidden = torch.randn(num_tokens, hidden_size, **options).requires_grad_()
        weight = torch.randn(vocabulary, hidden_size, **options).mul_(hidden_size**-0.5)
        self.weight = weight.requires_grad_()
        self.labels = torch.randint(vocabulary, (num_tokens,), device=device, generator=generator)

    def step(self) -> None:
        """The loss and the gradients of the hidden states and of the weight."""
        loss = linear_cross_entropy(self.hidden, self.weight, None, self.labels)
        torch.autograd.grad(loss / len(self.labels), [self.hidden, self.weight])

    def row(self, name: str) -> str:
        """Measure a call; returns the row of the table."""
        seconds = median_seconds(self.step, self.device, _ROUNDS)
        nbytes = 0
        if self.device == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            nbytes = torch.cuda.max_memory_allocated() - before
        # In float32 the log-softmax and two gradients.
        full = 12 * len(self.labels) * len(self.weight)
        return f"| {name} | {1e3 * seconds:.2f} | {nbytes / 1e9:.3f} GB | {nbytes / full:.3f} |"

    def kernels(self) -> Iterator[str]:
        """The kernels of a call that take most time."""
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.step()
            torch.cuda.synchronize()
        events = profiler.key_averages()
        for event in sorted(events, key=lambda event: -event.self_device_time_total)[:_NUM_KERNELS]:
            milliseconds = event.self_device_time_total / 1000
            yield f"{milliseconds:8.2f} ms {event.count:4} {event.key[:90]}"


def main(arguments: list[str] | None = None) -> None:
    """Compare all sizes, and print a table for each number of tokens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--dry-run", action="store_true", help="small sizes, on the CPU")
    given = parser.parse_args(arguments)
    device, vocabulary, hidden_size = (
        ("cpu", 3000, 64) if given.dry_run else ("cuda", 128_256, 4096)
    )
    for num_tokens in [64] if given.dry_run else given.tokens:
        head = Head(device, num_tokens, vocabulary, hidden_size)
        print(
            f"\n{num_tokens} tokens\n\n| block, chunk | ms | memory | of full logits |\n|---|---:|---:|---:|"
        )
        with sized(COLUMNS[0], hidden_size, CHUNKS[0], stores=False):
            print(head.row("sum in float32"), flush=True)
        for columns in COLUMNS:
            for chunk in CHUNKS:
                with sized(columns, hidden_size, chunk, stores=True):
                    print(head.row(f"{columns}, {chunk >> 18} MiB"), flush=True)
        if device == "cuda":
            print("\n" + "\n".join(head.kernels()), flush=True)


if __name__ == "__main__":
    main()
