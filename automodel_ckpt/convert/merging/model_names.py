"""Compare the tensors of an import with the model that its config.json describes. Imports no torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from automodel_ckpt.base.units import counted, some_of
from automodel_ckpt.checkpoint.files.dtypes import ORDINARY_FLOATS
from automodel_ckpt.checkpoint.files.type_aliases import Shape, Strings
from automodel_ckpt.checkpoint.parts.slices import TensorMap
from automodel_ckpt.errors import unusable

_MAX_NAMED = 3
# Megatron pads vocabularies to a multiple of 128 rows for each of up to 64 ranks.
_MAX_PADDING = 128 * 64
# Usual names of the backbone in a model, which all tensors are in if the output layer is tied.
_BACKBONES = ("model", "transformer")


@dataclass(frozen=True)
class NameDifferences:
    """The differences between stored names and a model's names. *model* is the name of the model's class.

    *unknown* are stored, and no tensor of the model has them. *missing* are tensors of the model that are not stored.
    *shapes* has the known shapes of the model's parameters, by the stored name. *vocab_size* is the model's
    vocabulary size.
    """

    model: str
    unknown: Strings
    missing: Strings
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    vocab_size: int | None = None

    def check(self, where: str) -> None:
        """Raise :class:`CheckpointUnusable` if stored tensors have other names than the model's."""
        # Either alone is usual: a head that another model has or lacks, or buffers of another version.
        if not self.unknown or not self.missing:
            return
        name = self.unknown[0]
        (similar,) = difflib.get_close_matches(name, self.missing, n=1, cutoff=0)
        raise unusable(
            f"these tensors do not have the names of a {self.model}, whose config.json this is",
            where,
            "\n    " + "\n    ".join(self.lines()),
            "use the config.json of this model; or give --names a file with a line for each name, such as "
            f"`{name[:200]}: {similar}`, in which {{i}} is any number",
        )

    def check_shapes(self, stored: TensorMap, where: str, *, is_quantized: bool) -> None:
        """Raise :class:`CheckpointUnusable` if *stored* tensors have other shapes than the model's parameters.

        Padding of the vocabulary is no difference. Matrices of a quantized model can be stored in any shape.
        """
        different = []
        for name, shape in self.shapes.items():
            tensor = stored.get(name)
            is_packed = is_quantized and len(shape) > 1
            if tensor is None or is_packed or tensor.dtype not in ORDINARY_FLOATS:
                continue
            if tensor.shape == shape or math.prod(tensor.shape) == math.prod(shape) == 1:
                continue
            # Padding of the vocabulary.
            rows, size = tensor.shape[:1], self.vocab_size or math.inf
            is_vocabulary = shape == (size, *tensor.shape[1:])
            if rows and is_vocabulary and size <= rows[0] <= size + _MAX_PADDING:
                continue
            different.append(f"{name[:200]}: {list(tensor.shape)}, by config.json {list(shape)}")
        if not different:
            return
        raise unusable(
            f"these tensors do not have the shapes of the {self.model} that config.json describes",
            where,
            some_of(different, _MAX_NAMED),
            "give --config the directory of this model's own config.json: this one is that of a model of another "
            "size",
        )

    def lines(self) -> Iterator[str]:
        """Describe the differences."""
        for names, which in (
            (self.unknown, f"that a {self.model} does not have"),
            (self.missing, f"of a {self.model} not found"),
        ):
            if names:
                listed = some_of([name[:200] for name in names], _MAX_NAMED)
                yield f"{counted(len(names), 'tensor')} {which}: {listed}"


NameComparer = Callable[[bytes, Collection[str]], NameDifferences | None]
"""Compares names with the names in the model that the content of a config.json describes.

Returns None when the model's names are unknown.

The command that imports passes it: it builds the model, which needs torch and transformers.
"""


def has_odd_prefix(names: Iterable[str]) -> bool:
    """Return whether all *names* begin with a component that models rarely have, such as an attribute of a script.

    Comparing names takes seconds, which an import of Hugging Face files does not need otherwise.
    """
    pairs = {tuple(name.split(".")[:2]) for name in names}
    prefixes = {pair[0] for pair in pairs}
    if len(prefixes) != 1:
        return False
    (prefix,) = prefixes
    return prefix not in _BACKBONES or any(pair[1:] in ((prefix,), ("lm_head",)) for pair in pairs)
