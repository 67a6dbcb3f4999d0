"""The commit of the base model on the Hub: resolved once at the start of a run, and recorded in its checkpoints.

A branch can get other weights while a run is interrupted. A resumed run continues with the commit that it started with,
and all ranks of a run read the same one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.checkpoint.manifest import Summary
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.config.schema import InitFromConfig, ModelConfig, RecipeConfig
from automodel_ckpt.distributed.agree import broadcast_object, raise_on_all_ranks
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.hub_access import go_offline, is_hub_name, resolve_commit
from automodel_ckpt.models.build import require_local

log = logging.getLogger("automodel_ckpt")

COMMIT, REVISION = "base_commit", "base_revision"
"""Notes in a manifest's ``environment``: NAME@COMMIT, and the revision that the recipe asked for."""
_MAIN = "main"


def pin_base(
    config: RecipeConfig,
    checkpointer: Checkpointer | None = None,
    group: dist.ProcessGroup | None = None,
) -> RecipeConfig:
    """Return *config* with the commit of the base model as ``model.revision``, and check the access to other names.

    It is the commit that the checkpoint to resume from names, if its recipe asked for the same revision of the same
    model. A base in a local directory has none. Collective: rank 0 makes the requests. Raises :class:`RecipeError` on
    all ranks if a model of the Hub cannot be read, and states what to do.
    """
    section = config.model
    commit: str | None = None
    is_offline = False
    with raise_on_all_ranks(group):
        if group is None or dist.get_rank(group) == 0:
            commit = _base_commit(section, checkpointer)
            for name, revision, where in _further_names(config):
                if _is_on_hub(name, where):
                    resolve_commit(name, revision, where=where)
            is_offline = _is_offline()
    commit, is_offline = broadcast_object(group, (commit, is_offline))
    if is_offline:
        go_offline("the Hub cannot be reached")
    if commit is None or not isinstance(section, ModelConfig):
        return config
    if checkpointer is not None:
        checkpointer.notes[COMMIT] = f"{_name_in(section)}@{commit}"
        checkpointer.notes[REVISION] = section.revision or _MAIN
    return replace(config, model=replace(section, revision=commit))


def _base_commit(section: object, checkpointer: Checkpointer | None) -> str | None:
    if not isinstance(section, ModelConfig):
        return None
    name = _name_in(section)
    where = "model.from_pretrained" if section.from_pretrained is not None else "model.from_config"
    if name is None or not _is_on_hub(name, where):
        return None
    recorded = recorded_commit(checkpointer, name, section.revision)
    commit = resolve_commit(name, recorded or section.revision, where=where)
    if commit is not None:
        origin = " (recorded in the checkpoint)" if recorded else ""
        log.info("base model: %s at commit %s%s", name, commit[:12], origin)
    return commit


def recorded_commit(
    checkpointer: Checkpointer | None, name: str, revision: str | None
) -> str | None:
    """Return the commit of the model *name* with which the newest checkpoint, on disk or in memory, was trained.

    None if there is no checkpoint, or if it was trained with another model, or with another *revision* of it.
    """
    if checkpointer is None:
        return None
    root = checkpointer.directory.absolute()
    for path in resume.candidates(root, None, checkpointer.memory_directory).candidates:
        # The resume reports a damaged one, and uses an older one.
        with contextlib.suppress(CheckpointUnusable):
            return _commit_in(Summary.read(path).environment, name, revision)
    return None


def _commit_in(environment: Mapping[str, object], name: str, revision: str | None) -> str | None:
    recorded_name, _, commit = str(environment.get(COMMIT, "")).partition("@")
    is_same = recorded_name == name and environment.get(REVISION) == (revision or _MAIN)
    return commit if is_same and commit else None


def _name_in(section: ModelConfig) -> str | None:
    if section.from_pretrained is not None:
        return section.from_pretrained
    return section.from_config if isinstance(section.from_config, str) else None


def _further_names(config: RecipeConfig) -> Iterator[tuple[str, str | None, str]]:
    """Yield (name, revision, dotted key) of what else the recipe reads from the Hub before it trains."""
    teacher = config.distill.teacher if config.distill is not None else None
    name = getattr(teacher, "from_pretrained", None)
    if name is not None:
        yield name, getattr(teacher, "revision", None), "distill.teacher.from_pretrained"
    sources = config.init_from or []
    if isinstance(sources, InitFromConfig):
        yield sources.path, None, "init_from.path"
        return
    for number, source in enumerate(sources):
        yield source.path, None, f"init_from.{number}.path"


def _is_on_hub(name: str, where: str) -> bool:
    """Whether *name* is that of a repository. Raises :class:`RecipeError` for a path that does not exist."""
    is_in_local_directory = "/" in name and Path(name).expanduser().parent.is_dir()
    if is_in_local_directory or not is_hub_name(name):
        return False
    require_local(name, where)
    return True


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
