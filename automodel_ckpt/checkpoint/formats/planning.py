"""Plan which rank writes what: PyTorch DCP's planner with one exchange between ranks instead of DCP's collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint.device_bytes import blocks_of, gathered
from automodel_ckpt.checkpoint.discovery import flat_bytes, raw_bytes
from automodel_ckpt.checkpoint.dtypes import TORCH_NAMES
from automodel_ckpt.checkpoint.files.pickle_values import saved
from automodel_ckpt.checkpoint.slices import Slice, Tensor, nbytes_of
from automodel_ckpt.checkpoint.writing.jobs import Blocks

DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in TORCH_NAMES.items()}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Fetch:
    """Tensor data that is fetched only when it is needed."""

    tensor: Callable[[], torch.Tensor]
    nbytes: int

    def __call__(self) -> memoryview:
        """The row-major bytes in host memory; a copy only where the tensor is elsewhere or not contiguous."""
        tensor = self.tensor()
        if tensor.is_cuda:
            return gathered(flat_bytes(tensor))
        return raw_bytes(tensor)

    def contents(self) -> memoryview | Blocks:
        """The row-major bytes; of a tensor on a GPU as blocks, which are copied while they are written."""
        tensor = self.tensor()
        if tensor.is_cuda:
            return Blocks(self.nbytes, partial(blocks_of, flat_bytes(tensor)))
        return raw_bytes(tensor)


@dataclass(slots=True)
class TreePlan:
    """The state dict of one tree and its planner on this rank.

    The result of :meth:`local` is sent to the other ranks; :meth:`partition` takes those of all ranks and keeps this
    rank's share. Every rank computes the same global plan, so nothing is scattered.
    """

    name: str
    directory: str
    state_dict: dict[str, Any]
    nested: bool
    planner: DefaultSavePlanner = dataclasses.field(init=False)
    metadata: Metadata = dataclasses.field(init=False)
    items: Sequence[WriteItem] = ()

    def local(self) -> SavePlan:
        """This rank's plan. *nested* state dicts (of optimizers) are flattened into one level."""
        # Sharded tensors are not flattened: that would replace DTensors by their shards.
        self.planner = DefaultSavePlanner(
            flatten_state_dict=self.nested, flatten_sharded_tensors=False
        )
        self.planner.set_up_planner(self.state_dict)
        return self.planner.create_local_plan()

    def partition(self, plans: Sequence[SavePlan], rank: int) -> None:
        """Assign each slice, and each value that is not a tensor, to exactly one rank. *plans* are those of all."""
        # DCP's result depends only on the plans and their order (torch 2.13), so that each rank
        # computes it alone. If several plans contain an item, one rank writes it: state that
        # differs between ranks needs different names.
        partitioned, self.metadata = self.planner.create_global_plan(list(plans))
        self.items = partitioned[rank].items

    def tensors(self) -> list[Tensor]:
        """The slices that this rank writes: tensors with one slice each, which has no file yet.

        Empty slices of tensors that are not empty are omitted.
        """
        tensors: list[Tensor] = []
        for item in self.items:
            if item.type == WriteItemType.BYTE_IO:
                continue
            tensor = _tensor_of(item)
            if tensor.slices[0].nbytes or 0 in tensor.shape:
                tensors.append(tensor)
        return tensors

    def all_tensors(self) -> dict[str, Tensor]:
        """All tensors with the slices of all ranks, which have no file yet, by FQN. Call :meth:`partition` first."""
        tensors: dict[str, Tensor] = {}
        for fqn, stored in self.metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                continue
            dtype = DTYPE_CODES[stored.properties.dtype]
            slices = [_slice_of(fqn, dtype, chunk) for chunk in stored.chunks]
            tensors[fqn] = Tensor(fqn, dtype, tuple(stored.size), tuple(slices))
        return tensors

    def values(self) -> Iterator[tuple[str, bytes]]:
        """The values this rank writes that are no tensors, as ``torch.save`` writes them."""
        for item in self.items:
            if item.type != WriteItemType.BYTE_IO:
                continue
            value = self.planner.lookup_object(item.index)
            yield item.index.fqn, bytes(saved(value))

    def fetch(self, tensor: Tensor) -> Fetch:
        """The data of the slice of *tensor* (of :meth:`tensors`), to be fetched when it is written."""
        (stored,) = tensor.slices
        return Fetch(partial(self._local_data, tensor.fqn, stored.sizes), stored.nbytes)

    def _local_data(self, fqn: str, sizes: tuple[int, ...]) -> torch.Tensor:
        """The local data of a slice of shape *sizes*, on its device, from the present state dict."""
        # Looked up at each save: a kept plan must see parameters that were replaced.
        value = self.planner.state_dict[fqn]
        local: torch.Tensor = value.to_local() if isinstance(value, DTensor) else value
        if local.requires_grad:
            local = local.detach()
        return local if local.shape == sizes else local.reshape(sizes)

    def flat(self) -> Mapping[str, Any]:
        """The planned state dict, flattened."""
        return self.planner.state_dict

    def set_values(self, state: Mapping[str, Any]) -> None:
        """Replace the values that are fetched by those of *state*, a flat state dict of the same names and shapes."""
        self.planner.state_dict = dict(state)

    def release_values(self) -> None:
        """Drop the references to the state, so that what training replaces is freed. The plan stays usable."""
        self.set_values({})
        self.state_dict = {}


def _tensor_of(item: WriteItem) -> Tensor:
    data = item.tensor_data
    assert data is not None
    dtype = DTYPE_CODES[data.properties.dtype]
    fqn = item.index.fqn
    return Tensor(fqn, dtype, tuple(data.size), (_slice_of(fqn, dtype, data.chunk),))


def _slice_of(fqn: str, dtype: str, chunk: ChunkStorageMetadata) -> Slice:
    """The slice of a tensor that DCP describes with *chunk*, without a file."""
    sizes = tuple(chunk.sizes)
    return Slice(fqn, dtype, tuple(chunk.offsets), sizes, "", 0, nbytes_of(dtype, sizes))


def located(tensor: Tensor, file: str, start: int) -> Tensor:
    """*tensor*, which has one slice, with this slice from byte *start* of *file*."""
    (stored,) = tensor.slices
    return replace(tensor, slices=(replace(stored, file=file, start=start),))


def file_index(fqn: str, mapping: Mapping[str, int]) -> int:
    """The number (from 1) of the base's file for a tensor; the last one for a tensor that the base does not have."""
    return mapping.get(fqn, max(mapping.values(), default=1))
