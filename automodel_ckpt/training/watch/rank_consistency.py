"""Checks that all ranks have the same recipe, software and data: each node reads its own copy of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import yaml
from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint.saving.environment import version_of
from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.parallel.ranks import agree

SHOWN = 5
"""The largest number of keys or ranks in a message."""


@dataclass(frozen=True, slots=True)
class Start:
    """The resolved recipe of one rank, and the versions of its packages by name."""

    config_yaml: str
    versions: Mapping[str, str | None]


def validate_equal_on_all_ranks(config_yaml: str, group: ProcessGroup | None) -> None:
    """Raise :class:`RecipeError` on all ranks if one has another recipe than rank 0, or other versions. A collective.

    The values of ``${oc.env:NAME}`` may differ: *config_yaml* contains the text of the reference.
    """
    if agree.size(group) == 1:
        return
    # The text has references to environment variables, not their values, which may be secrets.
    mine = Start(config_yaml, _versions())
    first = agree.broadcast_object(group, mine)
    found = [] if mine == first else list(_differences(first, mine))
    agree.all_or_nothing(group, RecipeError.all_of(found) if found else None)


def validate_equal_lengths(name: str, num_samples: int | None, group: ProcessGroup | None) -> None:
    """Raise :class:`RecipeError` on all ranks if the data set of the section *name* has not *num_samples* on all.

    With different lengths, some ranks would wait in a step of the epoch that others do not have. A collective.
    """
    numbers = agree.gather_objects(group, num_samples)
    different = []
    for rank, number in enumerate(numbers):
        if number != numbers[0]:
            different.append(f"{number} on rank {rank}")
    if different:
        raise RecipeError(
            "the ranks do not have the same data: their data sets are not equally long",
            where=name,
            value=f"{numbers[0]} samples on rank 0, {', '.join(different[:SHOWN])}",
            hint="give all machines the same files, best on storage that they share",
        )


def _versions() -> dict[str, str | None]:
    # Without the build (+cu128): nodes with different hardware may need different builds.
    torch_version, _, _ = torch.__version__.partition("+")
    return {
        "automodel_ckpt": version_of("automodel-ckpt"),
        "torch": torch_version,
        "transformers": transformers.__version__,
    }


def _differences(first: Start, mine: Start) -> Iterator[Problem]:
    versions = []
    for name, expected in first.versions.items():
        if mine.versions[name] != expected:
            versions.append(f"{name} {mine.versions[name]}, not {expected}")
    if versions:
        yield Problem(
            "this rank has other software than rank 0",
            "versions",
            "; ".join(versions),
            "install the same versions on all machines",
        )
    expected_leaves = dict(_leaves(yaml.safe_load(first.config_yaml), ""))
    leaves = dict(_leaves(yaml.safe_load(mine.config_yaml), ""))
    keys = []
    for key in expected_leaves | leaves:
        if str(expected_leaves.get(key)) != str(leaves.get(key)):
            keys.append(key)
    if keys:
        shown = keys[:SHOWN]
        more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
        values = [f"{key}: {leaves.get(key)}, not {expected_leaves.get(key)}" for key in shown]
        yield Problem(
            "this rank was started with another recipe than rank 0",
            ", ".join(shown) + more,
            "; ".join(values),
            "give all machines the same recipe and overrides; what has to differ can be written ${oc.env:NAME}",
        )


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
