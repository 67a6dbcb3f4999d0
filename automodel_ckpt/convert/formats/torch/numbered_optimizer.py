"""The state dict of a torch optimizer, which numbers its parameters, with the parameters' names. Imports no torch.

``torch.optim.Optimizer.state_dict()`` (torch 2.13) returns ``{"state": {0: {"exp_avg": ..., "exp_avg_sq": ..., "step":
...}}, "param_groups": [{"lr": ..., "params": [0, 1]}]}``. The numbers count the parameters in the order in which the
optimizer got them, over all groups. Two orders are known: that of ``model.parameters()`` in one group, and two groups,
first the parameters with weight decay, as transformers' Trainer has them (5.23, ``Trainer.create_optimizer``).

torch stores names beside the numbers if the optimizer got ``named_parameters()``. Then these names are used. The shapes
are validated in any case, because moments of other parameters would damage the training without an error.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.safe_open import open_regular
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.convert.formats.torch.nested_state import without_wrappers
from automodel_ckpt.convert.formats.torch.torch_files import check_view, faults_of, tensor_of_view
from automodel_ckpt.convert.formats.torch.torch_objects import Archive, StoredView
from automodel_ckpt.convert.formats.torch.training_state import (
    ModelParameter,
    OptimizerState,
    ParameterGroup,
    Parameters,
)
from automodel_ckpt.errors import CheckpointUnusable

Shape = tuple[int, ...]
Key = int | str
"""The number or the name under which an optimizer stores the state of a parameter."""

IN_ORDER = "by number, in the order of model.parameters()"
BY_DECAY = "by number, first the parameters with weight decay"
_STEP = "step"
_NUMBERS = {
    "F64": "<d",
    "F32": "<f",
    "F16": "<e",
    "I64": "<q",
    "I32": "<i",
    "U8": "<B",
    "BOOL": "<?",
}
"""The dtypes in which optimizers store numbers, as formats of struct."""
_MAX_OPTIONS = 64
_MAX_NAMED = 3


def optimizer_state(
    state_dict: object,
    archive: Archive,
    parameters: Parameters,
    *,
    root: Path,
    file: str,
    rename: Callable[[str], str] | None = None,
) -> OptimizerState:
    """Return the state of an optimizer under the names of its parameters.

    *state_dict* is a value in *archive*, the description of the file ``root / file``: the optimizer's state dict.
    *parameters* returns the model's parameters; it is called once. *rename* converts names that the file states to
    those of the model; by default, the prefixes of DDP, torch.compile and FSDP are removed.

    Raises :class:`CheckpointUnusable` if the names cannot be determined.
    """
    path = root / file
    # Not in the block below, which reports any exception as damage of the file.
    model = parameters()
    with faults_of(path):
        reader = _Reader(archive, path, file)
        try:
            return _read(
                state_dict,
                reader,
                model,
                root,
                rename or without_wrappers,
            )
        finally:
            reader.close()


def _read(
    state_dict: object,
    reader: _Reader,
    model: Sequence[ModelParameter],
    root: Path,
    rename: Callable[[str], str],
) -> OptimizerState:
    entries, groups = _validated(state_dict, reader.path)
    keys = [_keys_of(group, reader.path) for group in groups]
    shapes = {}
    for key in chain.from_iterable(keys):
        shapes[key] = _shape(entries.get(key), key, reader.path)
    _check_keys(keys, entries, reader.path)
    names, names_from = _stated_names(groups, keys, rename), ""
    if names is None:
        names, names_from = _numbered_names(keys, model, reader.path)
    _check_names(names, shapes, model, reader.path)
    tensors: dict[str, dict[str, Tensor]] = {}
    values: dict[str, dict[str, int | float | bool]] = {}
    for key, entry in entries.items():
        name = names[key]
        tensors[name], values[name] = reader.entry(name, entry, shapes[key])
    named_groups: list[ParameterGroup] = []
    for group, group_keys in zip(groups, keys, strict=True):
        members = tuple(names[key] for key in group_keys)
        named_groups.append(ParameterGroup(members, reader.options(group)))
    return OptimizerState(root, tensors, values, tuple(named_groups), names_from)


# ---------------------------------------------------------------- the content of the state dict


def _validated(
    state_dict: object, path: Path
) -> tuple[dict[Key, dict[str, Any]], list[dict[str, Any]]]:
    """Return the entries and the groups of an optimizer's state dict. Raises :class:`CheckpointUnusable`."""
    if not isinstance(state_dict, dict):
        raise _unusable(
            "the state of the optimizer is not a mapping", path, type(state_dict).__name__
        )
    entries, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(entries, dict) or not isinstance(groups, list):
        keys = ", ".join(str(key)[:40] for key in list(state_dict)[:5])
        what = "the state of the optimizer has no mapping 'state' or no list 'param_groups'"
        raise _unusable(what, path, f"its keys: {keys or 'none'}")
    for key, entry in entries.items():
        if type(key) not in (int, str) or not isinstance(entry, dict):
            what = (
                "an entry in the state of the optimizer is not a mapping under a number or a name"
            )
            raise _unusable(what, path, f"{key!r:.100}: {type(entry).__name__}")
    for group in groups:
        if not isinstance(group, dict) or len(group) > _MAX_OPTIONS:
            raise _unusable(
                "a parameter group of the optimizer is damaged", path, type(group).__name__
            )
    return entries, groups


def _keys_of(group: Mapping[str, Any], path: Path) -> list[Key]:
    """Return the numbers or names of the parameters in a group."""
    keys = group.get("params")
    if not isinstance(keys, list):
        what = "a parameter group of the optimizer does not list its parameters"
        raise _unusable(what, path, type(keys).__name__)
    for key in keys:
        # Not isinstance: True is an int, too.
        if type(key) is not int and type(key) is not str:
            raise _unusable(
                "the optimizer lists a parameter with neither a number nor a name",
                path,
                repr(key)[:100],
            )
    return keys


def _check_keys(keys: Sequence[Sequence[Key]], entries: Mapping[Key, Any], path: Path) -> None:
    """Raise :class:`CheckpointUnusable` unless each parameter is in one group, and each entry has a parameter."""
    seen: set[Key] = set()
    for group in keys:
        for key in group:
            if key in seen:
                raise _unusable("the optimizer lists a parameter twice", path, repr(key)[:100])
            seen.add(key)
    for key in entries:
        if key not in seen:
            what = "the optimizer has state of a parameter that is in none of its groups"
            raise _unusable(what, path, repr(key)[:100])


def _shape(entry: Mapping[str, Any] | None, key: Key, path: Path) -> Shape | None:
    """Return the shape that the tensors of *entry* have in common; None for a parameter without state.

    Raises :class:`CheckpointUnusable` if they have several shapes, as those of Adafactor or of 8-bit optimizers.
    """
    shapes: set[Shape] = set()
    described: list[str] = []
    for name, value in (entry or {}).items():
        if isinstance(value, StoredView) and name != _STEP and value.shape:
            shapes.add(value.shape)
            described.append(f"{name} {list(value.shape)}")
    if len(shapes) > 1:
        raise CheckpointUnusable(
            "this optimizer stores tensors whose shapes are not those of the parameters, which is not supported",
            where=str(path),
            value=f"parameter {key}: {', '.join(described[:_MAX_OPTIONS])}",
            hint="Adam, AdamW, SGD and other optimizers with moments of the parameters' shapes can be transferred; "
            "import the weights without --training-state",
        )
    return shapes.pop() if shapes else None


# ---------------------------------------------------------------- names


def _stated_names(
    groups: Sequence[Mapping[str, Any]],
    keys: Sequence[Sequence[Key]],
    rename: Callable[[str], str],
) -> dict[Key, str] | None:
    """Return the names that the file itself states; None if it has only numbers."""
    names: dict[Key, str] = {}
    for group, group_keys in zip(groups, keys, strict=True):
        texts = group.get("param_names")
        if not isinstance(texts, list) or len(texts) != len(group_keys):
            texts = group_keys
        for key, text in zip(group_keys, texts, strict=True):
            if type(text) is not str:
                return None
            names[key] = rename(text)
    return names


def _numbered_names(
    keys: Sequence[Sequence[Key]],
    model: Sequence[ModelParameter],
    path: Path,
) -> tuple[dict[Key, str], str]:
    """Return the names of numbered parameters, and how they were found. Raises :class:`CheckpointUnusable`."""
    filled = [members for members in keys if members]
    expected, names_from = [[each.name for each in model]], IN_ORDER
    if len(filled) == 2:
        expected = [[each.name for each in model if each.decays == has] for has in (True, False)]
        names_from = BY_DECAY
    sizes = [len(members) for members in filled]
    if sizes != [len(names) for names in expected]:
        raise CheckpointUnusable(
            "the optimizer numbers its parameters, and they are not those of the model in a usual order",
            where=str(path),
            value=f"groups of {sizes} parameters; the model has {len(model)}",
            hint="use the config.json of the model that was trained. If parameters were frozen or in other groups: "
            "import the weights without --training-state",
        )
    found: dict[Key, str] = {}
    for members, names in zip(filled, expected, strict=True):
        found.update(zip(members, names, strict=True))
    return found, names_from


def _check_names(
    names: Mapping[Key, str],
    shapes: Mapping[Key, Shape | None],
    model: Sequence[ModelParameter],
    path: Path,
) -> None:
    """Raise :class:`CheckpointUnusable` if a name is not that of a parameter of this shape, or occurs twice."""
    known = {parameter.name: parameter.shape for parameter in model}
    seen: set[str] = set()
    for key, name in names.items():
        if name not in known:
            raise _unusable(
                "the optimizer trains a parameter that the model does not have", path, name[:200]
            )
        shape = shapes[key]
        if shape is not None and shape != known[name]:
            value = f"{name}: {list(shape)}, the parameter {list(known[name])}"
            raise _unusable(
                "the optimizer's state and its parameter have different shapes", path, value
            )
        if name in seen:
            raise _unusable("the optimizer has two states of one parameter", path, name[:200])
        seen.add(name)


# ---------------------------------------------------------------- values


class _Reader:
    """Reads the numbers in a file of ``torch.save``, and describes its tensors as slices of *file*."""

    def __init__(self, archive: Archive, path: Path, file: str) -> None:
        self.path = path
        self._archive, self._file = archive, file
        self._descriptor = open_regular(path)

    def close(self) -> None:
        os.close(self._descriptor)

    def entry(
        self, name: str, entry: Mapping[str, Any], shape: Shape | None
    ) -> tuple[dict[str, Tensor], dict[str, int | float | bool]]:
        """Return the tensors and the numbers of one parameter's state. Raises :class:`CheckpointUnusable`."""
        tensors: dict[str, Tensor] = {}
        values: dict[str, int | float | bool] = {}
        for key, value in entry.items():
            if type(key) is not str or not key.isprintable() or "." in key:
                raise _unusable(
                    "an entry in the optimizer's state has no usable name",
                    self.path,
                    repr(key)[:100],
                )
            if isinstance(value, StoredView):
                check_view(f"{name}.{key}", value, self._archive)
                if key == _STEP or (shape is not None and value.shape != shape):
                    values[key] = self._number(f"{name}.{key}", value)
                else:
                    tensors[key] = tensor_of_view(f"{name}.{key}", value, self._archive, self._file)
            elif type(value) in (int, float, bool):
                values[key] = value
            elif value is not None:
                what = "a value in the optimizer's state is neither a tensor nor a number"
                raise _unusable(what, self.path, f"{name[:200]}.{key}: {type(value).__name__}")
        return tensors, values

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plain options of a parameter group; a learning rate may be a tensor of one number."""
        options: dict[str, Any] = {}
        for key, value in group.items():
            if key in ("params", "param_names") or type(key) is not str:
                continue
            if isinstance(value, StoredView):
                check_view(key, value, self._archive)
                options[key] = self._number(key, value)
            elif _is_plain(value):
                options[key] = value
        return options

    def _number(self, name: str, view: StoredView) -> int | float | bool:
        """Read a tensor of one element."""
        num_elements = 1
        for extent in view.shape:
            num_elements *= extent
        layout = _NUMBERS.get(view.dtype)
        if num_elements != 1 or (layout is None and view.dtype != "BF16"):
            raise _unusable(
                "a number of the optimizer is stored in another form",
                self.path,
                f"{name[:200]}: {view.dtype} {list(view.shape)}",
            )
        begin, _ = self._archive.storages[view.key]
        itemsize = DTYPE_BITS[view.dtype] // 8
        data = os.pread(self._descriptor, itemsize, begin + view.offset * itemsize)
        if layout is None:
            # The 16 bits of a BF16 are the upper half of an F32.
            layout, data = "<f", b"\0\0" + data
        (number,) = struct.unpack(layout, data)
        return number  # type: ignore[no-any-return]


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= _MAX_OPTIONS and all(_is_plain(item) for item in value)
    return value is None or type(value) in (int, float, bool, str)


def _unusable(what: str, path: Path, value: object) -> CheckpointUnusable:
    return CheckpointUnusable(
        what,
        where=str(path),
        value=value,
        hint="take the file from another copy, or import the weights without --training-state",
    )
