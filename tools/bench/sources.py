"""Write checkpoints to consolidate: Llama-shaped, random, sharded as requested, with manifest and base map."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.digests import FileRecord, digest_of
from automodel_ckpt.checkpoint.parts.manifest import Manifest, StateRecord, Tree
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, nbytes_of
from automodel_ckpt.checkpoint.sources.shard_header import Entry, shard_header
from tools.bench.rounds import llama_shapes


def write_source(
    checkpoint: Path,
    nbytes: int,
    *,
    dtype: str = "BF16",
    num_shards: int = 2,
    dim: int = 0,
    num_files: int = 1,
) -> Path:
    """A checkpoint of about *nbytes* whose tensors are cut evenly along *dim*, and whose base has *num_files* files."""
    side = checkpoint / "model" / layout.HF_METADATA
    side.mkdir(parents=True)
    layer, num_layers = llama_shapes(nbytes, nbytes_of(dtype, ()), num_files)
    shapes = {
        f"layers.{i}.{name}": shape for i in range(num_layers) for name, shape in layer.items()
    }
    numbers = {fqn: int(fqn.split(".")[1]) * num_files // num_layers + 1 for fqn in shapes}
    (side / "fqn_to_file_index_mapping.json").write_text(json.dumps(numbers))
    (side / "config.json").write_text("{}")
    tensors: dict[str, list[Slice]] = {fqn: [] for fqn in shapes}
    random = np.random.default_rng(0)
    for rank in range(num_shards):
        for piece in _write_shard(checkpoint, rank, shapes, dtype, num_shards, dim, random):
            tensors[piece.fqn].append(piece)
    _write_manifest(
        checkpoint, {f: Tensor(f, dtype, shapes[f], tuple(pieces)) for f, pieces in tensors.items()}
    )
    return checkpoint


def _write_shard(
    checkpoint: Path,
    rank: int,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    num_shards: int,
    dim: int,
    random: np.random.Generator,
) -> list[Slice]:
    entries: list[Entry] = []
    for fqn, shape in shapes.items():
        sizes = tuple(n // num_shards if d == dim else n for d, n in enumerate(shape))
        offsets = tuple(rank * sizes[d] if d == dim else 0 for d in range(len(shape)))
        entries.append((fqn, dtype, offsets, sizes, shape))
    header, starts = shard_header(entries)
    file = layout.shard_file("model", rank, 1, 1)
    found = []
    with open(checkpoint / file, "wb") as out:
        out.write(header)
        for fqn, _, offsets, sizes, _ in entries:
            data = random.bytes(nbytes_of(dtype, sizes))
            out.write(data)
            found.append(
                Slice(fqn, dtype, offsets, sizes, file, starts[fqn], len(data), digest_of(data))
            )
    return found


def _write_manifest(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    files = {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        data = path.read_bytes()
        files[path.relative_to(checkpoint).as_posix()] = FileRecord(len(data), digest_of(data))
    manifest = Manifest(
        step=1,
        epoch=0,
        created=time.time(),
        world_size=1,
        dp_size=1,
        progress={},
        losses={},
        validated=False,
        environment={},
        lineage={},
        state={"model": StateRecord("module", "sharded", "model")},
        trees={"model": Tree("safetensors", tensors, {})},
        files=files,
    )
    (checkpoint / layout.MANIFEST).write_bytes(manifest.to_bytes())
