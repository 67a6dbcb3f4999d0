"""Compare the cost of saving, loading and consolidating with moving the same bytes, and with other programs.

    python -m tools.bench.checkpoint [--size 1G] [--ranks 2] [--runs 3] [--docs]

A Llama-shaped bf16 model, sharded by FSDP2 over gloo ranks. Every row runs once in each round, so that changes in the
machine's speed affect all rows equally. The figures are medians over the rounds. Ratios are relative to the first row
of the group, which moves the same number of bytes with system calls; seconds are only comparable on the same machine.
``--docs`` writes docs/performance.md.
"""

import os
import shutil
import tempfile
import time
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
from tests.support import ranks
from tools.bench import consolidate
from tools.bench.harness import (
    LIMIT_SECONDS,
    Group,
    Row,
    cold,
    data_files,
    fsync_all,
    llama_shapes,
    marked,
    measure_group,
    options_of,
    parse_size,
)
from tools.support import machine, table, write_block


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
        state = discover(SimpleNamespace(model=self.model))
        saver.save(state, step=1, epoch=0, config_yaml="", losses={}, progress={})
        saver.close()

    def checkpointer(self, directory: Path, **options: Any) -> Checkpointer:
        return Checkpointer(directory, self, dist.group.WORLD, CheckpointOptions(**options))

    def dcp(self, directory: Path) -> None:
        writer = FileSystemWriter(directory / "dcp", sync_files=False)
        save(self.model.state_dict(), storage_writer=writer)

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
        """Every rank fsyncs what it wrote; the first rank does all files of unknown writers."""

        def both(directory: Path) -> None:
            run(directory)
            dist.barrier()
            if self.rank == 0:
                fsync_all(directory)

        return both

    def saving_rows(self) -> Iterator[Row]:
        def ours(name: str, **options: Any) -> Row:
            return Row(f"ours: {name}", lambda d: self.ours(d, **options))

        hf, consolidated = self.dcp_hf, partial(self.dcp_hf, consolidated=True)
        yield Row("raw write + fsync", self.then_fsync(self.raw_write))
        yield ours("shards")
        yield ours("hf layout", model_layout="hf")
        yield ours("torch_save", model_save_format="torch_save")
        yield Row("safetensors save_file, one per rank", self.then_fsync(self.save_file))
        yield Row("torch DCP FileSystemWriter", self.then_fsync(self.dcp))
        yield Row("torch DCP HuggingFaceStorageWriter", self.then_fsync(hf), slow=True)
        yield Row("the same with its consolidation", self.then_fsync(consolidated), slow=True)

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

    def safetensors(self, root: Path) -> None:
        with safe_open(root / f"torch/{self.rank}.safetensors", "pt") as file:
            for name, target in self.local.items():
                target.copy_(file.get_tensor(name))

    def check(self, root: Path) -> None:
        path = root / "ours/epoch_0_step_1"
        assert verify(path, Manifest.read(path), rank=self.rank, num_ranks=self.size) == []

    def loading_rows(self, root: Path) -> Iterator[Row]:
        def ours(name: str, directory: str, verify: str) -> Row:
            return Row(f"ours: {name}", lambda _: self.load(root / directory, verify))

        def torchs(name: str, reader: Callable[[], Any]) -> Row:
            state = self.model.state_dict
            return Row(f"torch DCP {name}", lambda _: load(state(), storage_reader=reader()))

        yield Row("raw read into fresh memory", lambda _: self.raw_read(root))
        yield Row("raw read into the parameters", lambda _: self.raw_read_into_place(root))
        yield ours("verify none", "ours", "none")
        yield ours("verify digest", "ours", "digest")
        yield ours("hf layout, verify digest", "layout", "digest")
        yield Row("ours: verification only", lambda _: self.check(root))
        yield Row("safetensors safe_open, copy_", lambda _: self.safetensors(root))
        hf = str(root / "torch/hf")
        yield torchs("HuggingFaceStorageReader", lambda: HuggingFaceStorageReader(hf))
        yield torchs("FileSystemReader", lambda: FileSystemReader(root / "torch/dcp"))

    # ---------------------------------------------------------------- rounds

    def timed(self, row: Row, directory: Path) -> float:
        if self.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        dist.barrier()
        started = time.perf_counter()
        row.run(directory)
        return self.slowest(time.perf_counter() - started)

    def slowest(self, value: float) -> float:
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return float(tensor)

    def measure(self, root: Path, num_rounds: int) -> list[Group]:
        kept, nbytes = root / "kept", self.nbytes * self.size

        def group(title: str, rows: Iterator[Row], prepare: Callable[[], None]) -> Group:
            prepared = prepare if self.rank == 0 else lambda: None
            out = root / "out"
            return measure_group(title, nbytes, rows, num_rounds, out, prepared, self.timed)

        saving = group("saving, compared with a write and fsync", self.saving_rows(), os.sync)
        self.keep(kept)
        evict = partial(cold, data_files(kept))
        return [saving, group("loading, cold", self.loading_rows(kept), evict)]


def _measure(size: int, root: Path, num_rounds: int) -> list[Group]:
    return Bench(size).measure(root, num_rounds)


def as_markdown(headline: str, groups: list[Group]) -> str:
    parts = [f"{headline}. Medians; ratios are relative to the first row of each table."]
    for title, rows in groups:
        lines = [(marked(name), f"{ratio:.2f}", f"{seconds:.2f}") for name, ratio, seconds in rows]
        parts += [f"### {title.capitalize()}", table(("", "ratio", "seconds"), lines)]
    return "\n\n".join(parts)


def main() -> None:
    parser = options_of(__doc__, 3)
    parser.add_argument("--size", type=parse_size, default="1G", help="bytes of weights (1G)")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=given.directory) as name:
        root = Path(name)
        (root / "ranks").mkdir()
        arguments = (given.size, root / "ranks", given.runs)
        groups = ranks.run(_measure, given.ranks, *arguments, timeout=LIMIT_SECONDS)[0]
        shutil.rmtree(root / "ranks")
        groups.append(consolidate.measure(root, given.size, given.runs))
    block = as_markdown(f"{given.size / 1e9:g} GB of weights, {machine()}", groups)
    print(block)
    if given.docs:
        write_block("bench", block)


if __name__ == "__main__":
    main()
