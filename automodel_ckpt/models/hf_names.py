"""The names of a model's tensors in Hugging Face files, where they differ from the names in memory.

transformers renames tensors while it loads: ``language_model.model.embed_tokens.weight`` of a LLaVA file is
``model.language_model.embed_tokens.weight`` in memory, and the experts of a layer, which are separate tensors in files,
are one tensor. ``save_pretrained`` and checkpoints write the names of the files, because other programs expect them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from automodel_ckpt.checkpoint.files.type_aliases import Shape, TextDict, Texts
from automodel_ckpt.checkpoint.files.weight_map import read_weight_map
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)

_THINKER = "thinker."
"""What names begin with in the files of a whole Qwen-Omni model."""

RowPart = tuple[int, tuple[slice, ...]]
"""(index into the first dimension, slices of the other dimensions)."""


class InFiles(NamedTuple):
    """How Hugging Face files store those tensors of a model that differ from memory.

    *names*: ``{name in memory: name in files}`` of renamed tensors. *parts*: ``{name in memory: {name in files:
    part}}`` of tensors with rows that are separate tensors in files.
    """

    names: TextDict
    parts: dict[str, dict[str, RowPart]]


class Conversion(NamedTuple):
    """How transformers converts a model's tensors to the tensors of files.

    *names*: ``{name in memory: name in files}`` of complete tensors, and *parts* as in :class:`InFiles`. *combined*:
    ``{name in files: names in memory}`` of the other tensors of files, which are computed in another way: a range of
    rows, or two matrices as one. The tensors in memory that they come from are neither in *names* nor in *parts*.
    """

    names: TextDict
    parts: dict[str, dict[str, RowPart]]
    combined: dict[str, frozenset[str]]

    @property
    def in_files(self) -> set[str]:
        """The names of all tensors that transformers writes to files."""
        names = {*self.names.values(), *self.combined}
        for parts in self.parts.values():
            names.update(parts)
        return names


def read_conversion(model: nn.Module) -> Conversion | None:
    """Find how ``save_pretrained`` converts the tensors of *model*, by transformers' own conversion of marker tensors.

    Call it before the model is sharded. Returns None for a model of another library, and if the conversion computes
    with the values, for which the markers are too small.
    """
    if not isinstance(model, PreTrainedModel):
        return None
    tensors = model.state_dict(keep_vars=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    try:
        return _read_off(shapes, lambda small: revert_weight_conversion(model, small))
    except Exception as error:  # such as an arithmetic operation
        log.debug(
            "tensors keep their names of memory in files: %s: %s", type(error).__name__, error
        )
        return None


def _names_in_memory(model: PreTrainedModel, names: Collection[str]) -> TextDict:
    """{name in a file: name in memory} of those *names* that transformers only renames."""
    renamed: TextDict = {}
    tensors = model.state_dict(keep_vars=True) if names else {}
    try:
        transforms = get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        for name in names:
            new, converter = rename_source_key(
                name, renamings, converters, model.base_model_prefix, tensors
            )
            if converter is None:
                renamed[name] = new
    except Exception as error:  # another version of transformers
        log.debug("tensors keep their names: %s: %s", type(error).__name__, error)
    return renamed


def names_in_files(
    model: nn.Module, base_dir: Path | None = None, conversion: Conversion | None = None
) -> InFiles:
    """Find the names that ``save_pretrained`` would write. *conversion* is the model's; None: it is read here.

    Call it before the model is sharded. Names that the files in *base_dir* contain stay unchanged, and so do names of
    tensors that transformers converts by more than renaming them or splitting them into rows (experts). If it computes
    with values, all names stay as they are in memory.

    Files can have older names that transformers reads and does not write: ``vision_tower.vision_model.encoder`` of
    LLaVA and Gemma 3 (5.23). They stay, because programs that read such files do not know the newer ones. So do names
    without the prefix of the backbone, if all tensors of the model can have such names.
    """
    found = conversion or read_conversion(model)
    if found is None or not isinstance(model, PreTrainedModel):
        return InFiles({}, {})
    unchanged = tensor_names_in(base_dir) if base_dir is not None else set()

    def in_base(name: str) -> str:
        # Qwen-Omni's files contain several models, of which transformers reads the thinker.
        with_prefix = _THINKER + name
        return with_prefix if with_prefix in unchanged and name not in unchanged else name

    names = {
        fqn: in_base(name)
        for fqn, name in found.names.items()
        if in_base(name) != fqn and fqn not in unchanged
    }
    parts = {
        fqn: {in_base(name): part for name, part in of_rows.items()}
        for fqn, of_rows in found.parts.items()
        if fqn not in unchanged
    }
    written = {names.get(fqn, fqn) for fqn in found.names}
    older = unchanged - written - found.in_files
    in_base_only = {
        fqn: name
        for name, fqn in _names_in_memory(model, older).items()
        if fqn in found.names and names.get(fqn, fqn) not in unchanged
    }
    if not _would_mix_prefixes(model, found, in_base_only):
        names.update(in_base_only)
    return InFiles(names, parts)


def _would_mix_prefixes(model: PreTrainedModel, found: Conversion, in_base: Texts) -> bool:
    """Whether only some tensors have names *in_base* that lack the prefix of the backbone, or have it in excess.

    transformers 4 adds or removes the prefix for all tensors of a file or for none. It cannot load a head next to a
    backbone without the prefix, for example.
    """
    prefix = f"{model.base_model_prefix}."
    moved = {
        fqn
        for fqn, name in in_base.items()
        if name.startswith(prefix) != found.names[fqn].startswith(prefix)
    }
    stored = set(model.state_dict(keep_vars=True)).difference(model.all_tied_weights_keys)
    return bool(moved) and not stored <= moved


def _read_off(
    shapes: Mapping[str, Shape],
    revert: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> Conversion:
    """Convert a small integer tensor for each tensor with *revert*, and read the origins off the results.

    Such a marker has as many dimensions as its tensor, and as many rows if these may become separate tensors (three or
    more dimensions). All elements of all markers are different numbers from 0 on, so that they identify their origin
    after any slicing. Raises ValueError if the result does not contain each of them exactly once.
    """
    markers: dict[str, Tensor] = {}
    starts: list[int] = []
    total = 0
    for name, shape in shapes.items():
        # The greatest divisor of each extent up to 8; 0 for 0.
        small = [
            max((size for size in range(1, 9) if extent and extent % size == 0), default=0)
            for extent in shape
        ]
        if len(shape) > 2:
            small[0] = shape[0]
        starts.append(total)
        total += math.prod(small)
        markers[name] = torch.arange(starts[-1], total).reshape(small)
    reverted = revert(dict(markers))
    everything = torch.cat([value.flatten() for value in reverted.values()]).sort().values
    if not torch.equal(everything, torch.arange(total)):
        raise ValueError("the conversion drops, repeats or changes elements")
    names, parts = TextDict(), dict[str, dict[str, RowPart]]()
    combined: dict[str, frozenset[str]] = {}
    fqns, borders = list(shapes), torch.tensor(starts)
    for name, value in reverted.items():
        # Nothing identifies the origin of an empty tensor, so it keeps its name in memory.
        if value.numel() == 0:
            continue
        indices = torch.searchsorted(borders, value.flatten(), right=True) - 1
        origins = frozenset(fqns[index] for index in set(indices.tolist()))
        (fqn, *others) = origins
        part = None if others else _row_part(value, markers[fqn], shapes[fqn])
        if torch.equal(value, markers[fqn]):
            names[fqn] = name
        elif part is not None:
            parts.setdefault(fqn, {})[name] = part
        else:
            log.debug("%s keeps the names of memory in files", name)
            combined[name] = origins
    # A part of a tensor with other parts that have no description.
    for fqn in frozenset[str]().union(*combined.values()):
        for name in parts.pop(fqn, {}):
            combined[name] = frozenset([fqn])
    return Conversion(names, parts, combined)


def _row_part(value: Tensor, marker: Tensor, shape: Shape) -> RowPart | None:
    """The part of a tensor of *shape* that *value* is, a part of its *marker*. None when it is not of one row."""
    if marker.dim() < 2:
        return None
    ends = value.flatten()[[0, -1]] - marker.flatten()[0]
    first, last = torch.stack(torch.unravel_index(ends, marker.shape), 1).tolist()
    row, *low = first
    in_marker = [slice(start, end + 1) for start, end in zip(low, last[1:], strict=True)]
    if not torch.equal(value, marker[row][tuple(in_marker)]):
        return None
    # Exact, because the extent of a marker divides its tensor's.
    factors = [extent // small for extent, small in zip(shape[1:], marker.shape[1:], strict=True)]
    in_tensor = [
        slice(part.start * factor, part.stop * factor)
        for part, factor in zip(in_marker, factors, strict=True)
    ]
    return row, tuple(in_tensor)


def tensor_names_in(base_dir: Path) -> set[str]:
    """The names of all tensors in the Hugging Face files of *base_dir*."""
    weight_map = _weight_map_of(base_dir)
    if weight_map is not None:
        return set(weight_map)
    return set(tensor_types_in(base_dir))


def tensor_types_in(base_dir: Path) -> TextDict:
    """{name: dtype code of safetensors} of all tensors in the Hugging Face files of *base_dir*; empty if these are
    files of another kind.

    Raises :class:`RecipeError` for a damaged index, SafetensorError for a damaged file, and OSError for a file that
    cannot be opened.
    """
    weight_map = _weight_map_of(base_dir)
    files = {"model.safetensors"} if weight_map is None else set(weight_map.values())
    types: TextDict = {}
    for path in sorted(base_dir / name for name in files):
        if weight_map is not None or path.is_file():
            with safe_open(path, "pt") as file:
                keys = file.keys()
                types.update({key: file.get_slice(key).get_dtype() for key in keys})
    return types


def _weight_map_of(base_dir: Path) -> TextDict | None:
    index = base_dir / "model.safetensors.index.json"
    return read_weight_map(index, follow_links=True, kind=RecipeError)
