"""Compare memory and time of a distillation's loss in chunks with one from full logits, with a large vocabulary.

    python -m tools.bench_distillation [--vocabulary 128000] [--hidden 512] [--teacher 1024] [--tokens 2048] [--docs]

Each measurement is a separate process: forward and backward of the student's output layer with the logits of a teacher,
and with 64 cached tokens of each position. The figures are the medians of the rounds. ``--docs`` writes them to
docs/performance.md.
"""

from __future__ import annotations

import json
import statistics

from tools.bench_report import write_block
from tools.bench_rounds import machine
from tools.bench_steps import Figures, arguments, figures_of, in_a_process

WAYS = {
    "full": "full logits of both",
    "chunks": "**ours**, a teacher in memory",
    "top": "**ours**, 64 cached tokens",
}
TOP_K = 64

DEFAULTS = {"vocabulary": 128_000, "hidden": 512, "teacher": 1024, "tokens": 2048, "rounds": 3}


def measure(way: str, vocabulary: int, hidden: int, teacher: int, tokens: int) -> Figures:
    """Seconds of one step after a small one to warm up, and the peak of memory (MB) above that before it."""
    import torch
    import torch.nn.functional as F

    from automodel_ckpt.models.loss.distillation_targets import (
        DistillationWeights,
        LogitTargets,
        TopTargets,
    )
    from automodel_ckpt.models.loss.fused_distillation import Distillation
    from automodel_ckpt.models.loss.loss_head import LossHead

    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = LossHead(hidden, vocabulary, bias=False)
    of_teacher = LossHead(teacher, vocabulary, bias=False).requires_grad_(False)
    weights = DistillationWeights(kd_ratio=0.5, temperature=2.0)

    def full(states: torch.Tensor, theirs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        temperature = weights.temperature
        logits = head(states)
        teacher_logits = of_teacher(theirs)
        log_probs = F.log_softmax(logits / temperature, -1)
        teacher_log_probs = F.log_softmax(teacher_logits / temperature, -1)
        divergence = F.kl_div(log_probs, teacher_log_probs, reduction="sum", log_target=True)
        cross_entropy = F.cross_entropy(logits, labels, reduction="sum")
        # With this factor, gradients do not depend on the temperature.
        return (cross_entropy + divergence * temperature**2) / 2

    def step(num_tokens: int) -> None:
        states = torch.randn(num_tokens, hidden, requires_grad=True)
        theirs = torch.randn(num_tokens, teacher)
        labels = torch.randint(0, vocabulary, (num_tokens,))
        if way == "full":
            loss = full(states, theirs, labels)
        else:
            targets: LogitTargets | TopTargets = LogitTargets(
                lambda start, end: of_teacher.logits_of(theirs[start:end])
            )
            if way == "top":
                ids = torch.arange(TOP_K).repeat(num_tokens, 1)
                log_probs = torch.full((num_tokens, TOP_K), -5.0)
                targets = TopTargets(ids, log_probs, torch.full((num_tokens,), -1.0))
            positions = torch.arange(num_tokens)
            criterion = Distillation(targets, weights)
            with head.computing_loss(positions, labels, criterion=criterion) as loss_pass:
                loss = loss_pass.loss_in(head(states))
        loss.backward()  # type: ignore[no-untyped-call]

    def reset() -> None:
        head.weight.grad = None

    return figures_of(step, tokens, reset=reset)


def main() -> None:
    """Measure and print the figures as a table."""
    given = arguments(__doc__, DEFAULTS)
    sizes = (given.vocabulary, given.hidden, given.teacher, given.tokens)
    if given.one:
        print(json.dumps(measure(given.one[0], *sizes)))
        return
    found: dict[str, list[Figures]] = {way: [] for way in WAYS}
    for _ in range(given.rounds):
        for way, runs in found.items():
            runs.append(in_a_process("tools.bench_distillation", way))
    block = as_markdown(found, *sizes)
    print(block)
    if given.docs:
        write_block("bench-distillation", block)


def as_markdown(
    found: dict[str, list[Figures]],
    vocabulary: int,
    hidden: int,
    teacher: int,
    tokens: int,
) -> str:
    """The generated part of docs/performance.md."""
    where = machine()
    head = (
        f"{where['cores']} cores ({where['processor']}), {where['kernel']}, {where['date']}; one thread. {tokens} "
        f"labels, a student of width {hidden}, a teacher of width {teacher}, a vocabulary of {vocabulary:,}, float32, "
        "forward and backward; memory in addition to the layers' parameters."
    )
    table = ["| | seconds | MB | ratio |", "|---|---:|---:|---:|"]
    base = statistics.median(run["megabytes"] for run in found["full"])
    for way, runs in found.items():
        seconds = statistics.median(run["seconds"] for run in runs)
        megabytes = statistics.median(run["megabytes"] for run in runs)
        table.append(f"| {WAYS[way]} | {seconds:.2f} | {megabytes:.0f} | {megabytes / base:.2f} |")
    return "\n".join([head, "", *table])


if __name__ == "__main__":
    main()
