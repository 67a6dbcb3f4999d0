"""Which attributes of a recipe are state, and how each is stored.

Anything with callable ``state_dict`` and ``load_state_dict`` is state; no name is special. The *kind* follows from the
type, the path from the attribute's name, so that nothing a user adds to a recipe is silently dropped. Also checks what
a program passes to :class:`~automodel_ckpt.checkpoint.checkpointer.Checkpointer`.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from automodel_ckpt.base.user_code import register_object
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import MAX_INTEGER
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.errors import Problem, RecipeError

Kind = Literal["module", "optimizer", "lr_scheduler", "object"]

_CLASSES: Mapping[Kind, type] = {
    "module": torch.nn.Module,
    "optimizer": Optimizer,
    "lr_scheduler": LRScheduler,
}
# File systems allow 255 bytes. Suffixes such as _global_rank_1023.pt need some of them.
_MAX_NAME_BYTES = 200
_RENAME = "rename one of them"
ADD_TO_STATE = "add it to the state (as an attribute of a recipe)"


@dataclass(frozen=True, slots=True)
class Item:
    """One stateful attribute: its *name* (``heads.0`` for an element of a list), *kind* and *scope*.

    *aliases* are other names of the same object. A LR scheduler shares the directory of the optimizer *owner*.
    """

    name: str
    value: Any
    kind: Kind
    scope: layout.Scope
    aliases: tuple[str, ...] = ()
    owner: str | None = None

    @property
    def path(self) -> str:
        """The path relative to the checkpoint where it is stored."""
        if self.kind != "object":
            return layout.state_directory(self.owner or self.name) + "/"
        if self.scope == "replicated":
            return layout.state_file(self.name)
        return f"{self.name}/"


def discover(recipe: object) -> ValueDict:
    """All state in the recipe's attributes, by name, including objects in lists, tuples and dicts.

    Names in the recipe's set ``untracked`` and modules without state are omitted. An object with several names is
    returned under each of them; :func:`classify` stores it once. Raises :class:`RecipeError` where two objects have
    the same name.
    """
    omitted = dict(left_out(recipe))
    found: ValueDict = {}
    for name, value in _stateful_objects(recipe):
        attribute = name.partition(".")[0]
        if name in omitted or attribute in omitted:
            continue
        if found.setdefault(name, value) is not value:
            raise RecipeError(
                "two objects with state have the same name (keys of a dict are compared as text)",
                where=f"attribute {name!r}",
                value=f"{type(found[name]).__name__} and {type(value).__name__}",
                hint=_RENAME,
            )
    return found


def left_out(recipe: object) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of each object with state that :func:`discover` omits."""
    untracked = set(getattr(recipe, "untracked", ()))
    attributes = dict(_attributes(recipe))
    for name in sorted(untracked & attributes.keys()):
        yield name, "it is untracked"
    for name, value in _stateful_objects(recipe):
        if name in untracked:
            if name not in attributes:
                yield name, "it is untracked"
        elif isinstance(value, torch.nn.Module) and _has_no_state(value):
            yield name, "it has no state"


def _has_no_state(module: torch.nn.Module) -> bool:
    # The parameters first: a state dict of a large sharded module takes long.
    return next(module.parameters(), None) is None and not module.state_dict()


def _stateful_objects(recipe: object) -> Iterator[tuple[str, object]]:
    """Every object with state in the recipe's attributes, with its name (``heads.0`` for an element)."""
    for name, value in _attributes(recipe):
        yield from _stateful_within(name, value, frozenset())


def _attributes(recipe: object) -> Iterator[tuple[str, object]]:
    """The attributes of the recipe, then the attributes of its classes that have state themselves."""
    # Not getattr(), which would run the code of properties.
    yield from vars(recipe).items()
    seen = set(vars(recipe))
    for base in type(recipe).__mro__:
        for name, value in vars(base).items():
            if name not in seen and is_stateful(value):
                yield name, value
            seen.add(name)


def _stateful_within(
    name: str, value: object, inside: frozenset[int]
) -> Iterator[tuple[str, object]]:
    """The objects with state in *value*; *inside* are the ids of the containers around it."""
    if is_stateful(value):
        yield name, value
    # A container may contain itself.
    elif isinstance(value, list | tuple | Mapping) and id(value) not in inside:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, element in items:
            name_of_element = f"{name}.{layout.escape_key(key)}"
            yield from _stateful_within(name_of_element, element, inside | {id(value)})


def is_stateful(value: object) -> bool:
    """Whether an object has a state that can be saved and restored."""
    # A class has the methods, but no state.
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def classify(state: Values) -> list[Item]:
    """The items to store, in the order given, each object once.

    Raises :class:`RecipeError` where two would have the same path, or a LR scheduler drives an optimizer that is not
    part of the state.
    """
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        # By identity: equal objects are separate state. *state* keeps them alive, so ids are
        # unique.
        names.setdefault(id(value), []).append(name)
    items = []
    for name, *aliases in names.values():
        items.append(_item(name, state[name], tuple(aliases)))
    owners = {id(item.value): item.name for item in items if item.kind == "optimizer"}
    for number, item in enumerate(items):
        if item.kind == "lr_scheduler":
            if (owner := owners.get(id(item.value.optimizer))) is None:
                raise RecipeError(
                    "a learning-rate scheduler, which is not `untracked`, drives an optimizer that is not saved",
                    where=f"attribute {item.name!r}",
                    value=type(item.value.optimizer).__name__,
                    hint=ADD_TO_STATE,
                )
            items[number] = replace(item, owner=owner)
    _check_places(items)
    return items


def _item(name: str, value: object, aliases: tuple[str, ...]) -> Item:
    for kind, of_kind in _CLASSES.items():
        if isinstance(value, of_kind):
            return Item(name, value, kind, "replicated", aliases)
    # An object with __getattr__ may return anything for this name.
    scope = getattr(value, "checkpoint_scope", None)
    if isinstance(value, torch.utils.data.DataLoader):
        scope = "dp_rank"
    elif not isinstance(scope, str) or scope not in get_args(layout.Scope):
        scope = "replicated"
    return Item(name, value, "object", cast(layout.Scope, scope), aliases)


def _check_places(items: Iterable[Item]) -> None:
    by_path: dict[str, Item] = {}
    problems = []
    for item in items:
        path = item.path.rstrip("/")
        is_free = "/" not in item.name and path not in layout.RESERVED
        if not is_free or layout.unsafe_path(path) or len(os.fsencode(path)) > _MAX_NAME_BYTES:
            what = "a name in the state cannot be used as a file name"
            hint = f"rename it, or add {item.name!r} to `untracked` of the recipe"
            problems.append(Problem(what, "recipe", repr(item.name), hint))
        other = by_path.setdefault(item.path, item)
        # A LR scheduler is stored in the directory of its optimizer.
        if other is item or item.kind == "lr_scheduler" or other.owner == item.name:
            continue
        what = f"two objects would be stored in the same place, {item.path}"
        where = f"attributes {other.name!r} and {item.name!r}"
        problems.append(Problem(what, where, f"{other.kind} and {item.kind}", _RENAME))
    if problems:
        raise RecipeError.all_of(problems)


_CLASS = "Checkpointer"
_SAVE = "Checkpointer.save"
_STATE_HINT = 'pass each object itself under its own name, not its state_dict(): {"model": model}'
_BY_NAME = (
    "pass the arguments by name: Checkpointer(directory, options=CheckpointOptions(keep_last=3), "
    'assets={"model": HFAssets.from_model(model, ...)})'
)


def _wrong(what: str, where: str, value: object, hint: str) -> RecipeError:
    return RecipeError(what, where=where, value=f"{value!r:.200}", hint=hint)


def path_text(directory: Any) -> str:
    """Return the *directory* of a run as text, with the home directory for ``~/``, as the commands read it.

    Raises :class:`RecipeError` for what is no path, and for an empty one: it would be the current directory.
    """
    text = os.fsdecode(directory) if isinstance(directory, str | bytes | os.PathLike) else ""
    if not text or "\0" in text or os.path.isfile(text):
        raise _wrong(
            "this is not the path of a directory",
            _CLASS,
            directory,
            "pass the directory of the run, which is created if it does not exist",
        )
    return os.path.expanduser(text) if text.startswith("~/") else text


def check_call(ranks: Any, options: Any, assets: Any) -> None:
    """Raise :class:`RecipeError` for arguments of other kinds, as they are if the names are left out."""
    values = [(ranks, "world_size"), (options, "model_save_format"), (assets, "values")]
    values += [(each, "nbytes") for each in getattr(assets, "values", tuple)()]
    for value, attribute in values:
        if value is not None and (isinstance(value, type) or not hasattr(value, attribute)):
            raise _wrong("this argument has another kind", _CLASS, value, _BY_NAME)


def check_state(state: object, where: str = _SAVE) -> None:
    """Raise :class:`RecipeError` unless *state* is a mapping from names to objects with state, and has any.

    Without an error, a checkpoint of nothing would be published. *where* is the method that got it. Exceptions in code
    of the objects are reported as theirs from then on.
    """
    if not isinstance(state, Mapping) or not state:
        raise _wrong("the state must be a mapping from names to objects", where, state, _STATE_HINT)
    for name, value in state.items():
        if not isinstance(name, str):
            raise _wrong("a name in the state is not text", where, name, _STATE_HINT)
        if not is_stateful(value):
            raise _wrong(
                "an object of the state has no state_dict() and load_state_dict()",
                f"{where}, {name!r}",
                type(value),
                _STATE_HINT,
            )
        register_object(value)


def count(name: str, value: Any) -> int:
    """Return *value*, the argument *name*, as a number from 0. Raises :class:`RecipeError` if it is none."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_INTEGER:
        raise _wrong(
            f"{name} must be a count",
            _SAVE,
            value,
            f"pass a whole number from 0 to {MAX_INTEGER}",
        )
    return number


def check_yaml(value: Any) -> None:
    """Raise :class:`RecipeError` unless *value*, the argument config_yaml, is text."""
    if not isinstance(value, str):
        raise _wrong(
            "config_yaml must be the text of a YAML file",
            _SAVE,
            value,
            "pass yaml.safe_dump(settings), or the file's read_text()",
        )


def plain_numbers(argument: str, numbers: Any) -> ValueDict:
    """Return *numbers* with tensors and NumPy numbers as numbers of Python; *argument* is their name in messages.

    Raises :class:`RecipeError` for a tensor of several elements, and for what JSON does not have.
    """
    where = f"{_SAVE}, {argument}"
    hint = "pass a mapping of numbers, such as the mean of a tensor"
    if not isinstance(numbers, Mapping):
        raise _wrong(f"{argument} must be a mapping of numbers", where, numbers, hint)
    plain = {}
    for name, value in numbers.items():
        try:
            plain[name] = value.item() if hasattr(value, "item") else value
            json.dumps(plain[name])
        except (RuntimeError, TypeError, ValueError) as error:
            raise _wrong(
                "this cannot be written as JSON", f"{where}[{name!r}]", value, hint
            ) from error
    return plain
