"""The section of the recipe ``sequence_classification``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from automodel_ckpt.config.tree.rules import AT_LEAST_1, Relation, Rule

LABEL_NAMES = Rule(
    lambda names: len(set(names)) == len(names) and all(names),
    "a list of names that are different and not empty",
)


@dataclass
class ClassificationConfig:
    """Labels that the recipe sequence_classification assigns to texts."""

    labels: list[str] = field(default_factory=list, metadata={"rules": (LABEL_NAMES,)})
    """Names of the labels, in the order of the model's outputs; empty: LABEL_0, LABEL_1, ... for num_labels, otherwise
    those of the pretrained classifier."""
    num_labels: int | None = field(default=None, metadata={"rules": (AT_LEAST_1,)})
    """Number of labels without names, or of the numbers that a regression predicts (null: 1)."""
    problem: Literal["single_label", "multi_label", "regression"] = "single_label"
    """single_label: each text has one label (cross-entropy); multi_label: any number of labels (binary cross-entropy of
    each); regression: numbers (mean squared error)."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            ("num_labels", "labels"),
            lambda section: section.num_labels is None or not section.labels,
            "labels and num_labels cannot be combined",
            "remove num_labels: it is the number of labels",
        ),
        Relation(
            ("num_labels", "labels", "problem"),
            lambda section: (
                section.problem != "single_label"
                or (section.num_labels or len(section.labels) or 2) > 1
            ),
            "a text that has one of a single label needs no model",
            "give at least 2 labels; set problem: multi_label for a label that a text may have or not, or "
            "problem: regression for a number",
        ),
    )
