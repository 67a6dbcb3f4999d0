"""Time and added memory of the loss head beside the full logits, forward and backward, at a large vocabulary.

    python tools/bench_loss_head.py [--vocabulary 128000] [--hidden 512] [--tokens 2048] [--rounds 3]

Each measurement is a process of its own; the ways take turns, and the medians are compared.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

WAYS = ("full", "chunks")
PARTS = (1.0, 0.2)


def measure(way: str, labelled: float, vocabulary: int, hidden: int, tokens: int) -> dict[str, float]:
    """Seconds of one step after a small one to warm up, and the peak of memory (MB) above what stood before it."""
    import torch

    from automodel_ckpt.models.loss_head import LossHead
    from automodel_ckpt.training.loss import labelled_positions, next_token_loss

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
            with head.loss_of(*labelled_positions(labels)):
                loss = head(states)
        loss.backward()  # type: ignore[no-untyped-call]

    step(4)
    head.weight.grad = None
    Path("/proc/self/clear_refs").write_text("5")
    before, started = _memory("VmRSS"), time.perf_counter()
    step(tokens)
    return {"seconds": time.perf_counter() - started, "megabytes": _memory("VmHWM") - before}


def _memory(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    """Measure and print the figures as a table and the ratios as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("vocabulary", 128_000), ("hidden", 512), ("tokens", 2048), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = (given.vocabulary, given.hidden, given.tokens)
    if given.one:
        print(json.dumps(measure(given.one[0], float(given.one[1]), *sizes)))
        return
    found: dict[tuple[str, float], list[dict[str, float]]] = {(way, part): [] for part in PARTS for way in WAYS}
    for _ in range(given.rounds):
        for way, part in found:
            found[way, part].append(_in_a_process(way, part))
    report({key: {n: statistics.median(r[n] for r in runs) for n in runs[0]} for key, runs in found.items()})


def _in_a_process(way: str, part: float) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--one", way, str(part)]
    answer: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return answer


def report(medians: dict[tuple[str, float], dict[str, float]]) -> None:
    """Print the table, and one line of ratios to the full head of the same labels."""
    for (way, part), value in medians.items():
        print(f"{way:7} {part:4.0%} labels: {value['seconds']:6.2f} s {value['megabytes']:7.0f} MB")
    ratios = {
        f"{name} at {part:.0%}": round(medians["chunks", part][name] / medians["full", part][name], 3)
        for part in PARTS
        for name in ("seconds", "megabytes")
    }
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
