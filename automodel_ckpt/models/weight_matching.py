"""Which tensors of a source of weights a model takes, by name and shape alone: pure, nothing is read here."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from automodel_ckpt.errors import Problem, RecipeError

log = logging.getLogger(__name__)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Names:
    """The tensors on one side: their shapes, and for each further name of one the name that it is tied to."""

    shapes: Mapping[str, Shape]
    tied: Mapping[str, str] = field(default_factory=dict)

    def holds(self, name: str) -> str | None:
        """The tensor that goes by *name*."""
        if name in self.shapes:
            return name
        kept = self.tied.get(name)
        return kept if kept in self.shapes else None

    def all_of(self, name: str) -> list[str]:
        """Every name of the tensor *name*."""
        return [name, *(alias for alias, kept in self.tied.items() if kept == name)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is taken and what is not.

    *matches* maps names of the model to those of the source that fill them; *resized* are those among them that have
    another number of rows there, with the two shapes (there, here). *missing* stay as they are in the model,
    *unexpected* are left aside, *misshapen* (there, here) cannot be taken; the recipe allows what *allowed* holds.
    """

    matches: Mapping[str, str]
    resized: Mapping[str, tuple[Shape, Shape]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: Mapping[str, tuple[Shape, Shape]]
    allowed: frozenset[str]

    @property
    def new(self) -> tuple[str, ...]:
        """The tensors of the model that no tensor of the source fills."""
        return tuple(sorted({*self.missing, *self.misshapen}))

    def lines(self, *, allowed: bool) -> list[str]:
        """The differences that the recipe allows, or those that it does not, a readable line each."""
        lines = [
            f"+ {name}: not there" for name in self.missing if (name in self.allowed) == allowed
        ]
        lines += [
            f"- {name}: only there" for name in self.unexpected if (name in self.allowed) == allowed
        ]
        for name, (there, here) in self.misshapen.items():
            if (name in self.allowed) == allowed:
                lines.append(f"~ {name}: there {list(there)}, here {list(here)}")
        return lines

    def refuse(self, where: str, value: object, section: str) -> None:
        """Raise :class:`RecipeError` with every difference that is not allowed. *section* holds the allow_* keys."""
        lines = self.lines(allowed=False)
        if not lines:
            return
        raise RecipeError.all_of(
            [
                Problem(
                    "the weights do not match this model",
                    where,
                    "\n    ".join([str(value), *lines]),
                    _hint(self, section),
                )
            ]
        )

    def tell(self, between: str) -> None:
        """Log by name what is not taken, as the recipe allows; and what was resized."""
        lines = self.lines(allowed=True)
        lines += [
            f"~ {name}: {there[0]} rows there, {here[0]} here"
            for name, (there, here) in self.resized.items()
        ]
        if lines:
            log.info("%s differ, which the recipe allows:\n    %s", between, "\n    ".join(lines))

    @classmethod
    def of_differences(
        cls,
        missing: Iterable[str],
        unexpected: Iterable[str],
        misshapen: Mapping[str, tuple[Shape, Shape]],
        *,
        allow_missing: Iterable[str] = (),
        allow_unexpected: Iterable[str] = (),
    ) -> Verdict:
        """The verdict on what somebody else has compared; *misshapen* gives the shapes (there, here)."""
        only_here, only_there = tuple(sorted(missing)), tuple(sorted(unexpected))
        allowed = {
            *_matching([*only_here, *misshapen], allow_missing),
            *_matching(only_there, allow_unexpected),
        }
        return cls({}, {}, only_here, only_there, misshapen, frozenset(allowed))


def _hint(verdict: Verdict, section: str) -> str:
    missing = [name for name in verdict.new if name not in verdict.allowed]
    unexpected = [name for name in verdict.unexpected if name not in verdict.allowed]
    parts = [f"{section}.allow_missing: {_patterns(missing)}"] * bool(missing)
    parts += [f"{section}.allow_unexpected: {_patterns(unexpected)}"] * bool(unexpected)
    return f"name the weights of this model, or, to go on without these, set {' and '.join(parts)}"


def _patterns(names: Sequence[str]) -> str:
    """The names as a list for a recipe; many as patterns over what follows their first part."""
    shown = names if len(names) <= 3 else sorted({f"{name.partition('.')[0]}.*" for name in names})
    return "[" + ", ".join(f"'{name}'" for name in shown) + "]"


def compare(
    here: Names,
    there: Names,
    *,
    prefix: str = "",
    resizable: Collection[str] = (),
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
) -> Verdict:
    """Match the tensors of a model with those of a source.

    A name may lack the *prefix* (``base_model_prefix`` of transformers, ``model``) on either side, and a tensor may go
    by any name that it is tied to. Those in *resizable* may have another number of rows. What matches a glob of
    *allow_missing* keeps the model's own values where there is none, or one of another shape; what matches one of
    *allow_unexpected* is left aside.
    """
    found = {name: _holder(name, here, there, prefix) for name in here.shapes}
    matches = {name: holder for name, holder in found.items() if holder is not None}
    shapes = {name: (there.shapes[holder], here.shapes[name]) for name, holder in matches.items()}
    different = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
    resized = {
        n: pair for n, pair in different.items() if n in resizable and pair[0][1:] == pair[1][1:]
    }
    misshapen = {name: pair for name, pair in different.items() if name not in resized}
    used = {*matches.values(), *_left_to_ties(here, there, prefix)}
    verdict = Verdict.of_differences(
        (name for name, holder in found.items() if holder is None),
        (name for name in there.shapes if name not in used),
        misshapen,
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
    )
    taken = {name: holder for name, holder in matches.items() if name not in misshapen}
    return replace(verdict, matches=taken, resized=resized)


def _holder(name: str, here: Names, there: Names, prefix: str) -> str | None:
    candidates = [spelling for each in here.all_of(name) for spelling in _spellings(each, prefix)]
    return next((holder for each in candidates if (holder := there.holds(each)) is not None), None)


def _spellings(name: str, prefix: str) -> list[str]:
    if not prefix:
        return [name]
    return [name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"]


def _left_to_ties(here: Names, there: Names, prefix: str) -> Iterable[str]:
    """Tensors of the source under names that the model only has as further names of others: files may hold both."""
    return [
        each for alias in here.tied for each in _spellings(alias, prefix) if each in there.shapes
    ]


def _matching(names: Sequence[str], patterns: Iterable[str]) -> set[str]:
    return {name for pattern in patterns for name in fnmatch.filter(names, pattern)}
