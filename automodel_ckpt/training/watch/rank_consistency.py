"""Checks that all ranks have the same recipe, software and data: each node reads its own copy of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
import yaml
from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint.saving.environment import version_of
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.ranks import agree

SHOWN = 5
"""The largest number of keys or ranks in a message."""


def validate_equal_on_all_ranks(config_yaml: str, group: ProcessGroup | None) -> None:
    """Raise :class:`RecipeError` on all ranks if one has another recipe than rank 0, or other versions. A collective.

    The values of ``${oc.env:NAME}`` may differ: *config_yaml* contains the text of the reference.
    """
    if agree.size(group) == 1:
        return
    # The text has references to environment variables, not their values, which may be secrets.
    mine = dict(_leaves({"versions": _versions(), **(yaml.safe_load(config_yaml) or {})}, ""))
    first = agree.broadcast_object(group, mine)
    different = [key for key in first | mine if str(first.get(key)) != str(mine.get(key))]
    problem = None
    if different:
        shown = different[:SHOWN]
        more = f" and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        problem = RecipeError(
            "this rank has another recipe, or other software, than rank 0",
            where=", ".join(shown) + more,
            value="; ".join(f"{key}: {mine.get(key)}, not {first.get(key)}" for key in shown),
            hint="give all machines the same recipe, overrides and versions; what has to differ can be written "
            "${oc.env:NAME}",
        )
    agree.all_or_nothing(group, problem)


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


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
