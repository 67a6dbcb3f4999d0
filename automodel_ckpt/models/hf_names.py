"""What a model's tensors are called in Hugging Face files, where that differs from their names in memory.

transformers renames while it loads: a LLaVA file's ``language_model.model.embed_tokens.weight`` is
``model.language_model.embed_tokens.weight`` in memory, and the experts of a layer, each a tensor in files, are one.
Its ``save_pretrained`` undoes it, since that is what other readers of such files expect; so do checkpoints.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from automodel_ckpt.checkpoint.files.weight_map import read_weight_map
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)


RowPart = tuple[int, tuple[slice, ...]]
"""A row of a tensor, and what of that row."""


class InFiles(NamedTuple):
    """How Hugging Face files hold the tensors of a model where it is not as memory does: ``{name in memory: name in
    files}``, and of tensors whose rows are in files tensors of their own ``{name in memory: {name in files: part}}``.
    """

    names: dict[str, str]
    parts: dict[str, dict[str, RowPart]]


def names_in_files(model: nn.Module, base_dir: Path | None = None) -> InFiles:
    """What transformers would write, by its own reversal; call it before the model is sharded.

    A name that stands in the base model's own files, in *base_dir*, is kept. Tensors have their names of memory all of
    them where transformers would change any but by renaming it, or by taking it apart row by row (experts).
    """
    if not isinstance(model, PreTrainedModel):
        return InFiles({}, {})
    shapes = {
        name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()
    }
    try:
        names, parts = _read_off(
            _Markers(shapes), lambda markers: revert_weight_conversion(model, markers)
        )
    except Exception as error:  # an operation on tensors, which markers are too small for
        log.debug(
            "tensors keep their names of memory in files: %s: %s", type(error).__name__, error
        )
        return InFiles({}, {})
    kept = _names_of(base_dir) if base_dir is not None else set()
    renamed = {fqn: name for fqn, name in names.items() if name != fqn and fqn not in kept}
    return InFiles(renamed, {fqn: its for fqn, its in parts.items() if fqn not in kept})


class _Markers:
    """For each tensor a small one of as many dimensions, and of as many rows if these may be tensors; every element is
    another number, which says after any cutting where it comes from."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes, self.tensors, self._starts = shapes, dict[str, torch.Tensor](), list[int]()
        self._names, total = list(shapes), 0
        for name, shape in shapes.items():
            small = tuple(n if len(shape) > 2 and not d else _small(n) for d, n in enumerate(shape))
            count = math.prod(small)
            self._starts.append(total)
            self.tensors[name] = torch.arange(total, total + count).reshape(small)
            total += count
        self.total = total

    def origin(self, value: torch.Tensor) -> tuple[str, RowPart | None]:
        """Which tensor *value* comes from, and which part of it is its own; None: all. ValueError for anything else."""
        found = bisect_right(self._starts, int(value.flatten()[0])) - 1
        name = self._names[found]
        marker = self.tensors[name]
        if torch.equal(value, marker):
            return name, None
        where = [
            torch.unravel_index(value.flatten()[end] - self._starts[found], marker.shape)
            for end in (0, -1)
        ]
        (row, *first), (_, *last) = ([int(index) for index in corner] for corner in where)
        factors = [n // m for n, m in zip(self.shapes[name][1:], marker.shape[1:], strict=True)]
        small = tuple(slice(a, b + 1) for a, b in zip(first, last, strict=True))
        if marker.dim() < 2 or not torch.equal(value, marker[row][small]):
            raise ValueError(f"{name} is not only taken apart row by row")
        return name, (
            row,
            tuple(slice(s.start * f, s.stop * f) for s, f in zip(small, factors, strict=True)),
        )


def _small(extent: int) -> int:
    """The greatest divisor up to 8; 0 of 0."""
    return extent and next((size for size in range(8, 0, -1) if extent % size == 0), 1)


def _read_off(
    markers: _Markers, revert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> tuple[dict[str, str], dict[str, dict[str, RowPart]]]:
    """Names and parts; ValueError where the outcome is not all of the markers, each once."""
    reverted = revert(dict(markers.tensors))
    everything = torch.cat([value.flatten() for value in reverted.values()]).sort().values
    if not torch.equal(everything, torch.arange(markers.total)):
        raise ValueError("not every element is there once")
    names, parts = dict[str, str](), dict[str, dict[str, RowPart]]()
    for name, value in reverted.items():
        if value.numel() == 0:
            continue
        fqn, part = markers.origin(value)
        if part is None:
            names[fqn] = name
        else:
            parts.setdefault(fqn, {})[name] = part
    return names, parts


def _names_of(base_dir: Path) -> set[str]:
    index, single = base_dir / "model.safetensors.index.json", base_dir / "model.safetensors"
    weight_map = read_weight_map(index, follow_links=True, kind=RecipeError)
    if weight_map is not None:
        return set(weight_map)
    if not single.is_file():
        return set()
    with safe_open(single, "pt") as file:
        return set(file.keys())
