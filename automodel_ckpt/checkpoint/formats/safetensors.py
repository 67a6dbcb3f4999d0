"""Sharded safetensors: each rank's slices as ordinary tensors of its own files, in the field's existing layout.

PyTorch's ``HuggingFaceStorageReader`` and NeMo AutoModel's offline tool read these files: the header's metadata holds
``DCP_SHARDING_INFO`` (per tensor its ``saved_offsets``; here also the ``global_shape``, which theirs lack) and
``DCP_VERSION`` (source: torch/distributed/checkpoint/_hf_utils.py). Bodies begin at a multiple of 4096 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.durable import DurableFile
from automodel_ckpt.checkpoint.formats.planning import TensorShare, TreePlan, file_index
from automodel_ckpt.checkpoint.manifest import Blob, Part, TreePart, digest_of
from automodel_ckpt.checkpoint.safetensors_header import build_header
from automodel_ckpt.checkpoint.slices import DTYPE_BITS

NAME = "safetensors"
_ALIGN = 4096


def write(plan: TreePlan, staging: Path, part: Part, *, file_mapping: Mapping[str, int] | None = None) -> None:
    """Write this rank's share of a tree and enter it into *part*.

    *file_mapping* says in which of the base model's N files each tensor stands (from 1); its tensors are then split
    among N files per rank likewise.
    """
    mapping = file_mapping or {}
    written = part.trees[plan.name] = TreePart()
    num_files = max(mapping.values(), default=1)
    groups: dict[int, list[TensorShare]] = {}
    for share in plan.tensors():
        groups.setdefault(file_index(share.fqn, mapping), []).append(share)
    for index, shares in sorted(groups.items()):
        file = layout.shard_file(plan.directory, part.rank, index, num_files)
        _write_shard(plan, shares, staging, file, part, written)
    _write_values(plan, staging, part, written)


def _write_shard(
    plan: TreePlan, shares: Sequence[TensorShare], staging: Path, file: str, part: Part, written: TreePart
) -> None:
    # Wider dtypes first: readers view a tensor's bytes in place, at offsets that must be multiples of its item size.
    ordered = sorted(shares, key=lambda share: -DTYPE_BITS[share.dtype])
    header, starts = build_header(
        [(share.fqn, share.dtype, share.sizes) for share in ordered], _metadata(ordered), align=_ALIGN
    )
    nbytes = len(header) + sum(share.nbytes for share in ordered)
    with DurableFile(staging / file, nbytes=nbytes) as out:
        out.write(header)
        for share in ordered:
            data = plan.bytes_of(share)
            out.write(data)
            written.tensors.append(share.stored(file, starts[share.fqn], digest_of(data)))
    part.files[file] = out.close()


def _metadata(shares: Sequence[TensorShare]) -> dict[str, str]:
    sharding = {s.fqn: {"saved_offsets": list(s.offsets), "global_shape": list(s.shape)} for s in shares}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(sharding, separators=(",", ":"))}


def _write_values(plan: TreePlan, staging: Path, part: Part, written: TreePart) -> None:
    """A module's values that are no tensors (``get_extra_state``) stand in a file of their own."""
    values = list(plan.values())
    if not values:
        return
    file = layout.objects_file(plan.directory, part.rank)
    with DurableFile(staging / file) as out:
        for fqn, data in values:
            start = out.tell()
            written.objects.append(Blob(fqn, file, start, out.write(data), digest_of(data)))
    part.files[file] = out.close()
