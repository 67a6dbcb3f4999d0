"""Compare the cost of incremental saves with that of full saves of the same model.

    python -m tools.bench_incremental [--size 1G] [--frozen 0.71] [--runs 5] [--directory DIR]

The model has bfloat16 matrices, of which the given share of bytes does not train, and is saved by one rank without an
optimizer. Each round saves it once in full and once incrementally. Prints a table for docs/performance.md.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions
from tools.bench_rounds import parse_size

_WIDTH = 2048


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

    @property
    def frozen_share(self) -> float:
        sizes = {True: 0, False: 0}
        for parameter in self.matrices:
            sizes[parameter.requires_grad] += parameter.numel()
        return sizes[False] / sum(sizes.values())


def saver(directory: Path, *, incremental: bool, model_layout: str) -> Checkpointer:
    options = CheckpointOptions(
        incremental=incremental,
        model_layout=model_layout,  # type: ignore[arg-type]
        keep_last=2,
    )
    return Checkpointer(directory, options=options)


def timed_save(checkpointer: Checkpointer, model: Model, step: int) -> float:
    """Seconds of a save, after the removals of the one before have ended."""
    model.train_a_step()
    started = time.perf_counter()
    checkpointer.save({"model": model}, step=step, epoch=0)
    return time.perf_counter() - started


def compare(model: Model, directory: Path, model_layout: str, runs: int) -> tuple[float, float]:
    """The median seconds of a full save, and the median ratio of an incremental one within a round."""
    full = saver(directory / "full", incremental=False, model_layout=model_layout)
    incremental = saver(directory / "incremental", incremental=True, model_layout=model_layout)
    seconds: list[float] = []
    ratios: list[float] = []
    # The first save of each run is a full one.
    for step in range(runs + 1):
        base = timed_save(full, model, step)
        mine = timed_save(incremental, model, step)
        if step:
            seconds.append(base)
            ratios.append(mine / base)
    full.close()
    incremental.close()
    shutil.rmtree(directory / "full")
    shutil.rmtree(directory / "incremental")
    return statistics.median(seconds), statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=parse_size("1G"))
    parser.add_argument("--frozen", type=float, default=0.71)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scratch = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        model = Model(arguments.size, arguments.frozen)
        print(f"{model.frozen_share:.0%} of the bytes do not train\n")
        print("| layout | full save, seconds | incremental, ratio |\n|---|---|---|")
        for model_layout in ("shards", "hf"):
            seconds, ratio = compare(model, scratch, model_layout, arguments.runs)
            print(f"| {model_layout} | {seconds:.2f} | {ratio:.2f} |")
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
