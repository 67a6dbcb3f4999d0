"""Match the tensors of a model with the tensors of a source of weights, by name and shape. Pure: reads no file."""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from automodel_ckpt.checkpoint.files.type_aliases import Shape, Strings, TextDict, Texts
from automodel_ckpt.errors import Problem, RecipeError

log = logging.getLogger(__name__)

_MAX_LINES = 20
"""Differences that one error lists."""
# As GPTQ and AWQ, compressed-tensors, FP8, bitsandbytes and MXFP4 name them.
_QUANTIZED = re.compile(
    r"\.(qweight|weight_packed|weight_scale(_inv)?|weight\.absmax|SCB)$|proj_blocks$"
)
_FORMER_BUFFERS = (".rotary_emb.inv_freq", ".position_ids")


@dataclass(frozen=True)
class Names:
    """The tensors of a model or of a source: their shapes by name, and {alias: name} of tied tensors."""

    shapes: Mapping[str, Shape]
    tied: Texts = field(default_factory=dict)

    def resolve(self, name: str) -> str | None:
        """The name in *shapes* of the tensor with the name or alias *name*. None when there is none."""
        if name in self.shapes:
            return name
        target = self.tied.get(name)
        return target if target in self.shapes else None

    def all_of(self, name: str) -> list[str]:
        """The name of a tensor and all its aliases."""
        aliases = [alias for alias, target in self.tied.items() if target == name]
        return [name, *aliases]


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison of a model ("here") with a source ("there").

    *matches* maps names of the model to the names of the source that fill them. *resized* are matches with another
    number of rows in the source: {name: (shape there, shape here)}. *missing* tensors of the model are not in the
    source, *unexpected* tensors of the source are not in the model, and *misshapen* {name: (shape there, shape here)}
    cannot be filled. *allowed* contains the names with differences that the recipe allows.
    """

    matches: Texts
    resized: Mapping[str, tuple[Shape, Shape]]
    missing: Strings
    unexpected: Strings
    misshapen: Mapping[str, tuple[Shape, Shape]]
    allowed: frozenset[str]

    @property
    def new(self) -> Strings:
        """The tensors of the model that no tensor of the source fills."""
        return tuple(sorted({*self.missing, *self.misshapen}))

    def lines(self, *, allowed: bool) -> list[str]:
        """One line per difference that the recipe allows, or per difference that it does not allow."""
        lines = [(name, f"+ {name}: not there") for name in self.missing]
        lines += [(name, f"- {name}: only there") for name in self.unexpected]
        for name, (there, here) in sorted(self.misshapen.items()):
            lines.append((name, f"~ {name}: there {list(there)}, here {list(here)}"))
        return [line for name, line in lines if (name in self.allowed) == allowed]

    def check_allowed(self, where: str, value: object, section: str) -> None:
        """Raise :class:`RecipeError` with all differences that are not allowed.

        *section* is the section of the recipe that has the keys allow_missing and allow_unexpected.
        """
        lines = self.lines(allowed=False)
        if not lines:
            return
        if len(lines) > _MAX_LINES:
            lines[_MAX_LINES:] = [f"... and {len(lines) - _MAX_LINES} more"]
        found = "\n    ".join([str(value), *lines])
        what = "the weights do not match this model"
        raise RecipeError.all_of([Problem(what, where, found, _hint(self, section))])

    def log_differences(self, between: str) -> None:
        """Log the differences that the recipe allows, and the resized tensors, by name."""
        lines = self.lines(allowed=True)
        for name, (there, here) in self.resized.items():
            lines.append(f"~ {name}: {there[0]} rows there, {here[0]} here")
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
        """The verdict on differences that another program has found; *misshapen* contains (shape there, shape here)."""
        only_here, only_there = tuple(sorted(missing)), tuple(sorted(unexpected))
        allowed = _matching([*only_here, *misshapen], allow_missing)
        allowed |= _matching(only_there, allow_unexpected)
        return cls({}, {}, only_here, only_there, misshapen, frozenset(allowed))


def _hint(verdict: Verdict, section: str) -> str:
    missing = [name for name in verdict.new if name not in verdict.allowed]
    unexpected = [name for name in verdict.unexpected if name not in verdict.allowed]
    if any(_QUANTIZED.search(name) for name in unexpected):
        return (
            "these weights are quantized, and cannot be read as ordinary floats here: use the model that they were "
            "made from (peft.quantize_base quantizes it while it is read)"
        )
    found = {"allow_missing": missing, "allow_unexpected": unexpected}
    parts = [f"{section}.{key}: {_patterns(names)}" for key, names in found.items() if names]
    return f"name the weights of this model, or, to ignore these, set {' and '.join(parts)}"


def _patterns(names: Sequence[str]) -> str:
    """The names as a YAML list; more than three as patterns, one for each first component."""
    patterns = names
    if len(names) > 3:
        patterns = sorted({f"{name.partition('.')[0]}.*" for name in names})
    quoted = [f"'{pattern}'" for pattern in patterns]
    return f"[{', '.join(quoted)}]"


def compare(
    here: Names,
    there: Names,
    *,
    prefix: str = "",
    resizable: Collection[str] = (),
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
) -> Verdict:
    """Match the tensors of a model (*here*) with the tensors of a source (*there*).

    A name may lack the *prefix* (``base_model_prefix`` of transformers, such as ``model``) on either side, and a tensor
    may have any name that it is tied to. Tensors in *resizable* may have another number of rows. Tensors that match a
    glob of *allow_missing* keep the model's values if the source has none, or has another shape. Tensors of the source
    that match a glob of *allow_unexpected* are ignored.
    """
    matches: TextDict = {}
    missing: list[str] = []
    resized: dict[str, tuple[Shape, Shape]] = {}
    misshapen: dict[str, tuple[Shape, Shape]] = {}
    # Files may contain both copies of tied tensors.
    used = {spelling for alias in here.tied for spelling in _spellings(alias, prefix)}
    for name, shape in here.shapes.items():
        source = _source_of(name, here, there, prefix)
        if source is None:
            missing.append(name)
            continue
        used.add(source)
        source_shape = there.shapes[source]
        if source_shape != shape:
            if name in resizable and source_shape[1:] == shape[1:]:
                resized[name] = (source_shape, shape)
            else:
                misshapen[name] = (source_shape, shape)
                continue
        matches[name] = source
    unexpected = [name for name in there.shapes if name not in used]
    verdict = Verdict.of_differences(
        missing,
        unexpected,
        misshapen,
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
    )
    return replace(verdict, matches=matches, resized=resized)


def ignored_by(model: Any, names: Iterable[str]) -> list[str]:
    """Those of *names*, which a transformers *model* lacks, that ``from_pretrained`` ignores.

    They are those that its class lists, and :func:`former_buffers`.
    """
    names = list(names)
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    former = former_buffers(model, names)
    return [
        name
        for name in names
        if name in former or any(re.search(pattern, name) for pattern in patterns)
    ]


def former_buffers(model: Any, names: Iterable[str]) -> list[str]:
    """Those of *names* that earlier versions of transformers stored, and that a *model* computes now.

    Source: ``PreTrainedModel._adjust_missing_and_unexpected_keys`` of transformers 5.17 to 5.24.
    """
    buffers = [name for name, _ in model.named_buffers()]
    return [
        name
        for name in names
        for end in _FORMER_BUFFERS
        if f".{name}".endswith(end) and any(f".{buffer}".endswith(end) for buffer in buffers)
    ]


def copies_of_tied(here: Names, there: Names, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield each tensor of *here* with several names, and the tensors of *there* that have one of these names, if
    several do.

    :func:`compare` uses one of them. *prefix* is as there.
    """
    for name in dict.fromkeys(here.tied.values()):
        if name not in here.shapes:
            continue
        spellings = [
            spelling for each in here.all_of(name) for spelling in _spellings(each, prefix)
        ]
        found = [spelling for spelling in dict.fromkeys(spellings) if spelling in there.shapes]
        if len(found) > 1:
            yield name, found


def _source_of(name: str, here: Names, there: Names, prefix: str) -> str | None:
    """The tensor of the source that fills *name*, under any of its names and spellings."""
    for each in here.all_of(name):
        for spelling in _spellings(each, prefix):
            if source := there.resolve(spelling):
                return source
    return None


def _spellings(name: str, prefix: str) -> list[str]:
    if not prefix:
        return [name]
    without = name.removeprefix(f"{prefix}.")
    return [name, without if without != name else f"{prefix}.{name}"]


def _matching(names: Sequence[str], patterns: Iterable[str]) -> set[str]:
    """The names that match one of the globs."""
    found: set[str] = set()
    for pattern in patterns:
        found.update(fnmatch.filter(names, pattern))
    return found
