"""What a recipe reads from the Hugging Face Hub by a name, and the same recipe with other revisions of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from automodel_ckpt.base.hub_access import Kind, is_hub_name
from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.config.callables.plugins import callable_of
from automodel_ckpt.config.callables.signatures import signature_of
from automodel_ckpt.config.keys.init_from import InitFromConfig
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.rows.source import Source

C = TypeVar("C")

Place = tuple[str | int, ...]
"""The keys and list indices that lead to a value of a recipe."""
_OWN_DATA = "automodel_ckpt.data."
_FROM_PRETRAINED = ("transformers.", ".from_pretrained")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository that a recipe names at the key *where*, and the *place* of its revision in the recipe.

    *is_optional*: a run that continues from a checkpoint does not read it.
    """

    name: str
    revision: str | None
    where: str
    place: Place
    kind: Kind = "model"
    is_optional: bool = False


def hub_names(config: Any) -> Iterator[HubName]:
    """Yield the names in a recipe that may be those of repositories, the model first. Paths and URLs are among them."""
    yield from _model(config)
    yield from _preprocessors(config)
    teacher = getattr(getattr(config, "distill", None), "teacher", None)
    if getattr(teacher, "from_pretrained", None) is not None:
        yield _named(teacher, "from_pretrained", ("distill", "teacher"))
    for key in ("dpo", "kto"):
        section = getattr(config, key, None)
        if getattr(section, "reference", None) is not None:
            yield _named(section, "reference", (key,), "reference_revision")
    for place, source in _sources_of_weights(config):
        if not is_url(source.path):
            yield replace(_named(source, "path", place), is_optional=True)
    yield from _plug_ins(config, ())


def with_revisions(config: C, revisions: Mapping[Place, str]) -> C:
    """Return *config* with other revisions at the places of :class:`HubName`."""
    for place, revision in revisions.items():
        config = _with(config, place, revision)
    return config


def _model(config: Any) -> Iterator[HubName]:
    section = config.model
    if not isinstance(section, ModelConfig):
        return
    for key in ("from_pretrained", "from_config"):
        # The config can be written in the recipe, too.
        if isinstance(getattr(section, key), str):
            yield _named(section, key, ("model",))


def _preprocessors(config: Any) -> Iterator[HubName]:
    model = config.model
    of_model: Sequence[Any] = ()
    if isinstance(model, ModelConfig):
        of_model = (model.from_pretrained, model.from_config)
    for key in ("tokenizer", "processor"):
        section = getattr(config, key, None)
        name = getattr(section, "from_pretrained", None)
        if section is None or name is None:
            continue
        # The model's own one follows model.revision.
        if section.revision is not None or name not in of_model:
            yield _named(section, "from_pretrained", (key,))


def _sources_of_weights(config: Any) -> Iterator[tuple[Place, InitFromConfig]]:
    sources = config.init_from or []
    if isinstance(sources, InitFromConfig):
        yield ("init_from",), sources
        return
    for number, source in enumerate(sources):
        yield ("init_from", number), source


def _plug_ins(value: Any, place: Place) -> Iterator[HubName]:
    """Yield the names in the arguments of ``_target_`` sections, at any depth."""
    if isinstance(value, Target):
        yield from _of_target(value, place)
        place = (*place, "kwargs")
        value = value.kwargs
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    for key, item in items:
        yield from _plug_ins(item, (*place, key))


def _of_target(target: Target, place: Place) -> Iterator[HubName]:
    function, given = target._target_, target.kwargs
    start, end = _FROM_PRETRAINED
    kind: Kind = "dataset"
    if function.startswith(start) and function.endswith(end):
        key, kind = "pretrained_model_name_or_path", "model"
    elif function == "datasets.load_dataset":
        # Names without an owner, such as json, are readers of files.
        key = "path" if "/" in str(given.get("path")) else ""
    elif function.startswith(_OWN_DATA):
        key = "path" if signature_of(callable_of(target)).accepts("revision") else ""
    else:
        return
    name, revision = given.get(key), given.get("revision")
    is_name = isinstance(name, str) and isinstance(revision, str | None) and not is_url(name)
    if is_name and kind == "dataset":
        # A missing train.jsonl is a mistake in a path.
        is_name = not Source.of(str(name)).is_file
    if is_name and is_repository(str(name)):
        where = ".".join(str(part) for part in (*place, key) if part != "kwargs")
        yield HubName(str(name), revision, where, (*place, "kwargs", "revision"), kind)


def _named(section: Any, key: str, place: Place, revision: str = "revision") -> HubName:
    where = ".".join(map(str, (*place, key)))
    return HubName(getattr(section, key), getattr(section, revision), where, (*place, revision))


def is_repository(name: str) -> bool:
    """Whether *name* can be that of a repository, and is not a path in a local directory."""
    is_in_local_directory = "/" in name and Path(name).expanduser().parent.is_dir()
    return is_hub_name(name) and not is_in_local_directory


def _with(value: Any, place: Place, revision: str) -> Any:
    if not place:
        return revision
    key, *rest = place
    if isinstance(value, dict):
        return {**value, key: _with(value.get(key), tuple(rest), revision)}
    if isinstance(value, list | tuple):
        assert isinstance(key, int)
        items = list(value)
        items[key] = _with(items[key], tuple(rest), revision)
        return type(value)(items)
    changed: Any = {str(key): _with(getattr(value, str(key)), tuple(rest), revision)}
    return replace(value, **changed)
