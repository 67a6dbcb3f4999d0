"""Measure what an asynchronous save costs the training that continues meanwhile, on real ranks.

    python -m tools.bench.async_saves [--size 512M] [--ranks 2] [--runs 5] [--directory DIR] [--docs]

Two ranks share two cores. A rank's state is AdamW's over bf16 weights; a step is a forward and a backward of a
small network, and a sum between the ranks. In each round every row runs once: steps without a save, the save, and
steps until it is done. ``stall`` is the time in which the call blocks training, relative to a copy of the same bytes to
warm memory. ``step`` is the mean time of a step until the save is done, relative to steps without a save. ``lost`` is
the total training time lost, in steps without a save. Figures are medians over the rounds, of the slowest rank.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
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

from automodel_ckpt.checkpoint import Checkpointer, discover
from tests.support import ranks
from tools.bench.checkpoint import Bench
from tools.bench.harness import LIMIT_SECONDS, marked, options_of, parse_size
from tools.support import machine, table, write_block

NUM_ALONE = 10
BYTES_PER_WEIGHT = 2 + 2 + 2
"""bf16 weights and AdamW's two moments of them."""
THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
Done = Callable[[], bool]
"""Whether a save is done."""
Figures = tuple[float, float, float]
"""The seconds of the stall, the time of a step while saving in usual steps, and the time lost in usual steps."""


class AsyncBench(Bench):
    """One rank: its state, a step, and the ways of saving, each of which returns when training may go on."""

    def __init__(self, nbytes: int, directory: Path) -> None:
        super().__init__(nbytes * dist.get_world_size() * 2 // BYTES_PER_WEIGHT)
        self.directory = directory
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        states = [value for entry in self.optimizer.state.values() for value in entry.values()]
        tensors = [self.shard(value) for value in (*self.model.parameters(), *states)]
        self.sources = [value.reshape(-1).view(torch.uint8) for value in tensors]
        self.nbytes = sum(source.nbytes for source in self.sources)
        self.target = torch.zeros(self.nbytes, dtype=torch.uint8)
        self.net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        self.inputs = torch.randn(256, 512)
        # A save runs its collectives in a thread, while the training runs its own.
        self.group = dist.new_group(backend="gloo")
        self.savers: dict[bool, Checkpointer] = {}
        self.stagers: dict[AsyncCheckpointerType, BlockingAsyncStager] = {}
        self.number = 0

    def step(self) -> float:
        started = time.perf_counter()
        self.net(self.inputs).square().mean().backward()
        dist.all_reduce(torch.zeros(4))
        return time.perf_counter() - started

    # ---------------------------------------------------------------- ways of saving

    def copy(self) -> Done:
        at = 0
        for source in self.sources:
            self.target[at : at + source.nbytes].copy_(source)
            at += source.nbytes
        return lambda: True

    def ours_with(self, is_async: bool) -> Done:
        if is_async not in self.savers:
            place = self.directory / f"async-{is_async}"
            self.savers[is_async] = self.checkpointer(place, is_async=is_async, keep_last=1)
        saver = self.savers[is_async]
        state = discover(SimpleNamespace(model=self.model, optimizer=self.optimizer))
        saver.save(state, step=self.number, epoch=0, config_yaml="", losses={}, progress={})
        return lambda: saver.saving() is None

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def torch_sync(self) -> Done:
        place = self.directory / f"torch-{self.number}"
        save(self.state_dict(), checkpoint_id=place, process_group=self.group)
        return lambda: True

    def torch_async(self, kind: AsyncCheckpointerType, cached: bool) -> Done:
        if cached and kind not in self.stagers:
            stager = self.stagers[kind] = BlockingAsyncStager(cache_staged_state_dict=True)
            # Its own cache is pinned memory, which takes an accelerator.
            stager.state_dict_cache = _create_cpu_state_dict(self.state_dict(), share_memory=True)
        answer: Any = async_save(
            self.state_dict(),
            checkpoint_id=self.directory / f"torch-{self.number}",
            process_group=self.group,
            async_checkpointer_type=kind,
            async_stager=self.stagers[kind] if cached else None,
        )
        future = getattr(answer, "upload_completion", answer)
        # Raises the error of a save that failed.
        return lambda: future.done() and (future.result() or True)

    def ways(self) -> dict[str, Callable[[], Done]]:
        return {
            "copy into warm memory": self.copy,
            "ours, synchronous": partial(self.ours_with, False),
            "ours, asynchronous": partial(self.ours_with, True),
            "torch DCP save": self.torch_sync,
            "torch DCP async_save, thread": partial(self.torch_async, THREAD, False),
            "torch DCP async_save, thread, cached stager": partial(self.torch_async, THREAD, True),
            "torch DCP async_save, process, cached stager": partial(
                self.torch_async, PROCESS, True
            ),
        }

    # ---------------------------------------------------------------- rounds

    def measured(self, num_rounds: int) -> dict[str, list[Figures]]:
        found: dict[str, list[Figures]] = {name: [] for name in self.ways()}
        for _ in range(num_rounds + 1):
            for name, way in self.ways().items():
                found[name].append(self.once(way))
        for saver in self.savers.values():
            saver.wait_for_save()
            saver.close()
        # The first save of each allocates and imports.
        return {name: figures[1:] for name, figures in found.items()}

    def once(self, way: Callable[[], Done]) -> Figures:
        self.clear()
        self.number += 1
        alone = statistics.mean(self.step() for _ in range(NUM_ALONE))
        started = time.perf_counter()
        done = way()
        stall = self.slowest(time.perf_counter() - started)
        steps = [self.step()]
        # Until it is done on every rank.
        while self.slowest(float(not done())) > 0:
            steps.append(self.step())
        lost = (stall + sum(steps) - len(steps) * alone) / alone
        return stall, self.slowest(statistics.mean(steps) / alone), self.slowest(lost)

    def clear(self) -> None:
        """Remove what torch wrote before, and let the disk come to rest."""
        dist.barrier()
        if self.rank == 0:
            for path in self.directory.glob("torch-*"):
                shutil.rmtree(path)
            os.sync()
        dist.barrier()


def measure(size: int, num_rounds: int, root: Path) -> tuple[int, dict[str, list[Figures]]]:
    """The bytes of a rank's state, and the figures of each round by way."""
    bench = AsyncBench(size, root)
    return bench.nbytes, bench.measured(num_rounds)


def as_markdown(num_ranks: int, nbytes: int, found: dict[str, list[Figures]]) -> str:
    """A section of the generated part of docs/performance.md."""
    copies = [stall for stall, _, _ in next(iter(found.values()))]
    rows = []
    for name, figures in found.items():
        stalls, steps, lost = zip(*figures, strict=True)
        stall = statistics.median(one / copy for one, copy in zip(stalls, copies, strict=True))
        cells = (
            f"{stall:.2f}",
            f"{statistics.median(steps):.2f}",
            f"{statistics.median(lost):.1f}",
        )
        rows.append((marked(name), *cells))
    header = ("", "stall (in copies)", "step time while saving", "time lost (in steps)")
    where = f"{num_ranks} ranks on {os.cpu_count()} cores, {nbytes / 1e6:.0f} MB per rank"
    return f"### Asynchronous saves: {where}\n\n{table(header, rows, numbers=True)}"


def main() -> None:
    parser = options_of(__doc__, 5)
    parser.add_argument("--size", type=parse_size, default="512M", help="of a rank's state (512M)")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-async-", dir=given.directory) as root:
        arguments = (given.size, given.runs, Path(root))
        values = ranks.run(measure, given.ranks, *arguments, timeout=LIMIT_SECONDS)
    head = f"{machine()}; medians of {given.runs} rounds."
    block = f"{head}\n\n{as_markdown(given.ranks, *values[0])}"
    print(block)
    if given.docs:
        write_block("bench-async", block)


if __name__ == "__main__":
    main()
