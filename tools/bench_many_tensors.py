"""What many small tensors cost when they are saved and loaded, beyond transferring their bytes.

    python -m tools.bench_many_tensors [--tensors 10000] [--ranks 1 2] [--runs 3] [--docs]
    python -m tools.bench_many_tensors --profile first|later|load [--ranks 2] [--model-only]

A list of modules with one small weight each (4 KiB), and AdamW, which has three tensors for each weight. Plain rows
write the same bytes to one file and fsync it, and read it. A later save has the plan of the first one. *extra* is the
time beyond the plain row, in wall time and in processor time: on a busy machine, only processor time can be compared.
``--profile`` prints where rank 0 spends its processor time in one first save, later save or load. ``--docs`` writes the
figures to docs/performance.md.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, discover
from tests.support import ranks
from tools.bench_report import write_block
from tools.bench_rounds import machine

SHAPE = (32, 32)
Times = dict[str, tuple[list[float], list[float]]]
"""By row: wall seconds and processor seconds of each run, of the slowest rank."""


class Row(nn.Module):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SHAPE))


class Rows(nn.Module):
    """A list of modules; fsdp2 shards no bare list."""

    def __init__(self, num_tensors: int) -> None:
        super().__init__()
        self.rows = nn.ModuleList(Row() for _ in range(num_tensors))


@dataclass
class Subject:
    """A model of *num_tensors* weights and its optimizer, on this rank."""

    num_tensors: int
    rank: int = field(default_factory=lambda: dist.get_rank() if dist.is_initialized() else 0)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.world_size, self.dp_rank, self.dp_size = self.size, self.rank, self.size
        self.model = Rows(self.num_tensors)
        if self.size > 1:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (self.size,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        # Not by a step: with DTensors, its cost grows with the square of the number of parameters (torch 2.13).
        for parameter in self.model.parameters():
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}

    def state(self, with_optimizer: bool) -> dict[str, Any]:
        """What is saved, by name."""
        parts: dict[str, Any] = {"model": self.model}
        if with_optimizer:
            parts["optimizer"] = self.optimizer
        return discover(SimpleNamespace(**parts))

    def local_bytes(self, with_optimizer: bool) -> bytes:
        """The bytes of this rank's tensors."""
        tensors = [_local(parameter.detach()) for parameter in self.model.parameters()]
        if with_optimizer:
            for values in self.optimizer.state.values():
                tensors.extend(_local(value) for value in values.values())
        return b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)

    def checkpointer(self, directory: Path) -> Checkpointer:
        group = dist.group.WORLD if self.size > 1 else None
        return Checkpointer(directory, self, group, CheckpointOptions())

    def save(
        self, directory: Path, with_optimizer: bool, saver: Checkpointer | None = None
    ) -> Checkpointer:
        """Save; again with the plan of the save before, if *saver* is what that returned."""
        step = 1 if saver is None else 2
        saver = saver or self.checkpointer(directory)
        saver.save(self.state(with_optimizer), step=step, epoch=0)
        return saver

    def load(self, directory: Path, with_optimizer: bool) -> None:
        loader = self.checkpointer(directory)
        loader.load(self.state(with_optimizer))
        loader.close()

    def write(self, directory: Path, content: bytes) -> None:
        descriptor = os.open(directory / f"plain{self.rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(descriptor, content)
        os.fsync(descriptor)
        os.close(descriptor)

    def read(self, directory: Path) -> None:
        (directory / f"plain{self.rank}").read_bytes()

    def timed(self, run: Callable[[], object]) -> tuple[float, float]:
        """Wall and processor seconds of *run* on the slowest rank."""
        if self.size > 1:
            dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        run()
        taken = torch.tensor([time.perf_counter() - wall, time.process_time() - processor])
        if self.size > 1:
            dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken[0]), float(taken[1])


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def measure(num_tensors: int, num_runs: int, root: Path) -> Times:
    """The times of all rows on this rank's group."""
    subject = Subject(num_tensors)
    times: Times = {}
    for _ in range(num_runs):
        for with_optimizer in (False, True):
            directory = root / ("optimizer" if with_optimizer else "model")
            if subject.rank == 0:
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir()
            content = subject.local_bytes(with_optimizer)
            savers: list[Checkpointer] = []

            def first(
                directory: Path = directory,
                with_optimizer: bool = with_optimizer,
                savers: list[Checkpointer] = savers,
            ) -> None:
                savers.append(subject.save(directory, with_optimizer))

            def again(
                directory: Path = directory,
                with_optimizer: bool = with_optimizer,
                savers: list[Checkpointer] = savers,
            ) -> None:
                subject.save(directory, with_optimizer, savers[0]).close()

            rows: dict[str, Callable[[], object]] = {
                "plain write": partial(subject.write, directory, content),
                "first save": first,
                "later save": again,
                "plain read": partial(subject.read, directory),
                "load": partial(subject.load, directory, with_optimizer),
            }
            for name, run in rows.items():
                wall, processor = subject.timed(run)
                title = f"{name}, with AdamW" if with_optimizer else name
                times.setdefault(title, ([], []))
                times[title][0].append(wall)
                times[title][1].append(processor)
    return times


def profile(what: str, num_tensors: int, with_optimizer: bool, root: Path) -> None:
    """Print where rank 0 spends its processor time in a first save, a later save or a load."""
    subject = Subject(num_tensors)
    saver = subject.save(root, with_optimizer) if what != "first" else None
    profiler = cProfile.Profile(time.thread_time)
    if what == "load":
        profiler.runcall(subject.load, root, with_optimizer)
    else:
        profiler.runcall(subject.save, root, with_optimizer, saver)
    if subject.rank == 0:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(80)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def as_markdown(found: dict[int, Times], num_tensors: int) -> str:
    """The table of docs/performance.md."""
    where = machine()
    load = os.getloadavg()[0]
    head = (
        f"{where['cores']} cores ({where['processor']}), {where['kernel']}, {where['date']}; load average {load:.0f}. "
        f"{num_tensors:,} weights of {SHAPE[0]} x {SHAPE[1]} in float32; medians of seconds, and those beyond a plain "
        "write with fsync, or a plain read, of the same bytes."
    )
    lines = [
        head,
        "",
        "| | ranks | seconds | extra | processor time | extra |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for num_ranks, times in found.items():
        medians = {name: [statistics.median(each) for each in both] for name, both in times.items()}
        for name, (wall, processor) in medians.items():
            if name.startswith("plain"):
                continue
            kind = "plain read" if name.startswith("load") else "plain write"
            plain = medians[kind + name.partition(",")[1] + name.partition(",")[2]]
            lines.append(
                f"| {name} | {num_ranks} | {wall:.2f} | {wall - plain[0]:+.2f} | {processor:.2f} | "
                f"{processor - plain[1]:+.2f} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile", choices=["first", "later", "load"])
    parser.add_argument("--model-only", action="store_true", help="profile without AdamW")
    parser.add_argument("--docs", action="store_true", help="write docs/performance.md")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-many-tensors-") as directory:
        if given.profile:
            num_ranks = given.ranks[0]
            arguments = given.profile, given.tensors, not given.model_only, Path(directory)
            ranks.run(profile, num_ranks, *arguments, timeout=1200, init=num_ranks > 1)
            return 0
        found: dict[int, Times] = {}
        for num_ranks in given.ranks:
            root = Path(directory) / str(num_ranks)
            root.mkdir()
            run = partial(measure, given.tensors, given.runs, root)
            found[num_ranks] = ranks.run(run, num_ranks, timeout=1200, init=num_ranks > 1)[0]
    text = as_markdown(found, given.tensors)
    print(text)
    if given.docs:
        write_block("bench-many-tensors", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
