"""Measure what checkpoints in memory cost training: the copy that it waits for, and the steps beside the writer.

    python -m tools.bench_memory_copy [--size 512M] [--runs 9] [--ranks 1 2] [--docs]

A rank's state is that of AdamW over bf16 weights, and a step is that of :mod:`tools.bench_async`. Each round has, in
this order: steps alone, a copy of the state into memory of the same kind as the writer's (shared, and touched before),
a save to memory, steps until it is published, and steps alone again. ``copy`` is the time that training waits for the
save, relative to that of the plain copy. ``step`` is the time of a step beside the save, relative to that of a step
alone. Both are measured in wall time and in processor time of the rank: on a busy machine, only the latter can be
compared. Figures are medians of the ratios within rounds, with their quartiles, on the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from automodel_ckpt.checkpoint import Checkpointer, discover
from automodel_ckpt.checkpoint.files.layout import DataParallelRanks
from automodel_ckpt.checkpoint.saving.host_memory import HostMemory
from automodel_ckpt.config.keys.checkpoint import CheckpointConfig, MemoryConfig
from automodel_ckpt.training.saves.memory_saves import MemorySaves
from tools.bench_async import Bench, ranks_started
from tools.bench_report import write_block
from tools.bench_rounds import machine, parse_size

MEMORY = MemoryConfig().directory
NUM_ALONE = 20
TIMEOUT_SECONDS = 120.0
MAX_BESIDE = 60
"""Steps beside a save that are timed; the writer has a low priority and can take long on a busy machine."""
NAMES = ("copy", "copy, processor time", "step", "step, processor time")
GOALS = (1.1, 1.1, 1.05, 1.05)


class MemoryBench:
    """One rank: its state, its memory checkpoints, and a plain copy."""

    def __init__(self, nbytes: int, root: Path) -> None:
        self.bench = Bench(nbytes)
        ranks = DataParallelRanks(dist.get_rank(), dist.get_world_size())
        group = dist.group.WORLD
        self.disk = Checkpointer(root / "run", ranks, group)
        self.disk.open()
        section = MemoryConfig(every_steps=1, directory=str(root))
        self.memory = MemorySaves(
            section, CheckpointConfig(), self.disk, ranks, group, TIMEOUT_SECONDS
        )
        self.memory.start(None, 0)
        self.warm = HostMemory()
        self.warm.reserve(self.bench.nbytes)
        self.number = 0

    def steps_alone(self) -> tuple[float, float]:
        """Mean (wall, processor) seconds of a step."""
        wall, processor = zip(*(_timed(self.bench.step) for _ in range(NUM_ALONE)), strict=True)
        return statistics.mean(wall), statistics.mean(processor)

    def copy(self) -> None:
        """Copy the state into warm memory."""
        position = 0
        for source in self.bench.sources:
            self.warm.tensor[position : position + source.nbytes].copy_(source)
            position += source.nbytes

    def save(self) -> None:
        """Begin a save to memory."""
        self.number += 1
        self.memory.save(self.number, self._save)

    def _save(self, checkpointer: Checkpointer) -> None:
        state = discover(SimpleNamespace(model=self.bench.model, optimizer=self.bench.optimizer))
        checkpointer.save(state, step=self.number, epoch=0, config_yaml="", losses={}, progress={})

    def steps_beside(self) -> tuple[float, float]:
        """Mean (wall, processor) seconds of a step until the save is published on all ranks."""
        spent: list[tuple[float, float]] = []
        checkpointer = self.memory.checkpointer
        assert checkpointer is not None, "a save to memory failed"
        while len(spent) < MAX_BESIDE:
            spent.append(_timed(self.bench.step))
            if self.bench.everywhere(checkpointer.saving() is None):
                break
        self.memory.finish_save()
        wall, processor = zip(*spent, strict=True)
        return statistics.mean(wall), statistics.mean(processor)

    def round(self) -> list[float]:
        """The ratios of one round, on the slowest rank: see NAMES."""
        dist.barrier()
        before = self.steps_alone()
        dist.barrier()
        copy = _timed(self.copy)
        dist.barrier()
        save = _timed(self.save)
        beside = self.steps_beside()
        after = self.steps_alone()
        ratios = [of_save / of_copy for of_save, of_copy in zip(save, copy, strict=True)]
        ratios += [2 * one / (a + b) for one, a, b in zip(beside, before, after, strict=True)]
        return [self.bench.slowest(ratio) for ratio in ratios]

    def close(self) -> None:
        self.memory.finish_save()
        self.memory.remove()
        self.disk.close()
        self.warm.close()


def _timed(action: Callable[[], object]) -> tuple[float, float]:
    """(Wall, processor) seconds of *action*."""
    wall, processor = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - processor


def rank_main(arguments: argparse.Namespace, root: Path) -> Any:
    """The rounds of one rank; returns (bytes of its state, the ratios of each round)."""
    measured = MemoryBench(arguments.size, root)
    for _ in range(2):  # the first saves allocate memory and import modules
        measured.round()
    rounds = [measured.round() for _ in range(arguments.runs)]
    nbytes = measured.bench.nbytes
    measured.close()
    return nbytes, rounds


def as_markdown(results: Sequence[tuple[int, int, list[list[float]]]], num_rounds: int) -> str:
    here = machine()
    load = os.getloadavg()[0]
    place = f"{here['cores']} cores ({here['processor']}), {here['kernel']}, {here['date']}"
    lines = [
        f"{place}, load average {load:.0f}; medians of {num_rounds} rounds (quartiles).",
        "",
        f"| ranks | MB per rank | {' | '.join(NAMES)} |",
        "|---:|---:|" + "---:|" * len(NAMES),
        f"| | goal | {' | '.join(f'{goal:g}' for goal in GOALS)} |",
    ]
    for num_ranks, nbytes, rounds in results:
        cells = []
        for ratios in zip(*rounds, strict=True):
            low, middle, high = statistics.quantiles(ratios, n=4)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {num_ranks} | {nbytes / 1e6:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=parse_size, default="512M", help="bytes of a rank's state")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--directory", default=MEMORY, help="a directory on a tmpfs")
    parser.add_argument("--docs", action="store_true", help="write docs/performance.md")
    arguments = parser.parse_args()
    results = []
    for num_ranks in arguments.ranks:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.directory) as root:
            nbytes, rounds = ranks_started(num_ranks, rank_main, arguments, Path(root))
        results.append((num_ranks, nbytes, rounds))
    block = as_markdown(results, arguments.runs)
    print(block)
    if arguments.docs:
        write_block("bench-memory-copy", block)


if __name__ == "__main__":
    main()
