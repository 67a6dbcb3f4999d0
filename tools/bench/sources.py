"""Write checkpoints to consolidate: Llama-shaped, random, sharded as requested, with the base's map of files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, discover
from automodel_ckpt.checkpoint.sources.base_maps import FILE_INDEX_MAP
from tests.support import ranks
from tools.bench.harness import llama_shapes
from tools.crash.subjects import SideFiles


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
    assets = SideFiles({"config.json": b"{}", FILE_INDEX_MAP: json.dumps(numbers).encode()})
    saver = Checkpointer(
        root,
        group=dist.group.WORLD,
        options=CheckpointOptions(incremental=False, save_consolidated=False),
        assets={"model": assets},
    )
    state = discover(SimpleNamespace(model=model))
    saver.save(state, step=1, epoch=0, config_yaml="", losses={}, progress={})
    saver.close()
