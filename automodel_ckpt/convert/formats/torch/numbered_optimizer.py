"""The state dict of a torch optimizer under the names of its parameters, which it may number. Imports no torch.

``torch.optim.Optimizer.state_dict()`` (torch 2.13) returns ``{"state": {0: {"exp_avg": ..., "exp_avg_sq": ..., "step":
...}}, "param_groups": [{"lr": ..., "params": [0, 1]}]}``. The numbers count the parameters in the order in which the
optimizer got them, over all groups. Two orders are known: one group in the order of ``model.parameters()``, and two
groups, first the parameters with weight decay, as transformers' Trainer has them (5.23, ``Trainer.create_optimizer``).

torch stores names with the numbers if the optimizer got ``named_parameters()``. Then these names are used. The shapes
are validated in any case, because moments of other parameters would damage the training without an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files.type_aliases import Shape, Values
from automodel_ckpt.checkpoint.parts.slices import Tensor, TensorDict
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.convert.formats.files import faults_of
from automodel_ckpt.convert.formats.format import (
    ModelParameter,
    OptimizerState,
    ParameterGroup,
    Parameters,
)
from automodel_ckpt.convert.formats.nested_state import without_wrappers
from automodel_ckpt.convert.formats.torch.torch_files import (
    is_text_name,
    tensor_of_view,
)
from automodel_ckpt.convert.formats.torch.torch_objects import Archive, StoredView, plain_values
from automodel_ckpt.errors import unusable

Key = int | str
"""The number or the name under which an optimizer stores the state of a parameter."""
Number = int | float | bool

IN_ORDER = "by number, in the order of model.parameters()"
BY_DECAY = "by number, first the parameters with weight decay"
_STEP = "step"
# The dtypes in which optimizers store numbers as tensors.
_NUMBERS = ("F64", "F32", "F16", "I64", "I32", "U8", "BOOL")
WITHOUT_STATE = "import the weights without --training-state"


def optimizer_state(
    state_dict: Any,
    archive: Archive,
    parameters: Parameters,
    *,
    root: Path,
    file: str,
    rename: Callable[[str], str] = without_wrappers,
) -> OptimizerState:
    """Return the state of an optimizer under the names of its parameters.

    *state_dict* is a value in *archive*, the description of the file ``root / file``: the optimizer's state dict.
    *parameters* returns the model's parameters, and is called once. *rename* converts names that the file states to
    the model's names. By default, the prefixes of DDP, torch.compile and FSDP are removed.

    Raises :class:`CheckpointUnusable` if the names cannot be determined.
    """
    # Not in the block below, which reports any exception as damage of the file.
    model = parameters()

    def described(value: Any, name: str) -> Any:
        is_view = isinstance(value, StoredView)
        return tensor_of_view(name, value, archive, file) if is_view else value

    with damaged_optimizer(root / file):
        groups = [
            {option: described(value, str(option)) for option, value in group.items()}
            for group in state_dict["param_groups"]
        ]
        names, names_from = _names(groups, model, root / file, rename)
        entries = {
            key: {what: described(value, f"{names[key]}.{what}") for what, value in entry.items()}
            for key, entry in state_dict["state"].items()
        }
        shapes = {parameter.name: parameter.shape for parameter in model}
        return named_state(
            entries, groups, names, shapes, root=root, where=root / file, names_from=names_from
        )


def damaged_optimizer(path: Path) -> Any:
    """Report any exception in the block as damage of the optimizer's state in *path*."""
    hint = f"{WITHOUT_STATE}, or take the files from another copy"
    return faults_of(path, "the optimizer's state cannot be read", hint)


def named_state(
    entries: Mapping[Key, Values],
    groups: Sequence[Values],
    names: Mapping[Key, str],
    shapes: Mapping[str, Shape],
    *,
    root: Path,
    where: Path,
    names_from: str = "",
) -> OptimizerState:
    """Return the state of an optimizer. Its values are numbers, or tensors in files below *root*. *where* is the file.

    *entries* has the state of parameters, and *groups* the ``param_groups``, both with keys that *names* maps to names
    of the model's parameters, which have the *shapes*. Raises :class:`CheckpointUnusable` for state of other shapes,
    and :class:`Fault`, or any other exception, for damaged state.
    """
    if not len(set(names.values())) == len(names) == sum(len(group["params"]) for group in groups):
        raise Fault("a parameter is in its groups twice")
    tensors: dict[str, TensorDict] = {}
    values: dict[str, dict[str, Number]] = {}
    for key, entry in entries.items():
        # A key that is in no group is a KeyError.
        name = names[key]
        if name not in shapes:
            raise Fault(f"it has state of a parameter that the model does not have: {name[:200]}")
        tensors[name], values[name] = {}, {}
        for what, value in entry.items():
            if not is_text_name(what) or "." in what:
                raise Fault(f"an entry has no usable name: {what!r:.100}")
            if isinstance(value, Tensor) and what != _STEP and value.shape == shapes[name]:
                tensors[name][what] = value.renamed(f"{name}.{what}")
            elif isinstance(value, Tensor) and value.shape:
                raise unusable(
                    "the state of this optimizer does not have the shapes of the parameters, which is not supported",
                    where,
                    f"{name}: {what} {list(value.shape)}, the parameter {list(shapes[name])}",
                    f"use the config.json of the model that was trained; or {WITHOUT_STATE}",
                )
            elif value is not None:
                values[name][what] = number_of(value, root)
    found = []
    for group in groups:
        options = {
            option: number_of(value, root) if isinstance(value, Tensor) else value
            for option, value in group.items()
            if option not in ("params", "param_names")
        }
        members = tuple(names[key] for key in group["params"])
        found.append(ParameterGroup(members, plain_values(options)))
    return OptimizerState(root, tensors, values, tuple(found), names_from)


def number_of(value: Any, root: Path) -> Number:
    """Return a number, which may be a tensor of one element."""
    if isinstance(value, Tensor):
        if value.dtype not in _NUMBERS or math.prod(value.shape) != 1:
            raise Fault(f"{value.fqn[:200]} is no number: {value.dtype} {list(value.shape)}")
        # Imported here: opening a model must not import numpy.
        from automodel_ckpt.checkpoint.tensors.box_reader import whole

        value = whole(root, value).item()
    if type(value) not in (int, float, bool):
        raise Fault(f"a value is neither a tensor nor a number: {type(value).__name__}")
    return value  # type: ignore[no-any-return]


def _names(
    groups: Sequence[Values],
    model: Sequence[ModelParameter],
    path: Path,
    rename: Callable[[str], str],
) -> tuple[dict[Key, str], str]:
    """Return the names of parameters by key, and how they were found in words. Empty if the file states them."""
    flat = [key for group in groups for key in group["params"]]
    stated = [name for group in groups for name in group.get("param_names") or group["params"]]
    # Not isinstance: True is an int, too.
    if not all(type(key) in (int, str) for key in flat):
        raise Fault("it lists a parameter with neither a number nor a name")
    if all(type(name) is str for name in stated):
        return dict(zip(flat, map(rename, stated), strict=True)), ""
    sizes = [len(group["params"]) for group in groups if group["params"]]
    expected, names_from = [[each.name for each in model]], IN_ORDER
    if len(sizes) == 2:
        expected = [[each.name for each in model if each.decays == has] for has in (True, False)]
        names_from = BY_DECAY
    if sizes != [len(names) for names in expected]:
        raise unusable(
            "the optimizer numbers its parameters, and they are not the model's in a usual order",
            path,
            f"groups of {sizes} parameters; the model has {len(model)}",
            "use the config.json of the model that was trained. If parameters were frozen or in other groups: "
            f"{WITHOUT_STATE}",
        )
    return dict(zip(flat, chain.from_iterable(expected), strict=True)), names_from
