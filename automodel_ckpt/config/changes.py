"""Differences between a recipe and the one saved in a checkpoint. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.config.tree.yaml_tree import Node, lines, node_of, read_file, read_text, texts
from automodel_ckpt.errors import Problem, RecipeError

NOT_SET = "not set"
_SECTION = "a section"
# A resumed run takes its data order, random state and weights from the checkpoint.
_IGNORED = (
    "seed",
    "dataloader.shuffle",
    "init_from",
    "model.new_tokens",
    "model.mtp.weights",
    "peft.init",
)
_OPTIMIZER_CLASS = "optimizer._target_"
_SCHEDULE = "lr_scheduler."
_SCHEDULE_CLASS = "lr_scheduler._target_"
_SCHEDULE_NAME = "lr_scheduler.name"
_APPLIED_OPTIMIZER_KEYS = ("optimizer.on_resume", _OPTIMIZER_CLASS)
_OPTIONS = ("optimizer.", "pretrain.base_width")
"""Keys that set the options of parameter groups, which are part of the optimizer's state."""
_IN_SECTIONS = ("peft.init", "model.mtp.weights")
"""Ignored keys of sections that can be missing."""
# The location of a run and its output do not change what it computes.
_NOT_COMPARED = (
    "checkpoint.checkpoint_dir",
    "checkpoint.scratch_dir",
    "checkpoint.restore_from",
    "checkpoint.remote",
    "logging.",
)


@dataclass(frozen=True)
class Change:
    """A key with a changed value, with both values as text; ``not set`` if one side does not have it.

    If the key has a value on one side and keys below it on the other one, such as ``peft``, that side is ``a section``.
    """

    key: str
    saved: str
    now: str

    def __str__(self) -> str:
        return f"{self.key}: {self.saved} -> {self.now}"


def saved_recipe(config_yaml: Path) -> dict[str, str]:
    """Map the dotted keys of a saved recipe file to their values as text; empty if it cannot be read."""
    root = _saved_tree(config_yaml)
    return texts(root) if root else {}


def _saved_tree(config_yaml: Path) -> Node | None:
    # A checkpoint is untrusted: a link in it may lead to any file that this user can read.
    if not config_yaml.is_file() or config_yaml.is_symlink():
        return None
    return read_file(config_yaml, [])


def recipe_of(config_yaml: str) -> dict[str, str]:
    """Map the dotted keys of a recipe, given as YAML text, to their values as text."""
    return texts(read_text(config_yaml, "", []))


def changed_keys(
    saved: Mapping[str, str], now: Mapping[str, str], given: Collection[str]
) -> list[Change]:
    """Return the keys with values that differ between two recipes, sorted by name. A list counts as one value.

    Of a section that was removed, only the section is returned. *given* are the keys of *now* that the user wrote. If
    the saved recipe does not have a key, its default is not a change: the key may have been added after the checkpoint
    was saved.
    """
    changes = []
    for key, (old, new) in differences([saved, now]).items():
        if old != NOT_SET or any(name == key or name.startswith(f"{key}.") for name in given):
            changes.append(Change(key, old, new))
    removed = tuple(f"{change.key}." for change in changes if change.saved == _SECTION)
    # The keys of a removed section say nothing more than that it was removed.
    return [
        change for change in changes if change.now != NOT_SET or not change.key.startswith(removed)
    ]


def _value(recipe: Mapping[str, str], key: str) -> str:
    """Return the value of a key as text. A key that is null in the other recipe can be a section in this one."""
    if key in recipe:
        return recipe[key]
    is_section = any(other.startswith(f"{key}.") for other in recipe)
    return _SECTION if is_section else NOT_SET


def differences(recipes: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Map the keys with values that differ between *recipes* to these values, one per recipe, sorted by key.

    An empty recipe is one that is not known: its values are empty, and differ from none.
    """
    rows: dict[str, list[str]] = {}
    for key in sorted(set().union(*recipes)):
        values = [_value(recipe, key) if recipe else "" for recipe in recipes]
        if len({*values} - {""}) > 1 and not key.startswith(_NOT_COMPARED):
            rows[key] = values
    return rows


def ignored_by_resume(
    changes: Iterable[Change],
    saved: Collection[str],
    on_resume: str,
    *,
    keeps_schedule: bool = False,
) -> list[Change]:
    """Return the changes that a resume does not apply, because it takes the value from the checkpoint.

    *saved* are the attributes with a state in the checkpoint; *on_resume* is ``optimizer.on_resume``.
    *keeps_schedule*: the state of the LR schedule contains its settings.
    """
    changes = list(changes)
    # Another class has other options, and loading reports its other state.
    is_other_class = any(change.key == _OPTIMIZER_CLASS for change in changes)
    is_other_schedule = "lr_scheduler" not in saved or any(
        change.key in (_SCHEDULE_CLASS, _SCHEDULE_NAME) for change in changes
    )
    keeps_options = "optimizer" in saved and on_resume == "checkpoint" and not is_other_class
    ignored = []
    for change in changes:
        if change.key in _IN_SECTIONS and NOT_SET in (change.saved, change.now):
            continue  # the section was added or removed: loading reports the other model
        is_option = change.key.startswith(_OPTIONS) and change.key not in _APPLIED_OPTIMIZER_KEYS
        # By prefix, which covers the keys of sections: no other key may begin with one of these
        # names.
        is_schedule = change.key.startswith(_SCHEDULE) and change.key != _SCHEDULE_CLASS
        if is_schedule and keeps_schedule and on_resume == "checkpoint" and not is_other_schedule:
            ignored.append(change)
        if change.key.startswith(_IGNORED) or (is_option and keeps_options):
            ignored.append(change)
    return ignored


def change_lines(changes: Iterable[Change], ignored: Collection[Change]) -> list[str]:
    """Describe *changes*, one per line; of those in *ignored*, which value is kept and how to apply the new one."""
    described = []
    for change in changes:
        note = ""
        if change in ignored:
            way = "only a new run can change it"
            if _follows_on_resume(change.key):
                way = "optimizer.on_resume: recipe applies the new value"
            note = f" (not applied: the run keeps {change.saved}; {way})"
        described.append(f"{change}{note}")
    return described


def effective_recipe(
    config_yaml: str, saved_yaml: Path, kept: Iterable[Change], options: Mapping[str, Any]
) -> str:
    """Return the recipe of a resumed run with the values that the run uses.

    Args:
        config_yaml: The recipe that the run was started with.
        saved_yaml: The recipe file of the checkpoint.
        kept: The changes that the resume did not apply.
        options: The values of optimizer options that continue as saved, by dotted key of the recipe.
    """
    now, saved = read_text(config_yaml, "", []), _saved_tree(saved_yaml)
    for change in kept:
        assert saved is not None
        _restore(now, saved, change.key)
    for key, value in options.items():
        section, _, name = key.rpartition(".")
        parent = now.at(section)
        if parent is not None and isinstance(parent.value, dict) and name in parent.value:
            parent.value[name] = node_of(value)
    return "".join(f"{text}\n" for text, _ in lines(now))


def _restore(now: Node, saved: Node, key: str) -> None:
    """Set *key* in *now* to its value in *saved*. A list, or a section that one of them lacks, is set as a whole."""
    assert isinstance(now.value, dict) and isinstance(saved.value, dict)
    name, _, rest = key.partition(".")
    new, old = now.value.get(name), saved.value.get(name)
    if old is None:
        now.value.pop(name, None)
    elif rest and new and isinstance(new.value, dict) and isinstance(old.value, dict):
        _restore(new, old, rest)
    else:
        now.value[name] = old.copy()


def has_settings_in_state(schedule: str) -> bool:
    """Return whether the state of the LR schedule with the ``_target_`` *schedule* contains its settings.

    That is so for the classes of torch, except for classes with rates that are a function of the step. It is unknown
    for a user's function.
    """
    module, _, name = schedule.rpartition(".")
    return module == "torch.optim.lr_scheduler" and name != "LambdaLR"


def check_overrides(
    ignored: Iterable[Change], overridden: Collection[str], checkpoint: Path
) -> None:
    """Raise :class:`RecipeError` for overrides that a resume would ignore.

    *overridden* are the dotted keys of the overrides on the command line.
    """
    problems = []
    for change in ignored:
        flag = next((each for each in overridden if _overlap(each, change.key)), None)
        if flag is not None:
            problems.append(override_problem(flag, change, checkpoint))
    RecipeError.check(problems)


def override_problem(flag: str, change: Change, checkpoint: Path) -> Problem:
    """Describe an override of the key *flag*. Its *change* has no effect on a run resumed from *checkpoint*."""
    new_run = (
        f"start a new run from its weights (--init_from.path "
        f"{checkpoint} and another --checkpoint.checkpoint_dir)"
    )
    options = ["remove the override", new_run]
    if _follows_on_resume(change.key):
        options.append("apply it with --optimizer.on_resume recipe")
    if change.key.startswith("init_from"):
        options = ["remove the override", "start a new run in another --checkpoint.checkpoint_dir"]
    # An override of a section can change several keys in it.
    key = "" if change.key == flag else f"{change.key}: "
    return Problem(
        "this override has no effect on a resumed run, which uses the value in the checkpoint",
        f"--{flag}",
        f"{key}{change.now}; {checkpoint.name} was saved with {change.saved}",
        "; or ".join(options),
    )


def _follows_on_resume(key: str) -> bool:
    """Whether ``optimizer.on_resume: recipe`` applies a change of *key* to a resumed run."""
    return key.startswith((*_OPTIONS, _SCHEDULE))


def _overlap(flag: str, key: str) -> bool:
    """Whether an override of *flag* sets *key*, an item in it, or a section that contains it."""
    return flag == key or flag.startswith(f"{key}.") or key.startswith(f"{flag}.")
