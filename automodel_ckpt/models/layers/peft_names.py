"""The names and patterns by which peft selects exactly the modules that were found."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from automodel_ckpt.errors import RecipeError


def peft_targets(targets: Sequence[str], names: Sequence[str]) -> list[str] | str:
    """The target_modules by which peft selects exactly *targets* among *names*.

    These are suffixes of names if possible, otherwise a regular expression.
    """

    suffixes = suffixes_of(targets, names, has_suffix)
    return suffixes or "|".join(re.escape(target) for target in targets)


def peft_patterns(
    patterns: Mapping[str, int], numbers: Mapping[str, int], names: Sequence[str]
) -> dict[str, int]:
    """The patterns by which peft gives the *numbers* to exactly their layers, among *names*.

    peft's are regular expressions for the end of a name. These are the *patterns* themselves if possible, otherwise
    full names.
    """
    selected: dict[str, int] = {}
    if all(re.fullmatch(r"[\w.]+", pattern) for pattern in patterns):
        for name in names:
            for pattern, number in patterns.items():
                if re.match(rf"(.*\.)?({pattern})$", name):
                    selected[name] = number
                    break
        if selected == numbers:
            return dict(patterns)
    return {f"^{name}": number for name, number in numbers.items()}


def suffixes_of(
    wanted: Sequence[str], names: Sequence[str], selects: Callable[[str, str], bool]
) -> list[str]:
    """Suffixes that select exactly the *wanted* names by *selects*: last components, or else full names.

    Returns an empty list if neither does. Raises :class:`RecipeError` if peft's only rule is str.endswith.
    """
    last_components = sorted({name.rpartition(".")[2] for name in wanted})
    for suffixes in (last_components, sorted(wanted)):
        selected = {name for name in names if any(selects(name, suffix) for suffix in suffixes)}
        if selected == set(wanted):
            return suffixes
    if wanted and selects is str.endswith:
        raise RecipeError(
            "peft cannot distinguish these modules from others with the same name suffix",
            where="peft.modules_to_save",
            value=list(wanted)[:5],
            hint="list all modules with these suffixes, or other modules",
        )
    return []


def has_suffix(name: str, suffix: str) -> bool:
    """Whether the last components of the dotted *name* are *suffix*, as peft compares target_modules."""
    return name == suffix or name.endswith(f".{suffix}")
