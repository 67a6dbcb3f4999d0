"""Plan which rank writes what: PyTorch DCP's planner with one exchange between ranks instead of DCP's collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint.discovery import raw_bytes
from automodel_ckpt.checkpoint.dtypes import TORCH_NAMES
from automodel_ckpt.checkpoint.files.pickle_values import saved
from automodel_ckpt.checkpoint.slices import Slice, Tensor, nbytes_of

DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in TORCH_NAMES.items()}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorShare:
    """A slice that this rank writes, with its position in the tensor but not yet in a file."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: WriteItem

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.sizes)

    def stored(self, file: str, start: int) -> Tensor:
        """The tensor, as far as this rank writes it: the slice's bytes, not digested yet, at *start* of *file*."""
        piece = Slice(self.fqn, self.dtype, self.offsets, self.sizes, file, start, self.nbytes)
        return Tensor(self.fqn, self.dtype, self.shape, (piece,))


@dataclass(frozen=True, slots=True)
class Fetch:
    """Tensor data that is fetched only when it is needed."""

    tensor: Callable[[], torch.Tensor]
    nbytes: int

    def __call__(self) -> memoryview:
        """The row-major bytes in host memory; a copy only where the tensor is elsewhere or not contiguous."""
        return raw_bytes(self.tensor())


@dataclass(slots=True)
class TreePlan:
    """The state dict of one tree and its planner on this rank.

    The result of :meth:`local` is sent to the other ranks; :meth:`settle` takes those of all ranks and keeps this
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
        self.planner = DefaultSavePlanner(
            flatten_state_dict=self.nested, flatten_sharded_tensors=False
        )
        self.planner.set_up_planner(self.state_dict)
        return self.planner.create_local_plan()

    def settle(self, plans: Sequence[SavePlan], rank: int) -> None:
        """Partition the work: each slice, and each value that is not a tensor, is written by exactly one rank."""
        settled, self.metadata = self.planner.create_global_plan(list(plans))
        self.items = settled[rank].items

    def tensors(self) -> list[TensorShare]:
        """The slices this rank writes. Empty slices of tensors that are not empty are left out."""
        shares = [_share(item) for item in self.items if item.type != WriteItemType.BYTE_IO]
        return [share for share in shares if share.nbytes or 0 in share.shape]

    def values(self) -> Iterator[tuple[str, bytes]]:
        """The values this rank writes that are no tensors, as ``torch.save`` writes them."""
        for item in self.items:
            if item.type == WriteItemType.BYTE_IO:
                yield item.index.fqn, bytes(saved(self.planner.lookup_object(item.index)))

    def tensor(self, share: TensorShare) -> torch.Tensor:
        """The local data of a slice, on its device, from the present state dict."""
        value = self.planner.state_dict[share.fqn]
        local: torch.Tensor = value.to_local() if isinstance(value, DTensor) else value
        local = local.detach() if local.requires_grad else local
        return local if local.shape == share.sizes else local.reshape(share.sizes)

    def fetching(self, share: TensorShare) -> Fetch:
        """The data of a slice, to be fetched when it is written."""
        return Fetch(partial(self.tensor, share), share.nbytes)

    def flat(self) -> Mapping[str, Any]:
        """The planned state dict, flattened."""
        return self.planner.state_dict

    def hold(self, state: Mapping[str, Any]) -> None:
        """Replace the values that :meth:`tensor` returns by those of *state*, with the same names and shapes."""
        self.planner.state_dict = dict(state)


def _share(item: WriteItem) -> TensorShare:
    data = item.tensor_data
    assert data is not None
    return TensorShare(
        fqn=item.index.fqn,
        dtype=DTYPE_CODES[data.properties.dtype],
        shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
        item=item,
    )


def file_index(fqn: str, mapping: Mapping[str, int]) -> int:
    """The number (from 1) of the base's file for a tensor; the last one for a tensor that the base does not have."""
    return mapping.get(fqn, max(mapping.values(), default=1))
