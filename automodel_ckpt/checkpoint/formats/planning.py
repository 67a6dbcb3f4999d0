"""The plan of a tree on one rank: which of its slices and values this rank writes.

Each rank describes its tensors (``description.py``), and all ranks compute from the descriptions which rank writes
which slice (``assignment.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Shape, Texts, ValueDict, Values
from automodel_ckpt.checkpoint.formats.assignment import Assignment, Share, assign
from automodel_ckpt.checkpoint.formats.description import (
    TreeDescription,
    describe,
    local_tensor,
)
from automodel_ckpt.checkpoint.jobs.jobs import Blocks, Chunk, FileJob
from automodel_ckpt.checkpoint.jobs.rank_manifest import RankTree
from automodel_ckpt.checkpoint.jobs.tensor_bytes import blocks_of, flat_bytes, raw_bytes
from automodel_ckpt.checkpoint.parts.sharding import RegularSlices
from automodel_ckpt.checkpoint.parts.slices import Tensor, TensorMap
from automodel_ckpt.checkpoint.parts.tree import Blob
from automodel_ckpt.checkpoint.pickles.pickle_values import saved


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """The regular tensors of a tree and their copies, by name. Those in a part have the order of a rank's file."""

    tensors: TensorMap = dataclasses.field(default_factory=dict)
    copies: TensorMap = dataclasses.field(default_factory=dict)

    def of_rank(self, rank: int) -> Iterator[Tensor]:
        """Yield what *rank* writes of the tensors, in their order: each with one slice, which has no file yet.

        Empty slices of tensors that are not empty are omitted.
        """
        for tensor in self.tensors.values():
            assert isinstance(tensor.slices, RegularSlices)
            stored = tensor.slices.of_rank(rank)
            if stored is not None:
                yield Tensor(tensor.fqn, tensor.dtype, tensor.shape, (stored,))

    def rank_tree(self) -> RankTree:
        """An empty record of what this rank writes of the tree."""
        rows = {}
        placed = False
        for number, tensor in enumerate((*self.tensors.values(), *self.copies.values())):
            assert isinstance(tensor.slices, RegularSlices)
            rows[tensor.fqn] = tensor.slices.part, number
            placed = placed or tensor.slices.position is not None
        return RankTree(rows=rows, placed=placed)


def ordered(tensors: Iterable[Tensor], part_of: Callable[[str], int] = lambda fqn: 0) -> TreeLayout:
    """The layout of regular *tensors* in files of the ranks, in this order; *part_of* is the part of a name."""
    found = {}
    for tensor in tensors:
        assert isinstance(tensor.slices, RegularSlices)
        part = part_of(tensor.fqn)
        if part != tensor.slices.part:
            tensor = replace(tensor, slices=replace(tensor.slices, part=part))
        found[tensor.fqn] = tensor
    return TreeLayout(found)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Tensor data that is fetched only when it is needed."""

    tensor: Callable[[], torch.Tensor]
    nbytes: int

    def __call__(self) -> memoryview | Blocks:
        """The row-major bytes; of a tensor on a GPU as blocks, which are copied while they are written."""
        tensor = self.tensor()
        if tensor.is_cuda:
            return Blocks(self.nbytes, partial(blocks_of, flat_bytes(tensor)))
        return raw_bytes(tensor)


@dataclass(slots=True)
class TreePlan:
    """The state dict of one tree, and which rank writes what of it. *kinds* has the kinds of tensors that do not train.

    The results of :meth:`describe` are compared between ranks (``saving/planner.py``). :meth:`assign`
    takes the resulting shares. Every rank computes the same assignment, so nothing is scattered.
    """

    name: str
    directory: str
    state_dict: ValueDict
    nested: bool
    kinds: Texts = dataclasses.field(default_factory=dict)
    paths: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    assignment: Assignment = dataclasses.field(default_factory=Assignment)
    _flat: ValueDict = dataclasses.field(default_factory=dict)

    def flatten(self) -> Values:
        """Flatten *nested* state dicts (of optimizers) into one level. Returns :meth:`flat`."""
        self._flat = self.state_dict
        if self.nested:
            from torch.distributed.checkpoint._nested_dict import flatten_state_dict

            self._flat, self.paths = flatten_state_dict(self.state_dict)
        return self._flat

    def describe(self) -> TreeDescription:
        """Describe this rank's state. Call :meth:`flatten` first."""
        return describe(self._flat, self.paths, self.kinds)

    def assign(self, shares: Sequence[Share]) -> None:
        """Assign each slice, and each value that is not a tensor, to exactly one rank.

        *shares* are the shares of all ranks. Raises :class:`SaveFailed` where they do not match.
        """
        self.assignment = assign(self.name, shares)
        self.paths, self.kinds = self.assignment.paths, self.assignment.kinds

    def values(self, rank: int) -> Iterator[tuple[str, bytes]]:
        """The values *rank* writes that are no tensors, as ``torch.save`` writes them."""
        for fqn, writer in self.assignment.values.items():
            if writer == rank:
                yield fqn, bytes(saved(self._flat[fqn]))

    def fetch(self, tensor: Tensor) -> Fetch:
        """The data of the slice of *tensor* (of :meth:`TreeLayout.of_rank`), to be fetched when it is written."""
        (stored,) = tensor.slices
        return Fetch(partial(self._local_data, tensor.fqn, stored.sizes), stored.nbytes)

    def _local_data(self, fqn: str, sizes: Shape) -> torch.Tensor:
        """The local data of a slice of shape *sizes*, on its device, from the present state dict."""
        # Looked up at each save: a kept plan must see parameters that were replaced.
        value = self._flat[fqn]
        local = local_tensor(value)
        if local.requires_grad:
            local = local.detach()
        return local if local.shape == sizes else local.reshape(sizes)

    def flat(self) -> Values:
        """The planned state dict, flattened."""
        return self._flat

    def set_values(self, state: Values) -> None:
        """Fetch the values from *state* from now on: a flat state dict with the same names and shapes."""
        self._flat = dict(state)

    def release_values(self) -> None:
        """Drop the references to the state, so that what training replaces is freed. The plan stays usable."""
        self.set_values({})
        self.state_dict = {}


def located(tensor: Tensor, file: str, start: int) -> Tensor:
    """*tensor*, which has one slice, with this slice from byte *start* of *file*."""
    (stored,) = tensor.slices
    return Tensor(
        tensor.fqn, tensor.dtype, tensor.shape, (replace(stored, file=file, start=start),)
    )


def values_job(plan: TreePlan, rank: int) -> Iterator[FileJob]:
    """The job for a module's values that are not tensors (``get_extra_state``), in a separate file."""
    file = layout.objects_file(plan.directory, rank)
    chunks, start = [], 0
    for fqn, data in plan.values(rank):
        chunks.append(Chunk(start, data, Blob(fqn, file, start, len(data), "")))
        start += len(data)
    if chunks:
        yield FileJob(file, chunks, plan.name)
