"""Compare the cost of incremental saves with that of full saves of the same model.

    python -m tools.bench_incremental [--size 2G] [--frozen 0.71 ...] [--runs 5] [--directory DIR] [--docs]

The model has bfloat16 matrices, of which the given share of bytes does not train, and is saved by one rank without an
optimizer, synchronously and durably. Each round saves three models of the same size once: in full, incrementally, and a
model that has only the matrices that train. The third is the floor: its bytes must be written in any case. Each save
begins after the removal of earlier checkpoints has ended. Prints a table with the medians of the ratios within a round;
with --docs, writes it into docs/performance.md. DIR needs six times the size.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions
from tools.bench_report import write_block
from tools.bench_rounds import machine_text, parse_size

_WIDTH = 2048
# By default, a checkpoint shares files with the one before the last.
_FIRST_INCREMENTAL = 2


class Model(torch.nn.Module):
    """Matrices of about *nbytes* in total; the first of them, about the share *frozen*, do not train."""

    def __init__(self, nbytes: int, frozen: float) -> None:
        super().__init__()
        count = max(2, round(nbytes / (2 * _WIDTH**2)))
        self.matrices = torch.nn.ParameterList()
        for number in range(count):
            value = torch.randn(_WIDTH, _WIDTH, dtype=torch.bfloat16)
            trains = number >= round(frozen * count)
            self.matrices.append(torch.nn.Parameter(value, requires_grad=trains))

    def train_a_step(self) -> None:
        """Change every parameter that trains."""
        with torch.no_grad():
            for parameter in self.matrices:
                if parameter.requires_grad:
                    parameter += 1

    def trained_part(self) -> torch.nn.Module:
        """A model of the parameters that train, which are the same objects."""
        part = torch.nn.Module()
        part.matrices = torch.nn.ParameterList(p for p in self.matrices if p.requires_grad)
        return part

    @property
    def frozen_share(self) -> float:
        sizes = {True: 0, False: 0}
        for parameter in self.matrices:
            sizes[parameter.requires_grad] += parameter.numel()
        return sizes[False] / sum(sizes.values())


@dataclass
class Saver:
    """Saves *model* into a directory, and has the seconds of its saves from the first incremental one on."""

    checkpointer: Checkpointer
    model: torch.nn.Module
    seconds: list[float] = field(default_factory=list)

    def save(self, step: int) -> None:
        os.sync()
        started = time.perf_counter()
        self.checkpointer.save({"model": self.model}, step=step, epoch=0)
        if step >= _FIRST_INCREMENTAL:
            self.seconds.append(time.perf_counter() - started)
        # A removal in the background would delay the next save, which may be one of another kind.
        self.checkpointer.wait()

    def ratio(self, base: Saver) -> float:
        """The median ratio to the time of *base* in the same round."""
        ratios = [mine / other for mine, other in zip(self.seconds, base.seconds, strict=True)]
        return statistics.median(ratios)


def saver(directory: Path, model: torch.nn.Module, model_layout: str, incremental: str) -> Saver:
    options = CheckpointOptions(
        incremental="auto" if incremental == "auto" else False,
        model_layout=model_layout,  # type: ignore[arg-type]
        keep_last=2,
    )
    return Saver(Checkpointer(directory, options=options), model)


def compare(model: Model, directory: Path, model_layout: str, runs: int) -> str:
    """The cells of a row: seconds of a full save, the ratio of the floor, that of an incremental save."""
    full = saver(directory / "full", model, model_layout, "false")
    floor = saver(directory / "floor", model.trained_part(), model_layout, "false")
    incremental = saver(directory / "incremental", model, model_layout, "auto")
    savers = [full, floor, incremental]
    for step in range(_FIRST_INCREMENTAL + runs):
        model.train_a_step()
        for one in savers:
            one.save(step)
    for one in savers:
        one.checkpointer.close()
        shutil.rmtree(one.checkpointer.directory)
    seconds = statistics.median(full.seconds)
    return f"{seconds:.2f} | {floor.ratio(full):.2f} | {incremental.ratio(full):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=parse_size("2G"))
    parser.add_argument("--frozen", type=float, nargs="*", default=[0.71, 0.82, 0.95])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--directory", type=Path)
    parser.add_argument(
        "--docs", action="store_true", help="write the table into docs/performance.md"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scratch = Path(tempfile.mkdtemp(dir=arguments.directory))
    lines = [
        f"{arguments.size / 1e9:g} GB in bfloat16, {machine_text()}; {arguments.runs} rounds.",
        "",
        "| do not train | layout | full save, seconds | only what trains | incremental |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    try:
        for frozen in arguments.frozen:
            model = Model(arguments.size, frozen)
            for model_layout in ("shards", "hf"):
                cells = compare(model, scratch, model_layout, arguments.runs)
                lines.append(f"| {model.frozen_share:.0%} | {model_layout} | {cells} |")
                print(lines[-1], flush=True)
    finally:
        shutil.rmtree(scratch)
    if arguments.docs:
        write_block("bench-incremental", "\n".join(lines))


if __name__ == "__main__":
    main()
