"""Load weights into modules: each rank reads from the files what its shards of the parameters need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from automodel_ckpt.checkpoint.files.dtypes import ORDINARY_FLOATS
from automodel_ckpt.checkpoint.files.type_aliases import Shape, TextDict, Texts, Values
from automodel_ckpt.checkpoint.formats.reading import read_tree
from automodel_ckpt.checkpoint.parts.slices import Box, Tensor, nbytes_of, whole_box
from automodel_ckpt.checkpoint.parts.tree import Tree
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.checkpoint.state.mismatch import first_lines
from automodel_ckpt.checkpoint.state.module_tensors import (
    StoredLayout,
    adapter_keys,
    complete_state,
    has_plain_names,
    model_state_dict,
    module_state,
    stored_layout,
    unwrap,
)
from automodel_ckpt.checkpoint.state.quantized_tensors import (
    QuantizedTensor,
    dequantized_rows,
    read_rows,
)
from automodel_ckpt.checkpoint.state.storable import DTYPES, local_box, local_tensor
from automodel_ckpt.errors import unusable

NewRows = Literal["mean", "init"]
_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Filling:
    """The stored tensor that fills a tensor of a module: its *source* and its name there.

    *resized*: the numbers of rows differ; the common rows are read. *quantized* describes a tensor that consists of
    quantized values and scales; it is not resized. *take* gets blocks of all rows of a tensor that the module stores in
    another form, and keeps this rank's shard of it.
    """

    source: Tensors
    name: str
    resized: bool = False
    quantized: QuantizedTensor | None = None
    take: Callable[[Iterable[torch.Tensor]], None] | None = None


def module_shapes(module: nn.Module) -> tuple[dict[str, Shape], TextDict]:
    """(global shapes of the stored tensors of *module* on all ranks by FQN, {tied name: stored name})."""
    state, tied = complete_state(module)
    tensors = {fqn: value for fqn, value in state.items() if isinstance(value, torch.Tensor)}
    return {fqn: tuple(tensor.shape) for fqn, tensor in tensors.items()}, dict(tied)


def fill_module(
    module: nn.Module,
    fillings: Mapping[str, Filling],
    new_rows: NewRows,
    layout: StoredLayout | None = None,
) -> None:
    """Read the stored tensors of *fillings* (by stored name) into the module; other tensors keep their values.

    *layout* replaces the module's own stored layout. Tensors may be sharded and on any device; values are cast to the
    parameter's dtype. The common rows of a resized tensor are read. With *new_rows* ``mean``, its other rows become the
    mean of all stored rows; with ``init``, they are unchanged. Tensors that only other ranks have are skipped; no
    collective.

    Raises :class:`CheckpointUnusable` naming the file, and for values that are no ordinary floats in the place of
    floats, before any tensor is read.
    """
    state, tied = module_state(module, layout)
    _check_types(state, fillings)
    sources = {id(filling.source): filling.source for filling in fillings.values()}
    for source in sources.values():
        # All tensors of one source are read together, so that each of its files is opened once.
        unresized = {}
        targets = {}
        for fqn, filling in fillings.items():
            if filling.source is not source or fqn not in state:
                continue
            if filling.take is not None:
                filling.take(_all_rows(source, filling))
                continue
            if filling.quantized is not None:
                _fill_dequantized(source, filling.quantized, state[fqn])
                continue
            stored = source.tensors[filling.name]
            if filling.resized:
                _fill_rows(source, stored, state[fqn], new_rows)
            else:
                unresized[fqn] = stored.renamed(fqn)
                targets[fqn] = state[fqn]
        read_tree(source.root, Tree("", unresized, {}), targets)
    set_module_state(module, state, tied, strict=True, layout=layout)


def _check_types(state: Values, fillings: Mapping[str, Filling]) -> None:
    """Raise :class:`CheckpointUnusable` for integers and other quantized values that would become weights unscaled."""
    faults = []
    path = Path()
    for fqn, filling in fillings.items():
        if filling.quantized is not None or fqn not in state:
            continue
        target, stored = state[fqn].dtype, filling.source.tensors[filling.name]
        is_float = target.is_floating_point or target.is_complex
        if not is_float or stored.dtype in ORDINARY_FLOATS or DTYPES.get(stored.dtype) == target:
            continue
        faults.append(f"{filling.name}: {stored.dtype}, here {str(target).removeprefix('torch.')}")
        path = filling.source.root
    if faults:
        raise unusable(
            "these values are not weights as they are: they are quantized, or of another kind",
            path,
            first_lines(faults),
            "use weights in float32, bfloat16 or float16; dequantize these with the program that quantized them",
        )


def _fill_rows(source: Tensors, stored: Tensor, target: torch.Tensor, new_rows: NewRows) -> None:
    local, box = local_part(target)
    if local.numel() == 0:
        return
    num_stored = stored.shape[0]
    first = box.offsets[0]
    num_read = max(min(first + box.sizes[0], num_stored) - first, 0)
    columns = _columns_of(box, target)
    _copy_rows(_blocks(source, stored, first, first + num_read), local, first, columns)
    if first + box.sizes[0] > num_stored and new_rows == "mean":
        # In double precision: the mean of a hundred thousand bf16 rows would lose its lower digits.
        # Each rank sums all rows in the same blocks, so that the mean does not depend on the
        # sharding.
        total = torch.zeros(stored.shape[1:], dtype=torch.float64, device="cpu")
        for _, block in _blocks(source, stored, 0, num_stored):
            total += block.sum(0, dtype=torch.float64)
        mean = total / num_stored
        first_new_row = max(num_stored - first, 0)
        local[first_new_row:].copy_(mean[columns])


def _all_rows(source: Tensors, filling: Filling) -> Iterator[torch.Tensor]:
    """Blocks of all rows of a stored tensor, in host memory."""
    if filling.quantized is not None:
        blocks = dequantized_rows(source, filling.quantized, 0, filling.quantized.shape[0])
    else:
        stored = source.tensors[filling.name]
        blocks = _blocks(source, stored, 0, stored.shape[0])
    for _, block in blocks:
        yield block


def _fill_dequantized(source: Tensors, stored: QuantizedTensor, target: torch.Tensor) -> None:
    local, box = local_part(target)
    if local.numel() == 0:
        return
    first = box.offsets[0]
    blocks = dequantized_rows(source, stored, first, first + box.sizes[0])
    _copy_rows(blocks, local, first, _columns_of(box, target))


def _columns_of(box: Box, target: torch.Tensor) -> tuple[slice, ...]:
    """This rank's part of each row of *target*, of which it has the part *box*."""
    return box.within(whole_box(tuple(target.shape)))[1:]


def _copy_rows(
    blocks: Iterator[tuple[int, torch.Tensor]],
    local: torch.Tensor,
    first: int,
    columns: tuple[slice, ...],
) -> None:
    """Copy the *columns* of blocks of rows into *local*, which begins at row *first*."""
    for start, block in blocks:
        row = start - first
        local[row : row + len(block)].copy_(block[:, *columns])


def local_part(target: torch.Tensor) -> tuple[torch.Tensor, Box]:
    """This rank's shard of a tensor, and its box in the whole tensor."""
    box = local_box(target)
    assert box is not None, "the module is on this rank"
    return local_tensor(target).detach(), box


def _blocks(
    source: Tensors, stored: Tensor, first: int, stop: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Read rows ``first .. stop`` of a stored tensor in blocks: (number of the first row, rows in host memory)."""
    row_bytes = nbytes_of(stored.dtype, stored.shape[1:])
    num_rows = max(1, _BLOCK_BYTES // max(1, row_bytes))
    for start in range(first, stop, num_rows):
        yield start, read_rows(source, stored, start, min(start + num_rows, stop))


def set_module_state(
    module: nn.Module,
    state: Values,
    tied: Texts,
    *,
    strict: bool,
    layout: StoredLayout | None = None,
) -> None:
    """Load a *state* into a *module*: what ``module_state`` (``checkpoint/state/module_tensors.py``) returned.

    *tied* and *layout* are from that call. With *strict*, a missing or unknown name is an error of torch.
    """
    layout = layout or stored_layout(module)
    loaded = dict(state)
    for name, kept in tied.items():
        if kept in state and name not in layout.copies:
            loaded[name] = state[kept]
    present = model_state_dict(module)
    keys = adapter_keys(unwrap(module), present)
    if keys is not None:
        own = {fqn: loaded[key] for fqn, key in keys.items() if key in loaded}
        # The tensors of the base are not in the state.
        strict = False
    else:
        # Rows are views into the module's own tensors: their values were written in place.
        row_names = {name for parts in layout.rows.values() for name in parts}
        fqns = {name: fqn for fqn, name in layout.names.items()}
        own = {
            fqns.get(name, name): value for name, value in loaded.items() if name not in row_names
        }
        own.update((fqn, present[fqn]) for fqn in layout.rows if fqn in present)
    if has_plain_names(unwrap(module)):
        unwrap(module).load_state_dict(own, strict=strict)
    else:
        set_model_state_dict(module, own, options=StateDictOptions(strict=strict))
