"""The rows of :mod:`tools.bench.checkpoint` about consolidating, compared with ``cp`` of the same bytes.

Our consolidations are durable and compare every byte with its digest. Torch's do neither; its files are fsynced
afterwards.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, discover
from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.sources.source import FILE_INDEX_MAP
from tests.support import ranks
from tools.bench.harness import (
    Group,
    Row,
    data_files,
    fsync_all,
    in_this_process,
    llama_shapes,
    measure_group,
    warm,
)
from tools.crash.subjects import SideFiles
from tools.support import ROOT


def copied(source: Path) -> Callable[[Path], None]:
    """``cp`` of a checkpoint's shards, clones of whole files excluded."""

    def run(directory: Path) -> None:
        command = ["cp", "--reflink=never", *map(str, data_files(source)), str(directory)]
        subprocess.run(command, check=True)
        fsync_all(directory)

    return run


def our_process(source: Path) -> Callable[[Path], object]:
    command = [sys.executable, "-m", "automodel_ckpt.consolidate", "-i", str(source), "-o"]
    return lambda directory: subprocess.run(
        [*command, str(directory / "out")], check=True, capture_output=True, cwd=ROOT
    )


def torchs(source: Path) -> Callable[[Path], None]:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )

    index = source / "model/.hf_metadata/fqn_to_file_index_mapping.json"
    numbers = json.loads(index.read_bytes())

    def run(directory: Path) -> None:
        consolidate_safetensors_files(str(source / "model"), str(directory), numbers, num_threads=5)
        fsync_all(directory)

    return run


def measure(root: Path, size: int, num_rounds: int) -> Group:
    """Measure all rows: ours are durable and verified, the files of the others are fsynced afterwards."""
    place = root / "sources"
    one = write_source(place / "one", size)
    four = write_source(place / "four", size, num_files=4)
    eight = write_source(place / "eight", size, num_shards=8)
    dim1 = write_source(place / "dim1", size, num_shards=8, dim=1)
    f32 = write_source(place / "f32", size, dtype=torch.float32)
    dim1_name = "8 shards sharded along dim 1, 1 file"

    def ours(name: str, source: Path, cast: str | None = None) -> Row:
        def consolidated(directory: Path) -> None:
            consolidate(source, directory / "out", cast_dtype=cast, log=lambda _: None)

        return Row(f"ours: {name}", consolidated, nbytes=_nbytes(source))

    def peer(name: str, source: Path) -> Row:
        return Row(f"torch: {name}", torchs(source), slow=True, nbytes=_nbytes(source))

    rows = [
        Row("cp + fsync", copied(one)),
        ours("2 shards, 1 file", one),
        ours("2 shards, 4 files", four),
        ours("8 shards, 1 file", eight),
        ours(dim1_name, dim1),
        ours("F32 cast to BF16, per byte read", f32, "bf16"),
        Row("ours: 2 shards, 1 file, whole process", our_process(one)),
        peer("2 shards, 1 file", one),
        peer("2 shards, 4 files", four),
        peer(dim1_name, dim1),
    ]
    warm(data_files(place))
    title, out = "consolidating, compared with cp and fsync", root / "out"
    group = measure_group(title, _nbytes(one), rows, num_rounds, out, os.sync, in_this_process)
    shutil.rmtree(place)
    return group


def _nbytes(source: Path) -> int:
    return sum(path.stat().st_size for path in data_files(source))


def write_source(
    root: Path,
    nbytes: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_shards: int = 2,
    dim: int = 0,
    num_files: int = 1,
) -> Path:
    """A checkpoint of about *nbytes* of as many ranks as shards, along *dim*; its base has *num_files* files."""
    ranks.run(_save, num_shards, root, nbytes, dtype, dim, num_files, timeout=1800)
    return root / "epoch_0_step_1"


def _save(root: Path, nbytes: int, dtype: torch.dtype, dim: int, num_files: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layer, num_layers = llama_shapes(nbytes, dtype.itemsize, num_files)
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Module() for _ in range(num_layers))
    for module in model.layers:
        for name, shape in layer.items():
            value = torch.randn(shape, dtype=dtype)
            shards = distribute_tensor(value, mesh, [Shard(dim)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(shards))
    names = dict(model.named_parameters())
    numbers = {name: int(name.split(".")[1]) * num_files // num_layers + 1 for name in names}
    assets: Any = SideFiles({"config.json": b"{}", FILE_INDEX_MAP: json.dumps(numbers).encode()})
    saver = Checkpointer(
        root,
        group=dist.group.WORLD,
        options=CheckpointOptions(incremental=False, save_consolidated=False),
        assets={"model": assets},
    )
    state = discover(SimpleNamespace(model=model))
    saver.save(state, step=1, epoch=0, config_yaml="", losses={}, progress={})
    saver.close()
