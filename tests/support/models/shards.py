"""Hand-made checkpoints: shards of given tensors, cut as a test wants them, with or without a manifest."""

import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from automodel_ckpt.checkpoint.export.hf_assets import consolidate_script
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import dtype_code
from automodel_ckpt.checkpoint.files.durable_file import FileRecord, digest_of
from automodel_ckpt.checkpoint.files.safetensors_header import build_header, shard_header
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Manifest, StateRecord, Tree
from automodel_ckpt.checkpoint.parts.slices import Box, Slice, Tensor, nbytes_of
from automodel_ckpt.checkpoint.saving.save import Assets
from automodel_ckpt.checkpoint.sources.source import BaseMaps


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, for the shard number *rank* (from 0)."""

    fqn: str
    box: Box
    rank: int


def whole(tensor: torch.Tensor) -> Box:
    return Box((0,) * tensor.ndim, tuple(tensor.shape))


def cut(fqn: str, tensor: torch.Tensor, num_ranks: int, dim: int = 0) -> list[Chunk]:
    """The tensor cut along a dimension as torch.chunk does; what is 0-dim or too small is kept whole by rank 0."""
    if tensor.ndim <= dim:
        return [Chunk(fqn, whole(tensor), 0)]
    step = max(1, -(-tensor.shape[dim] // num_ranks))
    pieces = []
    for rank, start in enumerate(range(0, tensor.shape[dim], step)):
        offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
        offsets[dim], sizes[dim] = start, min(step, tensor.shape[dim] - start)
        pieces.append(Chunk(fqn, Box(tuple(offsets), tuple(sizes)), rank))
    return pieces or [Chunk(fqn, whole(tensor), 0)]


def raw_bytes(tensor: torch.Tensor, box: Box) -> bytes:
    part = tensor[
        tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
    ].contiguous()
    return bytes(part.reshape(-1).view(torch.uint8).numpy().tobytes()) if part.numel() else b""


def write_shards(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    pieces: Iterable[Chunk],
    *,
    global_shape: bool = True,
) -> dict[str, list[Slice]]:
    """Write ``shard-0000r-model-00001-of-00001.safetensors`` files; returns the slices of each tensor."""
    directory.mkdir(parents=True, exist_ok=True)
    slices: dict[str, list[Slice]] = {fqn: [] for fqn in tensors}
    by_rank: dict[int, list[Chunk]] = {}
    for piece in pieces:
        by_rank.setdefault(piece.rank, []).append(piece)
    for rank, mine in by_rank.items():
        entries = [(p.fqn, dtype_code(str(tensors[p.fqn].dtype)), p.box.sizes) for p in mine]
        if global_shape:
            described = []
            for piece, (fqn, dtype, sizes) in zip(mine, entries, strict=True):
                stored = Slice(fqn, dtype, piece.box.offsets, sizes, "", 0, nbytes_of(dtype, sizes))
                described.append((stored, tuple(tensors[fqn].shape)))
            header, starts = shard_header(described)
        else:
            info = {piece.fqn: {"saved_offsets": list(piece.box.offsets)} for piece in mine}
            metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
            header, starts = build_header(entries, metadata)
        name = layout.shard_file("", rank, 1, 1).lstrip("/")
        with open(directory / name, "wb") as file:
            file.write(header)
            for piece, (_, dtype, _) in zip(mine, entries, strict=True):
                data = raw_bytes(tensors[piece.fqn], piece.box)
                file.write(data)
                box, start = piece.box, starts[piece.fqn]
                found = Slice(
                    piece.fqn,
                    dtype,
                    box.offsets,
                    box.sizes,
                    name,
                    start,
                    len(data),
                    digest_of(data),
                )
                slices[piece.fqn].append(found)
    return slices


def write_checkpoint(
    checkpoint: Path,
    tensors: Mapping[str, torch.Tensor],
    pieces: Iterable[Chunk],
    *,
    tied: Mapping[str, str] | None = None,
    step: int = 20,
    epoch: int = 0,
    losses: Mapping[str, Any] | None = None,
) -> Manifest:
    """A complete checkpoint around the shards; what already stands in ``model/.hf_metadata`` is taken in."""
    model = checkpoint / "model"
    written = write_shards(model, tensors, pieces)
    files = {
        path.relative_to(checkpoint).as_posix(): record_of(path)
        for path in model.rglob("*")
        if path.is_file()
    }
    trees = {
        fqn: Tensor(
            fqn,
            dtype_code(str(tensors[fqn].dtype)),
            tuple(tensors[fqn].shape),
            tuple(dataclasses.replace(piece, file=f"model/{piece.file}") for piece in own),
        )
        for fqn, own in written.items()
    }
    manifest = Manifest(
        step=step,
        epoch=epoch,
        created=time.time() - 90,
        world_size=2,
        dp_size=2,
        progress={"consumed_samples": 160},
        losses=dict(losses or {"step": step, "train_loss": 1.5, "val_loss": 1.25}),
        validated=True,
        environment={"python": "3"},
        lineage={},
        state={"model": StateRecord("module", "sharded", "model")},
        trees={"model": Tree("safetensors", trees, {}, dict(tied or {}))},
        files=files,
    )
    (checkpoint / layout.MANIFEST).write_bytes(manifest.to_bytes())
    return Manifest.read(checkpoint)


def record_of(path: Path) -> FileRecord:
    data = path.read_bytes()
    return FileRecord(len(data), digest_of(data))


def checkpoint_in(run: Path, step: int, *, scripted: bool = False, **extra: Any) -> Path:
    """A small complete checkpoint in the run directory *run*, with LATEST pointing at it."""
    run.mkdir(parents=True, exist_ok=True)
    path = run / str(layout.CheckpointName(step, 0))
    if scripted:
        (path / "model" / layout.HF_METADATA).mkdir(parents=True)
        (path / "model" / layout.CONSOLIDATE_SCRIPT).write_text(consolidate_script(sys.executable))
    tensors = {"w": torch.arange(12, dtype=torch.float32).reshape(4, 3), "n": torch.tensor(3)}
    write_checkpoint(
        path, tensors, [p for f, t in tensors.items() for p in cut(f, t, 2)], step=step, **extra
    )
    commit.point(run, layout.LATEST, path.name)
    return path


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's bytes, for comparisons that tell -0.0 from 0.0 and one NaN from another."""
    return np.frombuffer(raw_bytes(tensor, whole(tensor)), np.uint8)


def write_assets(assets: Assets, directory: Path) -> None:
    """The side files of an export, as they stand in ``.hf_metadata``."""
    for name, data in assets.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class AdapterFiles:
    file_index_mapping: Mapping[str, int] = {}
    maps = BaseMaps(is_adapter=True)
    files: Mapping[str, bytes] = {"adapter_config.json": b"{}"}
    nbytes = 2

    def write(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "adapter_config.json").write_bytes(b"{}")
