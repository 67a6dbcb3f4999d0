"""Compare the cost of saving, loading and consolidating with moving the same bytes, and with other programs.

    python -m tools.bench.checkpoint [--size 1G] [--ranks 2] [--runs 3] [--docs] [--json FILE]

A Llama-shaped bf16 model, sharded by FSDP2 over gloo ranks. Every row runs once in each round, so that changes in the
machine's speed affect all rows equally. The figures are medians over the rounds. Ratios are relative to the first row
of the group, which moves the same number of bytes with system calls; seconds are only comparable on the same machine.
``--docs`` writes docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, Manifest, discover
from automodel_ckpt.checkpoint.parts.verify import verify
from tools.bench import consolidate
from tools.bench.report import as_text, write_page
from tools.bench.rounds import (
    Group,
    Row,
    as_json,
    cold,
    data_files,
    fsync_all,
    llama_shapes,
    parse_size,
    rounds,
)


def model_of(nbytes: int) -> nn.Module:
    """A module with the matrices of a Llama model and a norm per layer, in bf16."""
    shapes, num_layers = llama_shapes(nbytes, 2)
    model = nn.Module()
    for number in range(num_layers):
        layer = nn.Module()
        for name, shape in {**shapes, "norm": shapes["q"][:1]}.items():
            layer.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)))
        model.add_module(f"layer{number}", layer)
    return model


class Bench:
    """The benchmark on one rank: its shards, its rows, and the slowest rank's time of each row."""

    def __init__(self, nbytes: int) -> None:
        self.rank = self.dp_rank = dist.get_rank()
        self.size = self.world_size = self.dp_size = dist.get_world_size()
        self.model = model_of(nbytes)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (self.size,)))
        self.local = {}
        self.buffers: list[memoryview] = []
        for name, value in self.model.state_dict().items():
            shard = self.shard(value)
            self.local[name] = shard
            self.buffers.append(shard.reshape(-1).view(torch.uint8).numpy().data)
        self.nbytes = sum(buffer.nbytes for buffer in self.buffers)

    @staticmethod
    def shard(value: torch.Tensor) -> torch.Tensor:
        return (value.to_local() if isinstance(value, DTensor) else value).detach()

    # ---------------------------------------------------------------- saving

    def raw_write(self, directory: Path) -> None:
        descriptor = os.open(directory / f"raw{self.rank}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.posix_fallocate(descriptor, 0, self.nbytes)
        for buffer in self.buffers:
            os.write(descriptor, buffer)
        os.close(descriptor)

    def ours(self, directory: Path, **options: Any) -> None:
        saver = self.checkpointer(directory, **options)
        saver.save(
            discover(SimpleNamespace(model=self.model)),
            step=1,
            epoch=0,
            config_yaml="",
            losses={},
            progress={},
        )
        saver.close()

    def checkpointer(self, directory: Path, **options: Any) -> Checkpointer:
        return Checkpointer(directory, self, dist.group.WORLD, CheckpointOptions(**options))

    def dcp(self, directory: Path) -> None:
        save(
            self.model.state_dict(),
            storage_writer=FileSystemWriter(directory / "dcp", sync_files=False),
        )

    def dcp_hf(self, directory: Path, *, consolidated: bool = False) -> None:
        writer = HuggingFaceStorageWriter(
            str(directory / "hf"),
            save_distributed=True,
            enable_consolidation=consolidated,
            fqn_to_index_mapping=dict.fromkeys(self.local, 1) if consolidated else None,
        )
        save(self.model.state_dict(), storage_writer=writer)

    def save_file(self, directory: Path) -> None:
        save_file(self.local, directory / f"{self.rank}.safetensors")

    def then_fsync(self, run: Callable[[Path], object]) -> Callable[[Path], None]:
        """Every rank fsyncs what it wrote; the first rank does all whose writer is unknown."""

        def both(directory: Path) -> None:
            run(directory)
            dist.barrier()
            if self.rank == 0:
                fsync_all(directory)

        return both

    def saving_rows(self) -> Iterator[Row]:
        yield Row("raw write + fsync", self.then_fsync(self.raw_write))
        yield Row("ours: shards", self.ours, ours=True)
        yield Row("ours: hf layout", lambda d: self.ours(d, model_layout="hf"), ours=True)
        yield Row(
            "ours: torch_save", lambda d: self.ours(d, model_save_format="torch_save"), ours=True
        )
        yield Row("safetensors save_file, one per rank", self.then_fsync(self.save_file))
        yield Row("torch DCP FileSystemWriter", self.then_fsync(self.dcp))
        yield Row("torch DCP HuggingFaceStorageWriter", self.then_fsync(self.dcp_hf), slow=True)
        yield Row(
            "the same with its consolidation",
            self.then_fsync(lambda d: self.dcp_hf(d, consolidated=True)),
            slow=True,
        )

    # ---------------------------------------------------------------- loading

    def keep(self, root: Path) -> None:
        """What the loading rows load."""
        if self.rank == 0:
            (root / "torch").mkdir(parents=True)
        dist.barrier()
        self.ours(root / "ours")
        self.ours(root / "layout", model_layout="hf")
        self.dcp(root / "torch")
        self.dcp_hf(root / "torch")
        self.save_file(root / "torch")
        self.then_fsync(lambda _: None)(root)

    def load(self, directory: Path, verify: Any) -> None:
        loader = self.checkpointer(directory, verify=verify)
        loader.load(discover(SimpleNamespace(model=self.model)))
        loader.close()

    def own_shard(self, root: Path) -> Path:
        (path,) = (root / "ours/epoch_0_step_1/model").glob(f"shard-{self.rank + 1:05}-*")
        return path

    def raw_read(self, root: Path) -> None:
        """Into memory that is fresh, as ``torch.load`` and most readers do."""
        descriptor = os.open(self.own_shard(root), os.O_RDONLY)
        with memoryview(bytearray(os.fstat(descriptor).st_size)) as memory:
            self.fill(descriptor, [memory])
        os.close(descriptor)

    def raw_read_into_place(self, root: Path) -> None:
        descriptor = os.open(self.own_shard(root), os.O_RDONLY)
        self.fill(descriptor, self.buffers)
        os.close(descriptor)

    @staticmethod
    def fill(descriptor: int, buffers: list[memoryview]) -> None:
        offset = 0
        for buffer in buffers:
            view = buffer
            while view and (count := os.preadv(descriptor, [view], offset)):
                view, offset = view[count:], offset + count

    def torch_load(self, reader: Any) -> None:
        load(self.model.state_dict(), storage_reader=reader)

    def safetensors(self, root: Path) -> None:
        with safe_open(root / f"torch/{self.rank}.safetensors", "pt") as file:
            for name, target in self.local.items():
                target.copy_(file.get_tensor(name))

    def check(self, root: Path) -> None:
        path = root / "ours/epoch_0_step_1"
        assert verify(path, Manifest.read(path), rank=self.rank, num_ranks=self.size) == []

    def loading_rows(self, root: Path) -> Iterator[Row]:
        yield Row("raw read into fresh memory", lambda _: self.raw_read(root))
        yield Row("raw read into the parameters", lambda _: self.raw_read_into_place(root))
        yield Row("ours: verify none", lambda _: self.load(root / "ours", "none"), ours=True)
        yield Row("ours: verify digest", lambda _: self.load(root / "ours", "digest"), ours=True)
        yield Row(
            "ours: hf layout, verify digest",
            lambda _: self.load(root / "layout", "digest"),
            ours=True,
        )
        yield Row("ours: verification only", lambda _: self.check(root), ours=True)
        yield Row("safetensors safe_open, copy_", lambda _: self.safetensors(root))
        yield Row(
            "torch DCP HuggingFaceStorageReader",
            lambda _: self.torch_load(HuggingFaceStorageReader(str(root / "torch/hf"))),
        )
        yield Row(
            "torch DCP FileSystemReader",
            lambda _: self.torch_load(FileSystemReader(root / "torch/dcp")),
        )

    # ---------------------------------------------------------------- rounds

    def timed(self, row: Row, directory: Path) -> float:
        """The slowest rank's seconds."""
        if self.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        dist.barrier()
        started = time.perf_counter()
        row.run(directory)
        seconds = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    def measure(self, root: Path, num_rounds: int) -> list[Group]:
        nbytes = self.nbytes * self.size
        saving = Group("saving, compared with a write and fsync", nbytes, list(self.saving_rows()))
        self.rounds(saving, num_rounds, root, os.sync)
        kept = root / "kept"
        self.keep(kept)
        loading = Group("loading, cold", nbytes, list(self.loading_rows(kept)))
        self.rounds(loading, num_rounds, kept, partial(cold, data_files(kept)))
        return [saving, loading]

    def rounds(
        self, group: Group, num_rounds: int, root: Path, prepare: Callable[[], object]
    ) -> None:
        rounds(
            group,
            num_rounds,
            root / "out",
            lambda: prepare() if self.rank == 0 else None,
            self.timed,
        )


Task = Callable[[argparse.Namespace, Path], Any]
"""What a rank does; its result can be pickled."""


def on_forked_ranks(num_ranks: int, task: Task, arguments: argparse.Namespace, root: Path) -> Any:
    """Run *task* on forked gloo ranks with one thread each; the result of rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks))
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
        result = task(arguments, root)
        if rank == 0:
            queue.put(result)
        os._exit(0)  # torch's writer process would be waited for

    ranks = [context.Process(target=run, args=(rank,)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed")
    return queue.get()


def _measure(arguments: argparse.Namespace, root: Path) -> Any:
    """What a rank measures, without the functions of the rows."""
    groups = Bench(arguments.size).measure(root, arguments.runs)
    return [
        (group.title, group.nbytes, [(r.name, r.ours, r.seconds) for r in group.rows])
        for group in groups
    ]


def by_ranks(arguments: argparse.Namespace, root: Path) -> list[Group]:
    """What real ranks measure."""
    groups = on_forked_ranks(arguments.ranks, _measure, arguments, root)
    return [
        Group(
            title,
            nbytes,
            [Row(name, print, is_ours, seconds=seconds) for name, is_ours, seconds in rows],
        )
        for title, nbytes, rows in groups
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", type=parse_size, default="1G", help="bytes of weights: 64M, 1G (default)"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--directory", help="where to write (default: a temporary directory)")
    parser.add_argument("--docs", action="store_true", help="write docs/performance.md")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all times to this file"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=arguments.directory) as root:
        (Path(root) / "ranks").mkdir()
        groups = by_ranks(arguments, Path(root) / "ranks")
        shutil.rmtree(Path(root) / "ranks")
        groups.append(consolidate.measure(Path(root), arguments.size, arguments.runs))
    results = as_json(groups, arguments.size)
    print(as_text(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    if arguments.docs:
        write_page(results)


if __name__ == "__main__":
    main()
