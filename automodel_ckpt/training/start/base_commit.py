"""The commits of what a recipe reads from the Hub: resolved once at the start of a run, recorded in its checkpoints.

A branch can get other files while a run is interrupted. A resumed run continues with the commits that it started with,
and all ranks of a run read the same ones.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from automodel_ckpt.base.hub_access import (
    MAIN,
    Kind,
    chain_of,
    check_access,
    go_offline,
    is_commit,
    is_hub_name,
    resolve_commit,
)
from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.run.fetched import own_name
from automodel_ckpt.config.callables.plugins import callable_of, signature_of
from automodel_ckpt.config.keys.model import InitFromConfig, ModelConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.config.tree.urls import with_local_directory
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.repository import require_local
from automodel_ckpt.parallel.ranks.agree import broadcast_object, raise_on_all_ranks

log = logging.getLogger("automodel_ckpt")


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
    model = config.model
    of_model: Sequence[Any] = ()
    if isinstance(model, ModelConfig):
        of_model = (model.from_pretrained, model.from_config)
        for key in ("from_pretrained", "from_config"):
            # The config can be written in the recipe, too.
            if isinstance(getattr(model, key), str):
                yield _named(model, key, ("model",))
    for key in ("tokenizer", "processor"):
        section: Any = getattr(config, key, None)
        name = getattr(section, "from_pretrained", None)
        # The model's own one follows model.revision.
        if name is not None and (section.revision is not None or name not in of_model):
            yield _named(section, "from_pretrained", (key,))
    teacher = getattr(getattr(config, "distill", None), "teacher", None)
    if getattr(teacher, "from_pretrained", None) is not None:
        yield _named(teacher, "from_pretrained", ("distill", "teacher"))
    for key in ("dpo", "kto"):
        section = getattr(config, key, None)
        if getattr(section, "reference", None) is not None:
            yield _named(section, "reference", (key,), "reference_revision")
    sources = config.init_from or []
    places: Iterable[tuple[Place, InitFromConfig]]
    if isinstance(sources, InitFromConfig):
        places = [(("init_from",), sources)]
    else:
        places = ((("init_from", number), source) for number, source in enumerate(sources))
    for place, source in places:
        if not is_url(source.path):
            yield replace(_named(source, "path", place), is_optional=True)
    yield from _plug_ins(config, ())


def with_revisions(config: C, revisions: Mapping[Place, str]) -> C:
    """Return *config* with other revisions at the places of :class:`HubName`."""
    for place, revision in revisions.items():
        config = _with(config, place, revision)
    return config


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


COMMIT, REVISION = "base_commit", "base_revision"
"""Notes in a manifest's ``environment``: NAME@COMMIT, and the revision that the recipe asked for."""
FURTHER = "hub_commits"
"""Note about other names: NAME@REVISION=COMMIT, with a comma between them; names of data sets follow datasets/."""
_DATA = "datasets/"
_MODEL_KEYS = ("model.from_pretrained", "model.from_config")

Recorded = Mapping[str, str]
"""NAME@REVISION -> commit, as :data:`FURTHER` has them."""


def pin_base(
    config: RecipeConfig,
    checkpointer: Checkpointer | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    recorded: Recorded | None = None,
) -> RecipeConfig:
    """Return *config* with the commits of all names of the Hub as their revisions, and check the access to them.

    They are those that the checkpoint to resume from records, if its recipe asked for the same revisions. Without a
    *checkpointer*, they are those in *recorded*. What is in a local directory has none.

    Collective: rank 0 makes the requests. Raises :class:`RecipeError` on all ranks if something cannot be read, and
    states what to do.
    """
    commits: dict[Place, str] = {}
    notes: dict[str, str] = {}
    is_offline = False
    with raise_on_all_ranks(group):
        if group is None or dist.get_rank(group) == 0:
            if checkpointer is not None:
                recorded = recorded_commits(checkpointer.transfers.expected())
            commits, notes = _commits(config, recorded)
            from huggingface_hub import constants

            is_offline = bool(constants.HF_HUB_OFFLINE)
    commits, notes, is_offline = broadcast_object(group, (commits, notes, is_offline))
    if is_offline:
        go_offline("the Hub cannot be reached")
    if checkpointer is not None:
        checkpointer.notes.update(notes)
    return with_revisions(config, commits)


def commits_of_run(config: RecipeConfig) -> Recorded | None:
    """Return the commits that a dry run expects the run to continue with; None in a new run.

    They are those of the checkpoint to resume from, if it is on this machine.
    """
    section = with_local_directory(config).checkpoint
    if not section.enabled:
        return None
    root = Path(section.checkpoint_dir).absolute()
    memory = None
    if section.memory is not None:
        from automodel_ckpt.checkpoint.memory.directory import memory_of

        memory = memory_of(root, Path(section.memory.directory))
    restore_from = own_name(section.restore_from, section.remote)
    return recorded_commits(resume.expected(root, restore_from, memory))


def recorded_commits(summary: Summary | None) -> Recorded | None:
    """Return the commits that a checkpoint to resume from records; None without one."""
    if summary is None:
        return None
    environment = summary.environment
    recorded = {}
    for entry in str(environment.get(FURTHER, "")).split(", "):
        name, _, commit = entry.partition("=")
        recorded[name] = commit
    base, _, commit = str(environment.get(COMMIT, "")).partition("@")
    recorded[f"{base}@{environment.get(REVISION)}"] = commit
    return {name: commit for name, commit in recorded.items() if is_commit(commit)}


def _commits(
    config: RecipeConfig, recorded: Recorded | None
) -> tuple[dict[Place, str], dict[str, str]]:
    """Determine the commits of all names, by the places of their revisions, and the notes about them."""
    commits: dict[Place, str] = {}
    notes: dict[str, str] = {}
    further: dict[str, str] = {}
    for name in hub_names(config):
        if not is_repository(name.name):
            continue
        if name.kind == "model":
            # A path that does not exist is an error.
            require_local(name.name, name.where)
        asked = _asked(name)
        commit = further.get(asked) or _commit_of(name, recorded)
        if commit is None:
            continue
        commits[name.place] = commit
        is_base = name.where in _MODEL_KEYS
        if is_base:
            notes |= {COMMIT: f"{name.name}@{commit}", REVISION: name.revision or MAIN}
        if asked not in further:
            origin = " (recorded in the checkpoint)" if recorded and asked in recorded else ""
            label = "base model" if is_base else name.where
            log.info("%s: %s at commit %s%s", label, name.name, commit[:12], origin)
        further[asked] = commit
    if further:
        notes[FURTHER] = ", ".join(f"{asked}={commit}" for asked, commit in further.items())
    return commits, notes


def _asked(name: HubName) -> str:
    """The name and the revision that the recipe asks for, as :data:`FURTHER` has them."""
    owner = _DATA if name.kind == "dataset" else ""
    return f"{owner}{name.name}@{name.revision or MAIN}"


def _commit_of(name: HubName, recorded: Recorded | None) -> str | None:
    """Return the commit of a repository; None if it is unknown."""
    commit = None if recorded is None else recorded.get(_asked(name))
    if commit is not None and name.is_optional:
        # This start does not read it, and must not fail if it is gone.
        return commit
    try:
        if name.kind == "model":
            return resolve_commit(name.name, commit or name.revision, where=name.where)
        found = check_access(name.name, commit or name.revision, kind="dataset", where=name.where)
    except RecipeError as error:
        if commit is None or not _is_unknown_revision(error):
            raise
        raise _no_longer_there(name, commit) from error
    # Checkpoints of earlier versions record no data sets. A commit would look like other data to their loaders.
    is_new = recorded is None or commit is not None
    return commit or found if is_new else None


def _is_unknown_revision(error: BaseException) -> bool:
    from huggingface_hub.errors import RevisionNotFoundError

    return any(isinstance(each, RevisionNotFoundError) for each in chain_of(error))


def _no_longer_there(name: HubName, commit: str) -> RecipeError:
    revision = ".".join(str(part) for part in name.place if part != "kwargs")
    return RecipeError(
        "the Hub no longer has the commit that the checkpoint records",
        where=name.where,
        value=f"{name.name}@{commit}",
        hint=f"to continue with other files, set {revision} to a commit that is there",
    )
