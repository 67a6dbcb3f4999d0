"""Compare time and memory of the loss head with full logits, forward and backward, with a large vocabulary.

    python -m tools.bench.loss_head [--vocabulary 128000] [--hidden 512] [--tokens 2048] [--rounds 3] [--docs]

Each measurement is a separate process. The implementations alternate, and the result is the median of the ratios within
a round.
``--docs`` writes the figures to docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from tools.bench.memory import reset_peak, status_megabytes
from tools.bench.report import write_block
from tools.bench.rounds import ROOT, machine

WAYS = ("full", "chunks")
PARTS = (1.0, 0.2)
Figures = dict[str, float]
"""``seconds`` of a step, and the ``megabytes`` of its peak above the memory before it."""
Found = dict[tuple[str, float], list[Figures]]
"""(way, part of the positions with a label) -> the figures of each round."""

DEFAULTS = {"vocabulary": 128_000, "hidden": 512, "tokens": 2048, "rounds": 3}


def measure(way: str, labelled: float, vocabulary: int, hidden: int, tokens: int) -> Figures:
    """Seconds of one step after a small one to warm up, and the peak of memory (MB) above that before it."""
    import torch

    from automodel_ckpt.loss.causal import labelled_positions, next_token_loss
    from automodel_ckpt.models.loss.loss_head import LossHead

    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = LossHead(hidden, vocabulary, bias=False)

    def step(num_tokens: int) -> None:
        states = torch.randn(1, num_tokens, hidden, requires_grad=True)
        labels = torch.randint(0, vocabulary, (1, num_tokens))
        labels[:, : int(num_tokens * (1 - labelled))] = -100
        if way == "full":
            loss = next_token_loss(head(states), labels)
        else:
            with head.computing_loss(*labelled_positions(labels)) as loss_pass:
                loss = loss_pass.loss_in(head(states))
        loss.backward()  # type: ignore[no-untyped-call]

    def reset() -> None:
        head.weight.grad = None

    return figures_of(step, tokens, reset=reset)


def figures_of(
    step: Callable[[int], None], num_tokens: int, *, reset: Callable[[], None]
) -> Figures:
    """Measure ``step(num_tokens)`` after a small step to warm up; *reset* frees the gradients of that one."""
    step(4)
    reset()
    reset_peak()
    before = status_megabytes("VmRSS")
    started = time.perf_counter()
    step(num_tokens)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "megabytes": status_megabytes("VmHWM") - before}


def arguments(description: str | None, defaults: Mapping[str, int]) -> argparse.Namespace:
    """Parse the command line: a number for each of *defaults*, and ``--docs``.

    ``one`` is the list of values that :func:`in_a_process` passed to this process; None in the first process.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--docs", action="store_true", help="write the figures to docs/performance.md"
    )
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_a_process(*one: object) -> Figures:
    """Run this module with the arguments of this process and ``--one``; return the JSON that it prints."""
    values = [str(value) for value in one]
    command = [sys.executable, "-m", "tools.bench.loss_head", *sys.argv[1:], "--one", *values]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT)
    found: Figures = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure and print the figures as a table."""
    given = arguments(__doc__, DEFAULTS)
    sizes = (given.vocabulary, given.hidden, given.tokens)
    if given.one:
        print(json.dumps(measure(given.one[0], float(given.one[1]), *sizes)))
        return
    found: Found = {(way, part): [] for part in PARTS for way in WAYS}
    for _ in range(given.rounds):
        for way, part in found:
            found[way, part].append(in_a_process(way, part))
    block = as_markdown(found, *sizes)
    print(block)
    if given.docs:
        write_block("bench-loss-head", block)


def as_markdown(found: Found, vocabulary: int, hidden: int, tokens: int) -> str:
    """The generated part of docs/performance.md."""
    where = machine()
    head = (
        f"{where['cores']} cores ({where['processor']}), {where['kernel']}, {where['date']}; one thread. {tokens} "
        f"tokens of width {hidden}, a vocabulary of {vocabulary:,}, float32, forward and backward; memory in addition "
        "to the layer's parameters."
    )
    table = ["| | labels | seconds | ratio | MB | ratio |", "|---|---:|---:|---:|---:|---:|"]
    for (way, part), runs in found.items():
        seconds, ratio, megabytes, part_of = (
            statistics.median(values)
            for name in ("seconds", "megabytes")
            for values in ([run[name] for run in runs], _ratios(runs, found["full", part], name))
        )
        named = "full logits" if way == "full" else "**ours**"
        table.append(
            f"| {named} | {part:.0%} | {seconds:.2f} | {ratio:.2f} | {megabytes:.0f} | {part_of:.2f} |"
        )
    return "\n".join([head, "", *table])


def _ratios(runs: list[Figures], base: list[Figures], name: str) -> list[float]:
    return [run[name] / other[name] for run, other in zip(runs, base, strict=True)]


if __name__ == "__main__":
    main()
