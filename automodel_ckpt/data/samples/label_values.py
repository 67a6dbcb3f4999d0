"""How the labels in data are read: as names, as indices, or as a 0 or 1 for each label.

A single row often allows several readings, so all rows decide. If they allow two, the recipe has to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from automodel_ckpt.data.conversations.messages import UnusableSample
from automodel_ckpt.data.samples.labels import BOOLEANS, Labels, list_of, whole_number
from automodel_ckpt.errors import RecipeError

LabelValues = Literal["auto", "indices", "one_hot"]
Reading = Callable[[Any], list[float]]
"""Converts the label of a sample as :meth:`Labels.targets` does."""
_FLAGS = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}
_KEY = "dataset.label_values"


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
                hint="remove it, or set classification.problem: multi_label",
            )
        return one_hot
    if how == "indices":
        return partial(labels.targets, indices=True)
    are_indices = classes is None or list(classes) == [str(n) for n in range(len(classes))]
    is_unnamed = list(labels.names) == [f"LABEL_{n}" for n in range(len(labels.names))]
    if classes is not None and not are_indices and (not is_unnamed or _is_regression(labels)):
        return partial(_of_classes, labels, classes)
    if labels.problem == "multi_label" and _are_one_hot(labels, values, field):
        return one_hot
    if not _is_regression(labels):
        _require_one_meaning(labels, values, field)
    return labels.targets


def _is_regression(labels: Labels) -> bool:
    return labels.problem == "regression"


def _one_hot(labels: Labels, value: Any) -> list[float]:
    flags = [_FLAGS.get(str(each).casefold()) for each in list_of(value) or ()]
    known = [flag for flag in flags if flag is not None]
    if not len(known) == len(flags) == len(labels.names):
        raise UnusableSample(
            "a sample does not have a 0 or 1 for each label",
            value,
            f"give {len(labels.names)} of them, in the order {labels.listed()}",
        )
    return known


def _of_classes(labels: Labels, classes: Sequence[str], value: Any) -> list[float]:
    """Convert numbers that stand for names: the order of these can differ from that of the labels."""
    values = list_of(value)
    if values is not None:
        return labels.targets([_class_name(labels, classes, each) for each in values])
    return labels.targets(_class_name(labels, classes, value))


def _class_name(labels: Labels, classes: Sequence[str], value: Any) -> Any:
    number = whole_number(value)
    if number is None or not 0 <= number < len(classes):
        return value
    name = classes[number]
    if name in labels.names or _is_regression(labels):
        return name
    raise UnusableSample(
        "a class of the data is not one of classification.labels",
        f"{number}, which the data names {name!r}",
        f"the data has {', '.join(classes[:10])}, and the labels are {labels.listed()}: use the names of the data in "
        f"any order, or set {_KEY}: indices if both have the same order",
    )


def _are_one_hot(labels: Labels, values: Sequence[Any], field: str) -> bool:
    """Whether lists are a 0 or 1 for each label. Raises :class:`RecipeError` if they can be indices as well."""
    named, flags = _read_all(labels.targets, values), _read_all(partial(_one_hot, labels), values)
    if named is None and flags is None:
        # The error of a row is the one of the reading that the first row has.
        return len(values) > 1 and _are_one_hot(labels, values[:1], field)
    if named is None or flags is None or named == flags:
        return named is None
    row = next(n for n, targets in enumerate(named) if targets != flags[n])
    raise RecipeError(
        "the lists of labels can be read in two ways",
        where=f"{_KEY}, {field}",
        value=f"{values[row]}: as indices {labels.describe(named[row])}, as a 0 or 1 for each label "
        f"{labels.describe(flags[row])}",
        hint=f"set {_KEY}: indices or one_hot, or give names",
    )


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
    meanings = {_number_in(name): index for index, name in enumerate(labels.names)}
    if len(labels.names) == 2 and field in labels.names:
        # The field says whether a text has the label.
        index = labels.names.index(field)
        meanings = {1: index, 0: 1 - index}
    if None in meanings or len(meanings) < len(labels.names):
        return
    numbers = set()
    for value in values:
        for each in list_of(value) or [value]:
            if labels.named(each) is None:
                numbers.add(whole_number(each))
    numbers.discard(None)
    others = sorted(n for n in numbers if n is not None and meanings.get(n) != n)
    if not others or not numbers <= meanings.keys() or max(others) >= len(labels.names):
        return
    number = others[0]
    raise RecipeError(
        "the numbers of labels can be read in two ways",
        where=f"{_KEY}, {field}",
        value=f"{number}: as an index {labels.names[number]}, by the names of the labels "
        f"{labels.names[meanings[number]]}",
        hint=f"set {_KEY}: indices for indices; otherwise write the names into the data, or list the numbers as "
        f"classification.labels: {[str(n) for n in meanings]}",
    )


def _number_in(name: str) -> int | None:
    """The number that the name of a label says: of a boolean, or the only one in it."""
    if name.casefold() in BOOLEANS:
        return BOOLEANS[name.casefold()]
    found = re.findall(r"[0-9]+", name)
    return int(found[0]) if len(found) == 1 and len(found[0]) < 10 else None
