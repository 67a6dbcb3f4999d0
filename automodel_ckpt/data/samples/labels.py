"""The labels of a classification: their names and order, and how the values in data are converted to numbers."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from automodel_ckpt.data.conversations.messages import UnusableSample
from automodel_ckpt.errors import RecipeError

Problem = Literal["single_label", "multi_label", "regression"]
BOOLEANS = {"false": 0, "no": 0, "true": 1, "yes": 1}
"""Names of labels that mean a boolean."""


@dataclass(frozen=True)
class Labels:
    """The *names* of the labels, in the order of the model's outputs, and the kind of *problem*.

    A regression predicts one number per name. Checkpoints store the labels: the weights of a head mean nothing without
    their order.
    """

    names: tuple[str, ...]
    problem: Problem

    def state_dict(self) -> dict[str, Any]:
        """The names and the kind of problem, as plain data."""
        return {"names": list(self.names), "problem": self.problem}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that a checkpoint has the same labels. Raises :class:`RecipeError` for others."""
        saved = Labels(tuple(state["names"]), state["problem"])
        if saved != self:
            raise RecipeError(
                "the checkpoint was trained with other labels",
                where="classification",
                value=f"{self}; the checkpoint has {saved}",
                hint="set the labels of the checkpoint in the same order, or start another run "
                "(checkpoint.checkpoint_dir) with init_from",
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
        if self.problem == "multi_label":
            return self._several(value, indices=indices)
        return self._numbers(value)

    def index(self, value: Any, *, indices: bool = False) -> int:
        """The index of a label that is given by its name or index. Raises :class:`UnusableSample` for others."""
        if indices and isinstance(value, bool):
            value = int(value)
        number = whole_number(value)
        named = None if indices and number is not None else self.named(value)
        if named is not None:
            return named
        has_numbers_as_names = any(name.isdecimal() for name in self.names)
        if number is None or (has_numbers_as_names and not indices):
            raise self._unknown(value)
        if not 0 <= number < len(self.names):
            raise UnusableSample(
                "a label is not one of the indices of labels",
                value,
                f"give an index from 0 to {len(self.names) - 1}, or a name: {self.listed()}",
            )
        return number

    def named(self, value: Any) -> int | None:
        """The index of the label that has *value* as its name: also 1.0 for 1, and booleans for yes or False."""
        number = whole_number(value)
        for spelling in [value, number]:
            if spelling is not None and str(spelling) in self.names:
                return self.names.index(str(spelling))
        word = str(value).casefold()
        if word in ("true", "false"):
            for index, name in enumerate(self.names):
                if BOOLEANS.get(name.casefold()) == BOOLEANS[word]:
                    return index
        return None

    def describe(self, targets: Sequence[float]) -> str:
        """The label in words that :meth:`targets` converted to numbers."""
        if self.problem == "single_label":
            return self.names[int(targets[0])]
        if self.problem == "multi_label":
            chosen = [name for name, one in zip(self.names, targets, strict=True) if one]
            return ", ".join(chosen) or "none"
        return ", ".join(f"{number:g}" for number in targets)

    def _several(self, value: Any, *, indices: bool) -> list[float]:
        values = list_of(value)
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

    def _numbers(self, value: Any) -> list[float]:
        values = list_of(value) or [value]
        numbers = [finite_number(each) for each in values]
        if None in numbers or len(numbers) != len(self.names):
            expected = "a number"
            if len(self.names) > 1:
                expected = f"a list of {len(self.names)} numbers (classification.num_labels)"
            raise UnusableSample(
                "the label of a sample is not what a regression predicts", value, f"give {expected}"
            )
        return [number for number in numbers if number is not None]

    def _unknown(self, value: Any) -> UnusableSample:
        near = difflib.get_close_matches(str(value), self.names, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        others = ""
        if isinstance(value, bool) or whole_number(value) is not None:
            others = ", or set dataset.label_values: indices (false is 0)"
        return UnusableSample(
            "a label is not one of classification.labels",
            value,
            f"{guess}the labels are {self.listed()}; correct this sample, or add its label{others}",
        )

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
