"""The labels of a classification: their names and order, and how the values in data are converted to numbers.

Data have them as names, as indices, or as a 0 or 1 for each label. A single row often allows several readings, so all
rows decide. If they allow two, the recipe has to.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from automodel_ckpt.data.collate import OTHER_RUN, State
from automodel_ckpt.data.conversations.messages import UnusableSample
from automodel_ckpt.errors import RecipeError

Problem = Literal["single_label", "multi_label", "regression"]
BOOLEANS = {"false": 0, "no": 0, "true": 1, "yes": 1}
"""Names of labels that mean a boolean."""
_KEY = "dataset.label_values"


@dataclass(frozen=True)
class Labels:
    """The *names* of the labels, in the order of the model's outputs, and the kind of *problem*.

    A regression predicts one number per name. Checkpoints store the labels: the weights of a head mean nothing without
    their order.
    """

    names: tuple[str, ...]
    problem: Problem

    def state_dict(self) -> State:
        """The names and the kind of problem, as plain data."""
        return {"names": list(self.names), "problem": self.problem}

    def load_state_dict(self, state: State) -> None:
        """Check that a checkpoint has the same labels. Raises :class:`RecipeError` for others."""
        saved = Labels(tuple(state["names"]), state["problem"])
        if saved != self:
            raise RecipeError(
                "the checkpoint was trained with other labels",
                where="classification",
                value=f"{self}; the checkpoint has {saved}",
                hint=OTHER_RUN,
            )

    def __str__(self) -> str:
        return f"{self.problem} {', '.join(self.names)}"

    @property
    def num_targets(self) -> int:
        """The numbers that describe the label of a text: 1 for ``single_label``, otherwise one per name."""
        return 1 if self.problem == "single_label" else len(self.names)

    def targets(self, value: Any, *, indices: bool = False) -> list[float]:
        """Convert the label of a text in data to :attr:`num_targets` numbers.

        For ``single_label``, *value* is a name or the index of one, and the number is the index; for ``multi_label``, a
        list of them, and the numbers are 1 for those and 0 for others; for ``regression``, a number or a list of them.
        With *indices*, a number is an index also if a label has it as its name. Raises :class:`UnusableSample` for
        other values.
        """
        if self.problem == "single_label":
            return [float(self.index(value, indices=indices))]
        values = list_of(value)
        if self.problem == "regression":
            numbers = [finite_number(each) for each in values or [value]]
            known = [number for number in numbers if number is not None]
            if not len(known) == len(numbers) == len(self.names):
                what = "the label of a sample is not what a regression predicts"
                raise UnusableSample(what, value, f"give {len(self.names)} numbers")
            return known
        if values is None:
            raise UnusableSample(
                "the labels of a sample are not a list",
                value,
                "give a list of names, which may be empty, or set classification.problem: single_label",
            )
        chosen = [self.index(each, indices=indices) for each in values]
        if len(set(chosen)) < len(chosen) and not all(isinstance(each, str) for each in values):
            raise UnusableSample(
                "a list of labels has the same label twice",
                value,
                f"give different indices, or in all rows a 0 or 1 for each of the {len(self.names)} labels",
            )
        return [float(index in chosen) for index in range(len(self.names))]

    def index(self, value: Any, *, indices: bool = False) -> int:
        """The index of a label that is given by its name or index. Raises :class:`UnusableSample` for others."""
        if indices and isinstance(value, bool):
            value = int(value)
        number = whole_number(value)
        named = None if indices and number is not None else self.named(value)
        if named is not None:
            return named
        may_be_index = indices or not any(name.isdecimal() for name in self.names)
        if number is not None and may_be_index and 0 <= number < len(self.names):
            return number
        raise UnusableSample(
            "a label is not one of classification.labels",
            value,
            f"the labels are {self.listed()}, with indices from 0 to {len(self.names) - 1}; correct this sample, add "
            f"its label, or set {_KEY}: indices for numbers (false is 0)",
        )

    def named(self, value: Any) -> int | None:
        """The index of the label that has *value* as its name: also 1.0 for 1, and booleans for yes or False."""
        for spelling in (value, whole_number(value)):
            # A null is not the label None.
            if spelling is not None and str(spelling) in self.names:
                return self.names.index(str(spelling))
        word = str(value).casefold()
        meanings = [BOOLEANS.get(name.casefold()) for name in self.names]
        if word in ("true", "false") and BOOLEANS[word] in meanings:
            return meanings.index(BOOLEANS[word])
        return None

    def describe(self, targets: Sequence[float]) -> str:
        """The label in words that :meth:`targets` converted to numbers."""
        if self.problem == "single_label":
            return self.names[int(targets[0])]
        if self.problem == "multi_label":
            chosen = [name for name, one in zip(self.names, targets, strict=True) if one]
            return ", ".join(chosen) or "none"
        return ", ".join(f"{number:g}" for number in targets)

    def listed(self) -> str:
        """The names for messages, at most ten."""
        shown = ", ".join(self.names[:10])
        return shown if len(self.names) <= 10 else f"{shown}, ... ({len(self.names)} in all)"


def list_of(value: Any) -> list[Any] | None:
    """A value that is a list, also as JSON text (in CSV files); None for others."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return list(value) if isinstance(value, list | tuple) else None


def whole_number(value: Any) -> int | None:
    """A value that is a whole number, also as text or as 1.0; None for others."""
    number = finite_number(value)
    return int(number) if number is not None and number.is_integer() else None


def finite_number(value: Any) -> float | None:
    """A value that is a finite number, also as text (in CSV files); None for others."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


LabelValues = Literal["auto", "indices", "one_hot"]
Reading = Callable[[Any], list[float]]
"""Converts the label of a sample as :meth:`Labels.targets` does."""
FLAGS = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}
"""The values that mean 0 or 1, as text: CSV files have nothing else."""


def reading_of(
    labels: Labels,
    values: Sequence[Any],
    how: LabelValues = "auto",
    *,
    field: str = "label",
    classes: Sequence[str] | None = None,
) -> Reading:
    """Decide how the labels of a data set are read.

    Args:
        labels: The labels of the recipe.
        values: The labels of all samples.
        how: ``indices``: numbers are indices; ``one_hot``: lists have a 0 or 1 for each label; ``auto``: names and
            indices, or lists of 0 and 1, whichever fits.
        field: The field of *values*.
        classes: The names that the data gives to its numbers, if it does.

    Returns:
        The function that converts the label of a sample.

    Raises:
        RecipeError: The values can be read in two ways, or *how* is not for this problem.
    """
    one_hot = partial(_one_hot, labels)
    if how == "one_hot":
        if labels.problem != "multi_label":
            raise RecipeError(
                "only a text with several labels has a 0 or 1 for each label",
                where=_KEY,
                value=f"one_hot, and classification.problem is {labels.problem}",
                hint="",
            )
        return one_hot
    if how == "indices":
        return partial(labels.targets, indices=True)
    is_unnamed = list(labels.names) == [f"LABEL_{n}" for n in range(len(labels.names))]
    has_classes = classes is not None and list(classes) != [str(n) for n in range(len(classes))]
    if classes is not None and has_classes and (not is_unnamed or labels.problem == "regression"):
        return partial(_of_classes, labels, classes)
    if labels.problem == "multi_label":
        named, flags = _read_all(labels.targets, values), _read_all(one_hot, values)
        if flags is not None and named is None:
            return one_hot
        if flags is not None and flags != named:
            assert named is not None
            row = next(n for n, targets in enumerate(named) if targets != flags[n])
            raise RecipeError(
                "the lists of labels can be read in two ways",
                where=f"{_KEY}, {field}",
                value=f"{values[row]}: as indices {labels.describe(named[row])}, as a 0 or 1 for each label "
                f"{labels.describe(flags[row])}",
                hint=f"set {_KEY}: indices or one_hot, or give names",
            )
    if labels.problem != "regression":
        _require_one_meaning(labels, values, field)
    return labels.targets


def _one_hot(labels: Labels, value: Any) -> list[float]:
    flags = [FLAGS.get(str(each).casefold()) for each in list_of(value) or ()]
    known = [flag for flag in flags if flag is not None]
    if not len(known) == len(flags) == len(labels.names):
        raise UnusableSample(
            "a sample does not have a 0 or 1 for each label",
            value,
            f"give {len(labels.names)} of them, in the order {labels.listed()}",
        )
    return known


def _of_classes(labels: Labels, classes: Sequence[str], value: Any) -> list[float]:
    """Convert numbers that stand for names: the order of the names can differ from the order of the labels."""

    def name_of(each: Any) -> Any:
        number = whole_number(each)
        if number is None or not 0 <= number < len(classes):
            return each
        name = classes[number]
        if name not in labels.names and labels.problem != "regression":
            raise UnusableSample(
                "a class of the data is not one of classification.labels",
                f"{number}, which the data names {name!r}",
                f"the data has {', '.join(classes[:10])}, and the labels are {labels.listed()}: use the names of the "
                f"data in any order, or set {_KEY}: indices if both have the same order",
            )
        return name

    values = list_of(value)
    return labels.targets(name_of(value) if values is None else [name_of(each) for each in values])


def _read_all(read: Reading, values: Sequence[Any]) -> list[list[float]] | None:
    try:
        return [read(value) for value in values]
    except UnusableSample:
        return None


def _require_one_meaning(labels: Labels, values: Sequence[Any], field: str) -> None:
    """Raise :class:`RecipeError` if the numbers in the data are indices and also what the names of labels say.

    For the labels true and false, 1 can be the index of false; for the labels 1 star to 5 stars, 1 is the index of 2
    stars.
    """
    meanings = [_number_in(name) for name in labels.names]
    if len(meanings) == 2 and field in labels.names:
        # The field says whether a text has the label.
        meanings = [int(name == field) for name in labels.names]
    if None in meanings:
        return
    numbers = set()
    for value in values:
        for each in list_of(value) or [value]:
            if labels.named(each) is None and whole_number(each) is not None:
                numbers.add(whole_number(each))
    differing = [number for number in numbers & set(meanings) if meanings.index(number) != number]
    if not differing or not numbers <= set(meanings):
        return
    label = labels.names[meanings.index(differing[0])]
    raise RecipeError(
        "the numbers of labels can be read in two ways",
        where=f"{_KEY}, {field}",
        value=f"{differing[0]}: as an index, and by its name the label {label}",
        hint=f"set {_KEY}: indices for indices; otherwise write the names into the data, or list the numbers as "
        f"classification.labels: {[str(n) for n in meanings]}",
    )


def _number_in(name: str) -> int | None:
    """The number that the name of a label says: of a boolean, or the only one in it."""
    if name.casefold() in BOOLEANS:
        return BOOLEANS[name.casefold()]
    found = re.findall(r"[0-9]+", name)
    return int(found[0]) if len(found) == 1 and len(found[0]) < 10 else None
