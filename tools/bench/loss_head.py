"""Compare time and memory of the loss head with full logits, forward and backward, with a large vocabulary.

    python -m tools.bench.loss_head [--vocabulary 128000] [--hidden 512] [--tokens 2048] [--runs 3] [--docs]

Each measurement is a separate process. The implementations alternate, and the result is the median of the ratios within
a round. ``--docs`` writes the figures to docs/performance.md.
"""

import argparse
import statistics
import time

import torch

from automodel_ckpt.loss.causal import labelled_positions, next_token_loss
from automodel_ckpt.models.loss.loss_head import LossHead
from tests.support import ranks
from tools.bench.harness import LIMIT_SECONDS, marked, options_of, reset_peak, status_bytes
from tools.support import machine, table, write_block

FULL = "full logits"
CASES = [(part, way) for part in (1.0, 0.2) for way in (FULL, "ours")]
"""The part of the positions with a label, and the implementation."""


def measure(given: argparse.Namespace, labelled: float, way: str) -> tuple[float, float]:
    """Seconds of one step after a small one to warm up, and the MB of its peak above the memory before it."""
    torch.manual_seed(0)
    head = LossHead(given.hidden, given.vocabulary, bias=False)

    def step(num_tokens: int) -> None:
        states = torch.randn(1, num_tokens, given.hidden, requires_grad=True)
        labels = torch.randint(0, given.vocabulary, (1, num_tokens))
        labels[:, : int(num_tokens * (1 - labelled))] = -100
        if way == FULL:
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
    return seconds, (status_bytes("VmHWM") - before) / 2**20


def main() -> None:
    parser = options_of(__doc__, 3)
    for name, default in {"vocabulary": 128_000, "hidden": 512, "tokens": 2048}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    found: dict[tuple[float, str], list[tuple[float, float]]] = {case: [] for case in CASES}
    for _ in range(given.runs):
        for case, figures in found.items():
            arguments = (given, *case)
            figures += ranks.run(measure, 1, *arguments, init=False, timeout=LIMIT_SECONDS)
    rows = []
    for (part, way), figures in found.items():
        cells = [f"{part:.0%}"]
        for index, digits in enumerate((2, 0)):
            pairs = [
                (one[index], base[index])
                for one, base in zip(figures, found[part, FULL], strict=True)
            ]
            cells.append(f"{statistics.median(one for one, _ in pairs):.{digits}f}")
            cells.append(f"{statistics.median(one / base for one, base in pairs):.2f}")
        rows.append((marked(way), *cells))
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
