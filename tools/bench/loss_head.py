"""Compare time and memory of the loss head with full logits, forward and backward, with a large vocabulary.

    python -m tools.bench.loss_head [--vocabulary 128000] [--hidden 512] [--tokens 2048] [--runs 3] [--docs]

Each measurement is a separate process. The implementations alternate, and the result is the median of the ratios within
a round.
``--docs`` writes the figures to docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from tools.bench.harness import in_a_process, options_of, reset_peak, status_bytes
from tools.support import machine, table, write_block

WAYS = {"full": "full logits", "chunks": "**ours**"}
PARTS = (1.0, 0.2)
"""Of the positions with a label."""


def measure(given: argparse.Namespace, way: str, labelled: float) -> list[float]:
    """Seconds of one step after a small one to warm up, and the MB of its peak above the memory before it."""
    import torch

    from automodel_ckpt.loss.causal import labelled_positions, next_token_loss
    from automodel_ckpt.models.loss.loss_head import LossHead

    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = LossHead(given.hidden, given.vocabulary, bias=False)

    def step(num_tokens: int) -> None:
        states = torch.randn(1, num_tokens, given.hidden, requires_grad=True)
        labels = torch.randint(0, given.vocabulary, (1, num_tokens))
        labels[:, : int(num_tokens * (1 - labelled))] = -100
        if way == "full":
            loss = next_token_loss(head(states), labels)
        else:
            with head.computing_loss(*labelled_positions(labels)) as loss_pass:
                loss = loss_pass.loss_in(head(states))
        loss.backward()  # type: ignore[no-untyped-call]

    step(4)
    head.weight.grad = None
    reset_peak()
    before = status_bytes("VmRSS")
    started = time.perf_counter()
    step(given.tokens)
    seconds = time.perf_counter() - started
    return [seconds, (status_bytes("VmHWM") - before) / 2**20]


def main() -> None:
    """Measure and print the figures as a table."""
    parser = options_of(__doc__, 3)
    for name, default in {"vocabulary": 128_000, "hidden": 512, "tokens": 2048}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given, given.one[0], float(given.one[1]))))
        return
    found: dict[tuple[float, str], list[list[float]]] = {
        (p, way): [] for p in PARTS for way in WAYS
    }
    for _ in range(given.runs):
        for (part, way), figures in found.items():
            words = (*sys.argv[1:], "--one", way, part)
            figures.append(in_a_process("tools.bench.loss_head", *words))
    rows = []
    for (part, way), runs in found.items():
        pairs = list(zip(runs, found[part, "full"], strict=True))
        seconds, megabytes = (statistics.median(run[i] for run in runs) for i in (0, 1))
        ratio, part_of = (
            statistics.median(run[i] / base[i] for run, base in pairs) for i in (0, 1)
        )
        cells = (f"{seconds:.2f}", f"{ratio:.2f}", f"{megabytes:.0f}", f"{part_of:.2f}")
        rows.append((WAYS[way], f"{part:.0%}", *cells))
    head = (
        f"{machine()}; one thread. {given.tokens} tokens of width {given.hidden}, a vocabulary of "
        f"{given.vocabulary:,}, float32, forward and backward; memory in addition to the layer's parameters."
    )
    figures_table = table(("", "labels", "seconds", "ratio", "MB", "ratio"), rows, numbers=True)
    block = f"{head}\n\n{figures_table}"
    print(block)
    if given.docs:
        write_block("bench-loss-head", block)


if __name__ == "__main__":
    main()
