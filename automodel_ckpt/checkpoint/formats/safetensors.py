"""Sharded safetensors: each rank's slices as ordinary tensors in that rank's files, in PyTorch's layout for shards.

PyTorch's ``HuggingFaceStorageReader`` and NeMo AutoModel's offline tool read these files: the header's metadata holds
``DCP_SHARDING_INFO`` (per tensor its ``saved_offsets``; here also the ``global_shape``, which theirs lack) and
``DCP_VERSION`` (source: torch/distributed/checkpoint/_hf_utils.py). Bodies begin at a multiple of 4096 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.type_aliases import Texts
from automodel_ckpt.checkpoint.formats.planning import (
    TreeLayout,
    TreePlan,
    located,
    ordered,
    values_job,
)
from automodel_ckpt.checkpoint.jobs.jobs import Chunk, FileJob
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.sources.shard_header import Entry, shard_header

NAME = "safetensors"
_TRAINED = "model"

_FileKey = tuple[int, str]
"""The number (from 1) of the base's file, and the kind of the tensors."""


@dataclass(frozen=True)
class ShardFiles:
    """How a tree is divided into files; the same on all ranks.

    *file_mapping* has the number (from 1) of the base model's file for each tensor; a rank's tensors are split into the
    same number of files. *untrained* has the kind of each tensor that does not train. Each kind is stored in
    separate files, which can be reused.
    """

    file_mapping: Mapping[str, int] = field(default_factory=dict)
    untrained: Texts = field(default_factory=dict)

    @cached_property
    def num_files(self) -> int:
        """The number of the base's files."""
        return max(self.file_mapping.values(), default=1)

    def key(self, fqn: str) -> _FileKey:
        """The file of a tensor; the last one for a tensor that the base does not have."""
        index = self.file_mapping.get(fqn, self.num_files)
        return index, self.untrained.get(fqn, _TRAINED)

    def name(self, directory: str, rank: int, key: _FileKey) -> str:
        """The file of *rank* with the tensors of *key*."""
        index, kind = key
        # The base's number, also where this rank has slices of some of its files only.
        return layout.shard_file(directory, rank, index, self.num_files, kind=kind)


def lay_out(plan: TreePlan, files: ShardFiles) -> TreeLayout:
    """The order of an assigned plan's tensors in the files of each rank."""
    tensors = plan.assignment.tensors
    keys = {fqn: files.key(fqn) for fqn in tensors}
    numbers = {key: number for number, key in enumerate(sorted(set(keys.values())))}
    parts = {fqn: numbers[key] for fqn, key in keys.items()}
    by_width = sorted(tensors.values(), key=_width)
    return ordered(sorted(by_width, key=lambda tensor: parts[tensor.fqn]), parts.__getitem__)


def _width(tensor: Tensor) -> int:
    # Wider dtypes first: readers view a tensor's bytes in place, at offsets that must be multiples of its item size.
    return -DTYPE_BITS[tensor.dtype]


def plan_jobs(
    plan: TreePlan, rank: int, tree_layout: TreeLayout, files: ShardFiles
) -> Iterator[FileJob]:
    """The jobs of *rank* for a tree, which has this layout."""
    by_file: dict[_FileKey, list[Tensor]] = {}
    for tensor in tree_layout.of_rank(rank):
        by_file.setdefault(files.key(tensor.fqn), []).append(tensor)
    for key, tensors in by_file.items():
        file = files.name(plan.directory, rank, key)
        header, starts = shard_header([_header_entry(tensor) for tensor in tensors])
        chunks = [Chunk(0, header)]
        nbytes = len(header)
        for tensor in tensors:
            entry = located(tensor, file, starts[tensor.fqn])
            chunks.append(Chunk(starts[tensor.fqn], plan.fetch(tensor), entry))
            nbytes += entry.slices[0].nbytes
        yield FileJob(file, chunks, plan.name, nbytes, reusable=key[1] != _TRAINED)
    yield from values_job(plan, rank)


def _header_entry(tensor: Tensor) -> Entry:
    (stored,) = tensor.slices
    return tensor.fqn, tensor.dtype, stored.offsets, stored.sizes, tensor.shape
