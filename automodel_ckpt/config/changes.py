"""What a recipe says otherwise than the recipe that a checkpoint was saved with. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.config.nodes import leaves, read_file, read_text

NOT_SET = "not set"
# Where a run is stored, and what it shows, is not what it computes.
_NOT_COMPARED = ("checkpoint.checkpoint_dir", "checkpoint.restore_from", "logging.")


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value changed, as text; ``not set`` where one side lacks it."""

    key: str
    saved: str
    now: str

    def __str__(self) -> str:
        return f"{self.key}: {self.saved} -> {self.now}"


def saved_recipe(config_yaml: Path) -> dict[str, str]:
    """Dotted key to the text of each value of a recipe file in a checkpoint; empty where it cannot be read."""
    if not config_yaml.is_file() or config_yaml.is_symlink():
        return {}
    root = read_file(config_yaml, [])
    return dict(leaves(root)) if root else {}


def recipe_of(config_yaml: str) -> dict[str, str]:
    """Dotted key to the text of each value of a recipe's text."""
    return dict(leaves(read_text(config_yaml, "", [])))


def changed_keys(saved: Mapping[str, str], now: Mapping[str, str], given: Collection[str]) -> list[Change]:
    """The keys whose values differ between two recipes, by name; a list counts as one value.

    *given* are the keys of *now* that a user wrote: of a key that the saved recipe lacks, a default is no change, since
    the key may be younger than the checkpoint.
    """
    before, after = _whole_lists(saved), _whole_lists(now)
    changes = []
    for key in sorted({*before, *after}):
        known = key in before or _is_given(key, given)
        if known and not key.startswith(_NOT_COMPARED) and before.get(key) != after.get(key):
            changes.append(Change(key, before.get(key, NOT_SET), after.get(key, NOT_SET)))
    return changes


def _is_given(key: str, given: Collection[str]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for name in given)


def _whole_lists(values: Mapping[str, str]) -> dict[str, str]:
    """The elements of a list as one value."""
    whole: dict[str, str] = {}
    for key, value in values.items():
        parent, _, last = key.rpartition(".")
        if not last.isdecimal():
            whole[key] = value
        else:
            before = whole.get(parent, "[]")
            whole[parent] = f"{before[:-1]}, {value}]" if before != "[]" else f"[{value}]"
    return whole
