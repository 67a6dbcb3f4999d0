"""Matching an optimizer's parameter groups to the saved ones by the names of their parameters, never by position.

A recipe may split its parameters into more groups than the run that wrote the checkpoint: each group then takes the
options of the saved group that its parameters were in. Every parameter keeps the options that it was trained with, so
the resumed run continues exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.checkpoint.parts.tree import Tree
from automodel_ckpt.checkpoint.state.optimizer_state import saved_entries

T = TypeVar("T")

_PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums"}
)
"""Entries of the LR schedulers of torch that hold one value for each parameter group."""
_PARTS = "_schedulers"
"""The schedulers that SequentialLR and ChainedScheduler contain."""
_OF_ALL_SCHEDULES = frozenset({"base_lrs", "last_epoch", "verbose"})
DIVIDED = "with different options"
"""In the reason of a group with parameters of several saved groups."""


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """*sources* has, for each parameter group of the optimizer *name*, the number of the saved group that it takes the
    options from; None for a new one without parameters. *mismatched* names the groups that cannot be matched."""

    name: str
    sources: tuple[int | None, ...]
    num_saved: int
    mismatched: tuple[str, ...]

    def renumbered(self, tree: Tree) -> Tree:
        """The saved *tree* with each group's options under the number that the group has here.

        The lists of parameters are omitted: the optimizer's own lists are right.
        """
        prefix = f"{self.name}.param_groups."

        def renumbered(entries: Mapping[str, T], rename: Callable[[T, str], T]) -> dict[str, T]:
            found = {key: value for key, value in entries.items() if not key.startswith(prefix)}
            # One saved group may be the source of several groups.
            for number, source in enumerate(self.sources):
                if source is None:
                    continue
                saved = _prefix(self.name, source)
                for name, value in entries.items():
                    if name.startswith(saved) and name != f"{saved}params":
                        new_name = _prefix(self.name, number) + name.removeprefix(saved)
                        found[new_name] = rename(value, new_name)
            return found

        return replace(
            tree,
            tensors=renumbered(tree.tensors, lambda tensor, name: tensor.renamed(name)),
            objects=renumbered(tree.objects, lambda blob, name: blob),
        )

    def schedule_state(self, saved: Values, scheduler: object) -> ValueDict:
        """The *saved* state of an LR scheduler with its values per parameter group in the order of the groups here.

        A new group without parameters keeps what *scheduler* has for it.
        """
        state = dict(saved)
        for key, value in saved.items():
            here: Any = getattr(scheduler, key, None)
            if key in _PER_GROUP:
                if _has_length(value, self.num_saved) and _has_length(here, len(self.sources)):
                    per_group = []
                    for number, source in enumerate(self.sources):
                        per_group.append(here[number] if source is None else value[source])
                    state[key] = type(value)(per_group)
            elif key == _PARTS and _has_length(here, len(value)):
                # SequentialLR and ChainedScheduler contain other schedulers.
                pairs = zip(value, here, strict=True)
                state[key] = [self.schedule_state(inner, scheduler) for inner, scheduler in pairs]
        return state


def other_kind(saved: Values, scheduler: Any) -> str | None:
    """Describe what shows that the *saved* state is from another kind of LR scheduler. Returns None when nothing does.

    The classes of torch differ in their settings. The state of an imported run has no settings. A class of the
    user may have gained or lost some since it was saved.
    """
    before = _settings_of(saved)
    now = _settings_of(scheduler.state_dict())
    is_of_torch = type(scheduler).__module__.startswith("torch.optim.")
    has_other = before - now and now - before
    if not before or before == now or not (is_of_torch or has_other):
        return None
    name = type(scheduler).__name__
    return f"~ saved with {', '.join(sorted(before))}; {name} has {', '.join(sorted(now)) or 'none of these'}"


def _settings_of(state: Values) -> set[str]:
    """The names in the *state* of an LR scheduler that its own class has."""
    own = {key for key in state if not key.startswith("_") and key not in _OF_ALL_SCHEDULES}
    return own | ({_PARTS} & state.keys())


def match_groups(
    name: str, saved: Sequence[Sequence[str]], here: Sequence[Sequence[str]], tree: Tree
) -> GroupMatch:
    """Match the groups of the optimizer *name*: FQNs of the *saved* ones in *tree*, and of those that are *here*.

    Saved parameters that are not trained here do not count if they have no state, while others have: they had no
    gradient, so nothing is lost. Programs that give an optimizer all parameters save frozen ones so.
    """
    group_of = {fqn: number for number, group in enumerate(saved) for fqn in group}
    sources = []
    mismatched = []
    for number, group in enumerate(here):
        if not group:
            is_empty = number < len(saved) and not saved[number]
            sources.append(number if is_empty else None)
            continue
        untrained = [fqn for fqn in group if fqn not in group_of]
        found = sorted({group_of[fqn] for fqn in group if fqn in group_of})
        if untrained:
            reason = f"trains {untrained[0]}, which was not trained"
            mismatched.append(f"+ {name}.param_groups.{number}: {reason}")
        elif any(_options(name, tree, other) != _options(name, tree, found[0]) for other in found):
            numbers = " and ".join(map(str, found))
            mismatched.append(
                f"~ {name}.param_groups.{number}: saved as groups {numbers} {DIVIDED}"
            )
        # If none was found, the group is in *mismatched*, which is raised before values are read:
        # any number does.
        sources.append(found[0] if found else 0)
    left_out = set(group_of) - {fqn for group in here for fqn in group}
    with_tensors = {fqn for fqn, _ in saved_entries(name, tree.tensors)}
    if with_tensors:
        left_out &= with_tensors
    for number, group in enumerate(saved):
        not_trained = [fqn for fqn in group if fqn in left_out]
        if not_trained:
            reason = f"trained {not_trained[0]}, which is not trained here"
            mismatched.append(f"- {name}.param_groups.{number}: {reason}")
    return GroupMatch(name, tuple(sources), len(saved), tuple(mismatched))


def _options(name: str, tree: Tree, number: int) -> dict[str, object]:
    """What shows whether two saved groups have the same options, as far as their stored digests do."""
    prefix = _prefix(name, number)
    found: dict[str, object] = {
        key: tensor for key, tensor in tree.tensors.items() if key.startswith(prefix)
    }
    for key, blob in tree.objects.items():
        if key.startswith(prefix) and key != f"{prefix}params":
            # Some sources have no digests: without one, nothing shows that two values are equal.
            found[key.removeprefix(prefix)] = blob.digest or blob
    return found


def _prefix(name: str, number: int) -> str:
    # With the last dot: group 1 must not match the names of group 10.
    return f"{name}.param_groups.{number}."


def _has_length(value: object, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length
