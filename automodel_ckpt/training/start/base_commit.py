"""The commits of what a recipe reads from the Hub: resolved once at the start of a run, recorded in its checkpoints.

A branch can get other files while a run is interrupted. A resumed run continues with the commits that it started with,
and all ranks of a run read the same ones.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from automodel_ckpt.checkpoint.files.type_aliases import TextDict, Texts, ValueDict
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.run.links import own_name
from automodel_ckpt.config.callables.plugins import callable_of, signature_of
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.config.tree.urls import with_local_directory
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.repository import require_local
from automodel_ckpt.parallel.ranks.agree import broadcast_object, raise_on_all_ranks

log = logging.getLogger("automodel_ckpt")


_OWN_DATA = "automodel_ckpt.data."
_FROM_PRETRAINED = ("transformers.", ".from_pretrained")


@dataclass(frozen=True)
class HubName:
    """A repository that a recipe names at the key *where*. Among the *values* of a section, *revision_key* is its
    revision.

    *is_optional*: a run that continues from a checkpoint does not read it.
    """

    name: str
    where: str
    values: ValueDict
    revision_key: str = "revision"
    kind: Kind = "model"
    is_optional: bool = False

    @property
    def revision(self) -> str | None:
        """The branch, tag or commit that the recipe asks for."""
        return self.values.get(self.revision_key)

    @property
    def asked(self) -> str:
        """The name and the revision that the recipe asks for, as :data:`FURTHER` has them."""
        owner = _DATA if self.kind == "dataset" else ""
        return f"{owner}{self.name}@{self.revision or MAIN}"


_NAMES = {
    "from_pretrained": "revision",
    "from_config": "revision",
    "path": "revision",
    "reference": "reference_revision",
}
"""The keys of sections that name a repository, and the keys of its revision."""


def hub_names(config: Any) -> Iterator[HubName]:
    """Yield the names in a recipe that may name repositories, the model first. Paths are among them."""
    names = sorted(_names_in(config, ""), key=lambda name: not name.where.startswith("model."))
    of_model = [name.name for name in names if name.where in _MODEL_KEYS]
    for name in names:
        is_preprocessor = name.where.startswith(("tokenizer.", "processor."))
        # The model's own one follows model.revision.
        if not is_preprocessor or name.revision is not None or name.name not in of_model:
            yield name


def _names_in(value: Any, where: str) -> Iterator[HubName]:
    """Yield the names in a section and in the arguments of ``_target_`` sections, at any depth."""
    items: Any = ()
    if isinstance(value, Target):
        yield from _of_target(value, where)
        items = value.kwargs.items()
    elif isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value):
        fields = vars(value)
        items = fields.items()
        for key, revision_key in _NAMES.items():
            name = fields.get(key)
            # A config can be written in the recipe, too.
            if isinstance(name, str) and revision_key in fields and not is_url(name):
                is_optional = where.startswith("init_from")
                yield HubName(name, f"{where}{key}", fields, revision_key, is_optional=is_optional)
    for key, item in items:
        yield from _names_in(item, f"{where}{key}.")


def _of_target(target: Target, where: str) -> Iterator[HubName]:
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
        yield HubName(str(name), f"{where}{key}", given, kind=kind)


def is_repository(name: str) -> bool:
    """Whether *name* can be the name of a repository, and is not a path in a local directory."""
    is_in_local_directory = "/" in name and Path(name).expanduser().parent.is_dir()
    return is_hub_name(name) and not is_in_local_directory


COMMIT, REVISION = "base_commit", "base_revision"
"""Notes in a manifest's ``environment``: NAME@COMMIT, and the revision that the recipe asked for."""
FURTHER = "hub_commits"
"""Note about other names: NAME@REVISION=COMMIT, with a comma between them. Names of data sets follow datasets/."""
_DATA = "datasets/"
_MODEL_KEYS = ("model.from_pretrained", "model.from_config")

Recorded = Texts
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
    config = copy.deepcopy(config)
    commits: TextDict = {}
    notes: TextDict = {}
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
    for name in [name for name in hub_names(config) if name.where in commits]:
        name.values[name.revision_key] = commits[name.where]
    return config


def commits_of_run(config: RecipeConfig) -> Recorded | None:
    """Return the commits that a dry run expects the run to continue with. Returns None in a new run.

    They are recorded in the checkpoint to resume from, if it is on this machine.
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
    """Return the commits that a checkpoint to resume from records. Returns None without one."""
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


def _commits(config: RecipeConfig, recorded: Recorded | None) -> tuple[TextDict, TextDict]:
    """Determine the commits of all names, by their keys in the recipe, and the notes about them."""
    commits: TextDict = {}
    notes: TextDict = {}
    further: TextDict = {}
    for name in hub_names(config):
        if not is_repository(name.name):
            continue
        if name.kind == "model":
            # A path that does not exist is an error.
            require_local(name.name, name.where)
        asked = name.asked
        commit = further.get(asked) or _commit_of(name, recorded)
        if commit is None:
            continue
        commits[name.where] = commit
        is_base = name.where in _MODEL_KEYS
        if is_base:
            notes |= {COMMIT: f"{name.name}@{commit}", REVISION: name.revision or MAIN}
        if asked not in further:
            origin = " (recorded in the checkpoint)" if recorded and asked in recorded else ""
            label = "base model" if is_base else name.where
            log.debug("%s: %s at commit %s%s", label, name.name, commit[:12], origin)
        further[asked] = commit
    if further:
        notes[FURTHER] = ", ".join(f"{asked}={commit}" for asked, commit in further.items())
    return commits, notes


def _commit_of(name: HubName, recorded: Recorded | None) -> str | None:
    """Return the commit of a repository. Returns None when it is unknown."""
    commit = None if recorded is None else recorded.get(name.asked)
    if commit is not None and name.is_optional:
        # This start does not read it, and must not fail if it is gone.
        return commit
    try:
        if name.kind == "model":
            return resolve_commit(name.name, commit or name.revision, where=name.where)
        found = check_access(name.name, commit or name.revision, where=name.where)
    except RecipeError as error:
        from huggingface_hub.errors import RevisionNotFoundError

        is_gone = any(isinstance(each, RevisionNotFoundError) for each in chain_of(error))
        if commit is None or not is_gone:
            raise
        section, _, _ = name.where.rpartition(".")
        raise RecipeError(
            "the Hub no longer has the commit that the checkpoint records",
            where=name.where,
            value=f"{name.name}@{commit}",
            hint=f"to continue with other files, set {section}.{name.revision_key} to a commit that is there",
        ) from error
    return commit or found
