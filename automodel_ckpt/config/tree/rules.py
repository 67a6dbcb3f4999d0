"""How the fields of a recipe's sections restrict their values: rules, relations and conditions.

This module imports only the standard library. ``keys/`` has the sections.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")

MISSING = "???"
"""The default of a mandatory value, as in omegaconf."""


@dataclass(frozen=True)
class Rule:
    """A condition on one value that is not None."""

    accepts: Callable[[Any], bool]
    expected: str
    """Completes the sentence "<key> must be ..."."""


@dataclass(frozen=True)
class Relation:
    """A condition on several ``keys`` of one section, reported at the first of them that the user gave."""

    keys: tuple[str, ...]
    accepts: Callable[[Any], bool]
    problem: str
    hint: str


@dataclass(frozen=True)
class Condition:
    """A condition under which several ``keys`` of one section have an effect.

    If it is not met, a value of a key other than its default is an error. ``on`` lists the keys that ``accepts`` reads.
    """

    keys: tuple[str, ...]
    on: tuple[str, ...]
    accepts: Callable[[Any], bool]
    reason: str
    """Completes the sentence "<key> has no effect: ..."."""
    hint: str


def asks(section: Any, key: str) -> bool:
    """Whether the value at a dotted key requests something: it is not null, false, empty, or a size of 1."""
    value = section
    for name in key.split("."):
        # A section on the way may be missing, or another kind of section.
        value = getattr(value, name, None)
    return bool(value) and not (key.endswith("_size") and value == 1)


def needs(keys: str, other: str, reason: str, hint: str) -> Condition:
    """The condition that *keys*, separated by spaces, have an effect only if the key *other* requests something."""
    return Condition(
        tuple(keys.split()), (other,), lambda section: asks(section, other), reason, hint
    )


def excludes(first: str, second: str, problem: str, hint: str) -> Relation:
    """The relation that at most one of two keys may request something."""

    def is_single(section: Any) -> bool:
        return not (asks(section, first) and asks(section, second))

    return Relation((first, second), is_single, problem, hint)


AT_LEAST_0 = Rule(lambda number: number >= 0, "0 or more")
SEED = Rule(lambda number: 0 <= number < 2**63, "from 0 to 2^63 - 1")
AT_LEAST_1 = Rule(lambda number: number >= 1, "1 or more")
AT_LEAST_2 = Rule(lambda number: number >= 2, "2 or more")
AT_LEAST_0_OR_AUTO = Rule(lambda value: value == "auto" or value >= 0, "0 or more, or auto")
AT_LEAST_1_OR_AUTO = Rule(lambda value: value == "auto" or value >= 1, "1 or more, or auto")
UP_TO_2 = Rule(lambda number: 0 <= number <= 2, "0, 1 or 2")
# nan is rejected as well, because it compares false with every number.
POSITIVE = Rule(lambda number: 0 < number < math.inf, "more than 0, and finite")
# In minutes. gloo failed before the first step with a few seconds, and 1e30 was an overflow.
WAIT = Rule(lambda minutes: 0.1 <= minutes <= 1e6, "from 0.1 to 1000000")
FINITE = Rule(lambda number: 0 <= number < math.inf, "0 or more, and finite")
FRACTION = Rule(lambda number: 0 <= number <= 1, "from 0 to 1")
BELOW_1 = Rule(lambda number: 0 <= number < 1, "from 0 to below 1")
BETAS = Rule(lambda betas: all(0 <= beta < 1 for beta in betas), "two numbers from 0 to below 1")
NOT_EMPTY = Rule(bool, "non-empty")


def setting(default: T, *rules: Rule) -> T:
    """Declare a dataclass field with values that must satisfy these rules."""
    return field(default=default, metadata={"rules": rules})


@dataclass
class Target:
    """A plug-in: the dotted name of a callable, with keyword arguments in the same section."""

    _target_: str = MISSING
    """Dotted name of a class or function that is allowed in this section, or trusted with --trust."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """The section's other keys: arguments, checked against the callable's signature."""

    # A ClassVar is no field, so it is not a key of the recipe.
    takes_any: ClassVar[bool] = True
    """Whether the section accepts keys that are not fields of its dataclass. ``kwargs`` contains them."""
