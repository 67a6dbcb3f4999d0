"""Sharded safetensors: each rank's slices as ordinary tensors of its own files, in the field's existing layout.

PyTorch's ``HuggingFaceStorageReader`` and NeMo AutoModel's offline tool read these files: the header's metadata holds
``DCP_SHARDING_INFO`` (per tensor its ``saved_offsets``; here also the ``global_shape``, which theirs lack) and
``DCP_VERSION`` (source: torch/distributed/checkpoint/_hf_utils.py). Bodies begin at a multiple of 4096 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.formats.planning import TensorShare, TreePlan, file_index
from automodel_ckpt.checkpoint.manifest import Blob
from automodel_ckpt.checkpoint.sources.shard_header import shard_header
from automodel_ckpt.checkpoint.writing.jobs import Chunk, FileJob

NAME = "safetensors"


def plan_jobs(
    plan: TreePlan, rank: int, file_mapping: Mapping[str, int] | None = None
) -> Iterator[FileJob]:
    """The jobs of *rank* for a tree.

    *file_mapping* has the number (from 1) of the base model's file for each tensor; this rank's tensors are then split
    into the same number of files.
    """
    mapping = file_mapping or {}
    num_files = max(mapping.values(), default=1)
    groups: dict[int, list[TensorShare]] = {}
    for share in plan.tensors():
        groups.setdefault(file_index(share.fqn, mapping), []).append(share)
    for index, shares in sorted(groups.items()):
        yield _shard_job(plan, shares, layout.shard_file(plan.directory, rank, index, num_files))
    yield from values_job(plan, layout.objects_file(plan.directory, rank))


def _shard_job(plan: TreePlan, shares: Sequence[TensorShare], file: str) -> FileJob:
    # Wider dtypes first: readers view a tensor's bytes in place, at offsets that must be multiples of its item size.
    ordered = sorted(shares, key=lambda share: -DTYPE_BITS[share.dtype])
    header, starts = shard_header([(s.fqn, s.dtype, s.offsets, s.sizes, s.shape) for s in ordered])
    pieces = [Chunk(0, header)]
    for share in ordered:
        start = starts[share.fqn]
        pieces.append(Chunk(start, plan.fetching(share), share.stored(file, start)))
    return FileJob(file, pieces, plan.name, len(header) + sum(share.nbytes for share in ordered))


def values_job(plan: TreePlan, file: str) -> Iterator[FileJob]:
    """The job for a module's values that are not tensors (``get_extra_state``), in a separate file."""
    pieces, start = [], 0
    for fqn, data in plan.values():
        pieces.append(Chunk(start, data, Blob(fqn, file, start, len(data), "")))
        start += len(data)
    if pieces:
        yield FileJob(file, pieces, plan.name)
