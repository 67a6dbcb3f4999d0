"""Measure what an asynchronous save costs the training that continues meanwhile, on real ranks.

    python -m tools.bench.async_saves [--size 512M] [--runs 5] [--directory DIR] [--docs]

Two ranks share two cores (``--ranks 1``: one rank with an idle core). A rank's state is that of AdamW over bf16
weights; a step is a forward and a backward of a small network, and with two ranks a sum between them. In each round
every row runs once: steps without a save, the save, and steps until it is done. ``stall`` is the time in which the
call blocks training, relative to a copy of the same bytes to warm memory. ``step`` is the mean time of a step until
the save is done, relative to steps without a save. ``lost`` is the total training time lost, in steps without a save.
Figures are medians over the rounds, of the slowest rank.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, discover
from tests.support import ranks
from tools.bench.checkpoint import model_of
from tools.bench.harness import LIMIT_SECONDS, marked, options_of, parse_size
from tools.support import machine, table, write_block

NUM_ALONE = 10
BYTES_PER_WEIGHT = 2 + 2 + 2
"""bf16 weights and AdamW's two moments of them."""

Pending = Callable[[], bool]
"""Whether a save is done."""


@dataclass
class Row:
    """A way of saving: *start* returns when training may go on."""

    name: str
    start: Callable[[Path], Any]
    ours: bool = False
    stalls: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    failure: str = ""


class Bench:
    """One rank: its state, a step, and the rows."""

    def __init__(self, nbytes: int) -> None:
        self.rank = self.dp_rank = dist.get_rank()
        self.world_size = self.dp_size = dist.get_world_size()
        self.is_rank0 = self.rank == 0
        self.model = model_of(nbytes * self.world_size * 2 // BYTES_PER_WEIGHT)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (self.world_size,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        self.inputs = torch.randn(256, 512)
        self.savers: dict[bool, Checkpointer] = {}
        self.group = dist.new_group(backend="gloo")
        self.stagers: dict[str, Any] = {}
        self.target = torch.zeros(self.nbytes, dtype=torch.uint8)
        self.sources = [value.reshape(-1).view(torch.uint8) for value in self.tensors()]

    def tensors(self) -> list[torch.Tensor]:
        states = [value for entry in self.optimizer.state.values() for value in entry.values()]
        found = [*self.model.parameters(), *states]
        return [
            (value.to_local() if hasattr(value, "to_local") else value).detach() for value in found
        ]

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.tensors())

    def step(self) -> float:
        started = time.perf_counter()
        self.net(self.inputs).square().mean().backward()
        if self.world_size > 1:
            dist.all_reduce(torch.zeros(4))
        return time.perf_counter() - started

    # ---------------------------------------------------------------- rows

    def copy(self, _: Path) -> Pending:
        at = 0
        for source in self.sources:
            self.target[at : at + source.nbytes].copy_(source)
            at += source.nbytes
        return lambda: True

    def ours(self, directory: Path, *, is_async: bool) -> Pending:
        saver = self.savers.get(is_async)
        if saver is None:
            options = CheckpointOptions(is_async=is_async, keep_last=1)
            saver = Checkpointer(directory / f"async-{is_async}", self, dist.group.WORLD, options)
            self.savers[is_async] = saver
        state = discover(SimpleNamespace(model=self.model, optimizer=self.optimizer))
        self.number += 1
        saver.save(state, step=self.number, epoch=0, config_yaml="", losses={}, progress={})
        return lambda: saver.saving() is None

    number = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def torch_sync(self, directory: Path) -> Pending:
        save(self.state_dict(), checkpoint_id=self.fresh(directory), process_group=self.group)
        return lambda: True

    def torch_async(self, directory: Path, kind: AsyncCheckpointerType, *, cached: bool) -> Pending:
        stager = self.stagers.get(kind.value) if cached else None
        if cached and stager is None:
            stager = self.stagers[kind.value] = BlockingAsyncStager(cache_staged_state_dict=True)
            # Its own cache is pinned memory, which takes an accelerator.
            stager.state_dict_cache = _create_cpu_state_dict(self.state_dict(), share_memory=True)
        answer: Any = async_save(
            self.state_dict(),
            checkpoint_id=self.fresh(directory),
            process_group=self.group,
            async_checkpointer_type=kind,
            async_stager=stager,
        )
        future = getattr(answer, "upload_completion", answer)

        def done() -> bool:
            if not future.done():
                return False
            future.result()
            return True

        return done

    def fresh(self, directory: Path) -> Path:
        self.number += 1
        return directory / f"torch-{self.number}"

    def rows(self) -> list[Row]:
        def torchs(name: str, kind: AsyncCheckpointerType, *, cached: bool) -> Row:
            return Row(
                f"torch DCP async_save, {name}",
                lambda d: self.torch_async(d, kind, cached=cached),
            )

        thread, process = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
        return [
            Row("copy into warm memory", self.copy),
            Row("ours, synchronous", lambda d: self.ours(d, is_async=False), ours=True),
            Row("ours, asynchronous", lambda d: self.ours(d, is_async=True), ours=True),
            Row("torch DCP save", self.torch_sync),
            torchs("thread", thread, cached=False),
            torchs("thread, cached stager", thread, cached=True),
            torchs("process, cached stager", process, cached=True),
        ]

    # ---------------------------------------------------------------- rounds

    def measure(self, directory: Path, num_rounds: int) -> list[Row]:
        rows = self.rows()
        for row in rows:  # the first save of each allocates and imports
            self.once(row, directory, record=False)
        for _ in range(num_rounds):
            for row in rows:
                self.once(row, directory, record=True)
        for saver in self.savers.values():
            saver.wait_for_save()
            saver.close()
        return rows

    def once(self, row: Row, directory: Path, *, record: bool) -> None:
        if row.failure:
            return
        self.clear(directory)
        alone = statistics.mean(self.step() for _ in range(NUM_ALONE))
        started = time.perf_counter()
        try:
            done = row.start(directory)
            stall = self.slowest(time.perf_counter() - started)
            beside: list[float] = []
            was_done = False
            while not was_done:
                beside.append(self.step())
                was_done = self.everywhere(done())
        except Exception as error:  # a way that does not work here is reported as such
            row.failure = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            return
        if record:
            mean = statistics.mean(beside)
            row.stalls.append(stall)
            row.steps.append(self.slowest(mean / alone))
            row.lost.append(self.slowest((stall + sum(beside) - len(beside) * alone) / alone))

    def clear(self, directory: Path) -> None:
        """Remove what torch wrote before, and let the disk come to rest."""
        dist.barrier()
        if self.rank == 0:
            for path in directory.glob("torch-*"):
                shutil.rmtree(path)
            os.sync()
        dist.barrier()

    def slowest(self, value: float) -> float:
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return float(tensor)

    def everywhere(self, holds: bool) -> bool:
        tensor = torch.tensor(int(holds))
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return bool(tensor)


def measure(size: int, num_rounds: int, root: Path) -> tuple[int, list[Row]]:
    """The rounds of one rank; returns the bytes of its state, and the rows without their functions."""
    bench = Bench(size)
    rows = bench.measure(root, num_rounds)
    return bench.nbytes, [replace(row, start=os.fspath) for row in rows]


def as_markdown(num_ranks: int, nbytes: int, rows: list[Row]) -> str:
    """A section of the generated part of docs/performance.md."""
    where = f"{num_ranks} ranks on {os.cpu_count()} cores"
    if num_ranks == 1:
        where = "1 rank, an idle core"
    cells = []
    for row in rows:
        values: tuple[str, str, str] = (f"does not work here: {row.failure}", "", "")
        if not row.failure:
            pairs = zip(row.stalls, rows[0].stalls, strict=True)
            stall = statistics.median(stall / copy for stall, copy in pairs)
            step, lost = statistics.median(row.steps), statistics.median(row.lost)
            values = (f"{stall:.2f}", f"{step:.2f}", f"{lost:.1f}")
        cells.append((marked(row.name, row.ours), *values))
    header = ("", "stall (in copies)", "step time while saving", "time lost (in steps)")
    title = f"### Asynchronous saves: {where}, {nbytes / 1e6:.0f} MB per rank"
    return f"{title}\n\n{table(header, cells, numbers=True)}"


def main() -> None:
    parser = options_of(__doc__, 5)
    parser.add_argument("--size", type=parse_size, default="512M", help="of a rank's state (512M)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    given = parser.parse_args()
    parts = [f"{machine()}; medians of {given.runs} rounds."]
    for num_ranks in given.ranks:
        with tempfile.TemporaryDirectory(prefix="bench-async-", dir=given.directory) as root:
            arguments = (given.size, given.runs, Path(root))
            values = ranks.run(measure, num_ranks, *arguments, timeout=LIMIT_SECONDS)
            parts.append(as_markdown(num_ranks, *values[0]))
    block = "\n\n".join(parts)
    print(block)
    if given.docs:
        write_block("bench-async", block)


if __name__ == "__main__":
    main()
