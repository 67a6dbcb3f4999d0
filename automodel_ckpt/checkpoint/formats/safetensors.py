"""Sharded safetensors: each rank's slices as ordinary tensors in that rank's files, in PyTorch's layout for shards.

PyTorch's ``HuggingFaceStorageReader`` and NeMo AutoModel's offline tool read these files: the header's metadata holds
``DCP_SHARDING_INFO`` (per tensor its ``saved_offsets``; here also the ``global_shape``, which theirs lack) and
``DCP_VERSION`` (source: torch/distributed/checkpoint/_hf_utils.py). Bodies begin at a multiple of 4096 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.formats.planning import TreePlan, file_index, located
from automodel_ckpt.checkpoint.formats.tree_layout import TreeLayout, ordered
from automodel_ckpt.checkpoint.manifest import Blob
from automodel_ckpt.checkpoint.slices import Tensor
from automodel_ckpt.checkpoint.sources.shard_header import Entry, shard_header
from automodel_ckpt.checkpoint.writing.jobs import Chunk, FileJob

NAME = "safetensors"
_TRAINED = "model"


_FileKey = tuple[int, str]
"""The number (from 1) of the base's file, and the kind of the tensors."""


def lay_out(
    plan: TreePlan,
    file_mapping: Mapping[str, int] | None = None,
    untrained: Mapping[str, str] | None = None,
) -> TreeLayout:
    """The order of an assigned plan's tensors in the files of each rank. The arguments are those of
    :func:`plan_jobs`."""
    key_of = partial(_file_key, file_mapping or {}, untrained or {})
    tensors = plan.assignment.tensors
    keys = sorted({key_of(fqn) for fqn in tensors})
    parts = {fqn: keys.index(key_of(fqn)) for fqn in tensors}
    by_width = sorted(tensors.values(), key=_width)
    return ordered(sorted(by_width, key=lambda tensor: parts[tensor.fqn]), parts.__getitem__)


def _file_key(file_mapping: Mapping[str, int], kinds: Mapping[str, str], fqn: str) -> _FileKey:
    return file_index(fqn, file_mapping), kinds.get(fqn, _TRAINED)


def _width(tensor: Tensor) -> int:
    # Wider dtypes first: readers view a tensor's bytes in place, at offsets that must be multiples of its item size.
    return -DTYPE_BITS[tensor.dtype]


def plan_jobs(
    plan: TreePlan,
    rank: int,
    file_mapping: Mapping[str, int] | None = None,
    untrained: Mapping[str, str] | None = None,
) -> Iterator[FileJob]:
    """The jobs of *rank* for a tree.

    *file_mapping* has the number (from 1) of the base model's file for each tensor; this rank's tensors are then split
    into the same number of files. *untrained* has the kind of each tensor that does not train; those of each kind are
    stored in separate files, which can be reused.
    """
    # The base's number, also where this rank has slices of some of its files only.
    num_files = max((file_mapping or {}).values(), default=1)
    by_file: dict[_FileKey, list[Tensor]] = {}
    for tensor in plan.tensors():
        key = _file_key(file_mapping or {}, untrained or {}, tensor.fqn)
        by_file.setdefault(key, []).append(tensor)
    for index, kind in sorted(by_file):
        file = layout.shard_file(plan.directory, rank, index, num_files, kind=kind)
        job = _shard_job(plan, by_file[index, kind], file)
        yield replace(job, reusable=kind != _TRAINED)
    yield from values_job(plan, layout.objects_file(plan.directory, rank))


def _shard_job(plan: TreePlan, tensors: Sequence[Tensor], file: str) -> FileJob:
    by_width = sorted(tensors, key=_width)
    entries = [_header_entry(tensor) for tensor in by_width]
    header, starts = shard_header(entries)
    chunks = [Chunk(0, header)]
    nbytes = len(header)
    for tensor in by_width:
        start = starts[tensor.fqn]
        entry = located(tensor, file, start)
        chunks.append(Chunk(start, plan.fetch(tensor), entry))
        nbytes += entry.slices[0].nbytes
    return FileJob(file, chunks, plan.name, nbytes)


def _header_entry(tensor: Tensor) -> Entry:
    (stored,) = tensor.slices
    return tensor.fqn, tensor.dtype, stored.offsets, stored.sizes, tensor.shape


def values_job(plan: TreePlan, file: str) -> Iterator[FileJob]:
    """The job for a module's values that are not tensors (``get_extra_state``), in a separate file."""
    chunks, start = [], 0
    for fqn, data in plan.values():
        chunks.append(Chunk(start, data, Blob(fqn, file, start, len(data), "")))
        start += len(data)
    if chunks:
        yield FileJob(file, chunks, plan.name)
