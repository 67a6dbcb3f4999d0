"""What saving, loading and verifying cost beside moving the same bytes, on real ranks.

    python tools/bench_checkpoint.py [--gigabytes 1] [--ranks 2] [--runs 5] [--directory DIR] [--json FILE]

A Llama-shaped bf16 model, sharded by FSDP2. In each round every row runs once, so that a drift of the machine meets all
alike; the figures are medians over the rounds, and ratios to the first row of their group, which writes (or reads) the
same number of bytes with plain system calls, fsync included. Absolute seconds of another machine mean nothing here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint import Checkpointer, Manifest, discover
from automodel_ckpt.checkpoint.verify import verify

Row = Callable[[Path], object]


class Layer(nn.Module):
    """The shapes of a Llama layer of this width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        attention = {"q": (width, width), "k": (width // 4, width), "v": (width // 4, width), "o": (width, width)}
        mlp = {"gate": (3 * width, width), "up": (3 * width, width), "down": (width, 3 * width), "norm": (width,)}
        shapes: dict[str, tuple[int, ...]] = {**attention, **mlp}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)))


def model_of(gigabytes: float, width: int = 2048) -> nn.Module:
    per_layer = (1 + 0.5 + 1 + 9) * width * width * 2
    layers = nn.ModuleList(Layer(width) for _ in range(max(1, round(gigabytes * 1e9 / per_layer))))
    model = nn.Module()
    model.layers = layers
    return model


class Bench:
    """One rank's view: its shards, its rows, and the slowest rank's time of each."""

    def __init__(self, gigabytes: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.world_size, self.dp_rank, self.dp_size = self.size, self.rank, self.size
        self.model = model_of(gigabytes)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (self.size,)))
        self.local = {name: self.shard(value) for name, value in self.model.state_dict().items()}
        self.buffers: list[memoryview] = [t.reshape(-1).view(torch.uint8).numpy().data for t in self.local.values()]
        self.nbytes = sum(buffer.nbytes for buffer in self.buffers)

    @staticmethod
    def shard(value: torch.Tensor) -> torch.Tensor:
        return (value.to_local() if isinstance(value, DTensor) else value).detach()

    def raw_write(self, directory: Path) -> None:
        descriptor = os.open(directory / f"raw{self.rank}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.posix_fallocate(descriptor, 0, self.nbytes)
        for buffer in self.buffers:
            os.write(descriptor, buffer)
        os.fsync(descriptor)
        os.close(descriptor)

    def ours(self, directory: Path, model_save_format: Any) -> None:
        saver = self.checkpointer(directory, model_save_format)
        saver.save(discover(SimpleNamespace(model=self.model)), step=1, epoch=0, config_yaml="", losses={}, progress={})
        saver.close()

    def checkpointer(
        self, directory: Path, model_save_format: Any = "safetensors", verify: Any = "digest"
    ) -> Checkpointer:
        return Checkpointer(
            directory, ranks=self, group=dist.group.WORLD, model_save_format=model_save_format, verify=verify
        )

    def load(self, directory: Path, verify: Any) -> None:
        loader = self.checkpointer(directory, verify=verify)
        loader.load(discover(SimpleNamespace(model=self.model)))
        loader.close()

    def raw_read(self, directory: Path) -> None:
        """Straight into the parameters' own memory."""
        (path,) = (directory / "epoch_0_step_1/model").glob(f"shard-{self.rank + 1:05}-*")
        descriptor, offset = os.open(path, os.O_RDONLY), 0
        for buffer in self.buffers:
            view = buffer
            while view:
                count = os.preadv(descriptor, [view], offset)
                view, offset = view[count:], offset + count
        os.close(descriptor)

    def check(self, directory: Path) -> None:
        path = directory / "epoch_0_step_1"
        assert verify(path, Manifest.read(path), rank=self.rank, num_ranks=self.size) == []

    def timed(self, row: Row, directory: Path) -> float:
        dist.barrier()
        started = time.perf_counter()
        row(directory)
        seconds = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    def saving_rows(self) -> dict[str, Row]:
        state = self.model.state_dict()
        return {
            "raw write + fsync": self.raw_write,
            "save, safetensors shards": lambda d: self.ours(d, "safetensors"),
            "save, torch_save (as the optimizer's)": lambda d: self.ours(d, "torch_save"),
            "safetensors save_file per rank, no fsync": lambda d: save_file(self.local, d / f"{self.rank}.safetensors"),
            "DCP FileSystemWriter, fsync": lambda d: save(
                state, storage_writer=FileSystemWriter(d / "dcp", sync_files=True)
            ),
            "DCP HuggingFaceStorageWriter, no fsync": lambda d: save(
                state, storage_writer=HuggingFaceStorageWriter(str(d / "hf"), save_distributed=True)
            ),
        }

    def loading_rows(self) -> dict[str, Row]:
        return {
            "raw read into place": self.raw_read,
            "load, verify none": lambda d: self.load(d, "none"),
            "load, verify digest": lambda d: self.load(d, "digest"),
            "verify alone": self.check,
        }


def cold() -> None:
    """Drop the page cache, where this user may."""
    os.sync()
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def measure(arguments: argparse.Namespace, root: Path, bench: Bench) -> dict[str, dict[str, list[float]]]:
    groups: dict[str, dict[str, list[float]]] = {}
    for turn in range(arguments.runs + 1):
        for name, row in bench.saving_rows().items():
            directory = root / f"{turn}"
            directory.mkdir(exist_ok=True)
            seconds = bench.timed(row, directory)
            dist.barrier()
            if bench.rank == 0:
                shutil.rmtree(directory)
            dist.barrier()
            groups.setdefault("saving, durable unless it says otherwise", {}).setdefault(name, []).append(seconds)
    kept = root / "kept"
    bench.ours(kept, "safetensors")
    for warmth in ("warm", "cold"):
        for _ in range(arguments.runs + 1):
            for name, row in bench.loading_rows().items():
                if warmth == "cold" and bench.rank == 0:
                    cold()
                groups.setdefault(f"loading, {warmth}", {}).setdefault(name, []).append(bench.timed(row, kept))
    return {group: {name: times[1:] for name, times in rows.items()} for group, rows in groups.items()}


def rank_main(rank: int, port: int, arguments: argparse.Namespace, root: str, queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(arguments.ranks))
    dist.init_process_group("gloo", rank=rank, world_size=arguments.ranks)
    bench = Bench(arguments.gigabytes)
    groups = measure(arguments, Path(root), bench)
    if rank == 0:
        queue.put((bench.nbytes * bench.size, groups))
    dist.destroy_process_group()


def report(nbytes: int, groups: dict[str, dict[str, list[float]]]) -> None:
    print(f"{nbytes / 1e9:.2f} GB of weights")
    for group, rows in groups.items():
        base = next(iter(rows.values()))
        print(f"\n{group}\n{'':46}{'ratio':>7}{'seconds':>9}{'GB/s':>7}")
        for name, times in rows.items():
            ratio = statistics.median(t / b for t, b in zip(times, base, strict=True))
            seconds = statistics.median(times)
            print(f"{name:46}{ratio:7.2f}{seconds:9.2f}{nbytes / 1e9 / seconds:7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--directory", help="where to write (default: a temporary directory)")
    parser.add_argument("--json", help="also write all times to this file")
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=arguments.directory) as root:
        ranks = [
            context.Process(target=rank_main, args=(r, port, arguments, root, queue)) for r in range(arguments.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")
        nbytes, groups = queue.get()
    report(nbytes, groups)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"nbytes": nbytes, "seconds": groups}, indent=2))


if __name__ == "__main__":
    main()
