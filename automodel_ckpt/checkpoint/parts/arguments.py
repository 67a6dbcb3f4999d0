"""Checks of what a program passes to :class:`~automodel_ckpt.checkpoint.checkpointer.Checkpointer`."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping
from typing import Any

from automodel_ckpt.base.user_code import register_object
from automodel_ckpt.checkpoint.files.json_values import MAX_INTEGER
from automodel_ckpt.checkpoint.parts.discovery import is_stateful
from automodel_ckpt.errors import RecipeError

_CLASS = "Checkpointer"
_SAVE = "Checkpointer.save"
_EXAMPLE = 'pass {"model": model, "optimizer": optimizer}'
_ITSELF = 'pass the object itself, not its state_dict(): {"model": model}'


def path_text(directory: Any) -> str:
    """Return the *directory* of a run as text, with the home directory for ``~/``, as the commands read it.

    Raises :class:`RecipeError` for what is no path, and for an empty one: it would be the current directory.
    """
    try:
        text = os.fsdecode(directory)
    except TypeError:
        text = ""
    reason = "it is a file" if text and "\0" not in text and os.path.isfile(text) else ""
    if not text or "\0" in text:
        reason = "a path is a text that is not empty and has no null characters, or a pathlib.Path"
    if reason:
        raise RecipeError(
            "this is not the path of a directory",
            where=_CLASS,
            value=f"{directory!r:.200}: {reason}",
            hint="pass the directory of the run, which is created if it does not exist",
        )
    return os.path.expanduser(text) if text.startswith("~/") else text


def check_call(ranks: Any, options: Any, assets: Any) -> None:
    """Raise :class:`RecipeError` for arguments of other kinds, as they are if the names are left out."""
    if isinstance(options, type) or not hasattr(options, "model_save_format"):
        what, name, value = "the options are not CheckpointOptions", "options", options
        hint = "pass options=CheckpointOptions(keep_last=3), for example"
    elif ranks is not None and not hasattr(ranks, "world_size"):
        what = "the second argument is the position of this process among the ranks"
        name, value = "ranks", ranks
        hint = "pass options by name: Checkpointer(directory, options=CheckpointOptions(...))"
    elif assets is None or (
        isinstance(assets, Mapping) and all(hasattr(each, "nbytes") for each in assets.values())
    ):
        return
    else:
        what = "the assets must be a mapping from names in the state to HFAssets"
        name, value = "assets", assets
        hint = 'pass assets={"model": HFAssets.from_model(model, ...)}'
    raise RecipeError(what, where=f"{_CLASS}, {name}", value=f"{value!r:.200}", hint=hint)


def check_state(state: object, where: str = _SAVE) -> None:
    """Raise :class:`RecipeError` unless *state* is a mapping from names to objects with state, and has any.

    Without an error, a checkpoint of nothing would be published. *where* is the method that got it. Exceptions in code
    of the objects are reported as theirs from then on.
    """
    if not isinstance(state, Mapping) or not state:
        raise RecipeError(
            "the state must be a mapping from names to objects",
            where=where,
            value=f"an empty {type(state).__name__}" if not state else type(state).__name__,
            hint=_EXAMPLE,
        )
    if all(hasattr(value, "nbytes") for value in state.values()):
        names = ", ".join(map(str, state))
        raise RecipeError(
            "the state consists of tensors", where=where, value=f"{names:.200}", hint=_ITSELF
        )
    for name, value in state.items():
        if not isinstance(name, str):
            raise RecipeError(
                "a name in the state is not text",
                where=where,
                value=f"{name!r:.200}",
                hint=_EXAMPLE,
            )
        if not is_stateful(value):
            raise RecipeError(
                "an object of the state has no state_dict() and load_state_dict()",
                where=f"{where}, {name!r}",
                value=type(value).__name__,
                hint=_hint(name, value),
            )
        register_object(value)


def _hint(name: str, value: object) -> str:
    parts = dict(enumerate(value)) if isinstance(value, list | tuple) else value
    if isinstance(parts, Mapping):
        for key, part in parts.items():
            if is_stateful(part):
                return f"pass each object under a name, such as {f'{name}.{key}'!r}"
    if isinstance(value, Mapping):
        return _ITSELF
    return "leave it out, or give it these methods; progress= takes plain numbers"


def count(name: str, value: Any) -> int:
    """Return *value*, the argument *name*, as a number from 0. Raises :class:`RecipeError` if it is none."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_INTEGER:
        raise RecipeError(
            f"{name} must be a count",
            where=_SAVE,
            value=f"{value!r:.100}",
            hint=f"pass a whole number from 0 to {MAX_INTEGER}",
        )
    return number


def yaml_text(value: Any) -> str:
    """Return *value*, the text of config.yaml. Raises :class:`RecipeError` if it is no text."""
    if not isinstance(value, str):
        raise RecipeError(
            "config_yaml must be the text of a YAML file",
            where=f"{_SAVE}, config_yaml",
            value=f"{value!r:.200}",
            hint="pass yaml.safe_dump(settings), or the file's read_text()",
        )
    return value


def plain_numbers(argument: str, numbers: Any) -> dict[str, Any]:
    """Return *numbers* with tensors and NumPy numbers as numbers of Python; *argument* is their name in messages.

    Raises :class:`RecipeError` for a tensor of several elements, and for what JSON does not have.
    """
    if not isinstance(numbers, Mapping):
        raise RecipeError(
            f"{argument} must be a mapping from names to numbers",
            where=f"{_SAVE}, {argument}",
            value=f"{numbers!r:.200}",
            hint=f'pass {argument}={{"val_loss": 0.5}}',
        )
    plain: dict[str, Any] = {}
    for name, value in numbers.items():
        try:
            item = getattr(value, "item", None)
            plain[name] = item() if callable(item) else value
            json.dumps(plain[name])
        except (RuntimeError, TypeError, ValueError) as error:
            shape = getattr(value, "shape", None)
            text = f"{value!r:.200}" if shape is None else f"an array of shape {list(shape)}"
            raise RecipeError(
                "this cannot be written as JSON",
                where=f"{_SAVE}, {argument}[{name!r}]",
                value=text,
                hint="pass a number, such as the mean of a tensor",
            ) from error
    return plain
