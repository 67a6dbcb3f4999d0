"""Whether all ranks were started alike: each machine reads its own copy of the recipe, the software and the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import yaml
from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint.saving.environment import version_of
from automodel_ckpt.distributed import agree
from automodel_ckpt.errors import Problem, RecipeError

SHOWN = 5
"""At most so many keys are named."""


@dataclass(frozen=True, slots=True)
class Start:
    """What one rank was started with: the recipe as run, and versions by package."""

    config_yaml: str
    versions: Mapping[str, str | None]


def validate_equal_on_all_ranks(config_yaml: str, group: ProcessGroup | None) -> None:
    """Raise :class:`RecipeError`, the same on all ranks, where one was started with another recipe than rank 0, or has
    other versions of what computes. Called on all ranks. ``${oc.env:NAME}`` may differ in value: it is compared as
    written."""
    if agree.size(group) == 1:
        return
    mine = Start(config_yaml, _versions())
    first = agree.broadcast_object(group, mine)
    found = [] if mine == first else list(_differences(first, mine))
    agree.all_or_nothing(group, RecipeError.all_of(found) if found else None)


def validate_equal_lengths(name: str, num_samples: int | None, group: ProcessGroup | None) -> None:
    """Raise :class:`RecipeError`, the same on all ranks, where the data set of the section *name* has not *num_samples*
    on all of them: some ranks would go on to an epoch's next step when others have none. Called on all ranks."""
    numbers = agree.gather_objects(group, num_samples)
    unlike = [
        f"{number} on rank {rank}" for rank, number in enumerate(numbers) if number != numbers[0]
    ]
    if unlike:
        raise RecipeError(
            "the ranks do not have the same data: their data sets are not equally long",
            where=name,
            value=f"{numbers[0]} samples on rank 0, {', '.join(unlike[:SHOWN])}",
            hint="give all machines the same files, best on storage that they share",
        )


def _versions() -> dict[str, str | None]:
    """Without the build (``+cu128``): mixed hardware may need several."""
    torchs, _, _ = torch.__version__.partition("+")
    return {
        "automodel_ckpt": version_of("automodel-ckpt"),
        "torch": torchs,
        "transformers": transformers.__version__,
    }


def _differences(first: Start, mine: Start) -> Iterator[Problem]:
    versions = [
        f"{name} {mine.versions[name]}, not {there}"
        for name, there in first.versions.items()
        if mine.versions[name] != there
    ]
    if versions:
        hint = "install the same versions on all machines"
        yield Problem(
            "this rank has other software than rank 0", "versions", "; ".join(versions), hint
        )
    there, here = (dict(_leaves(yaml.safe_load(start.config_yaml), "")) for start in (first, mine))
    keys = [key for key in there | here if str(there.get(key)) != str(here.get(key))]
    if keys:
        values = "; ".join(f"{key}: {here.get(key)}, not {there.get(key)}" for key in keys[:SHOWN])
        yield Problem(
            "this rank was started with another recipe than rank 0",
            ", ".join(keys[:SHOWN])
            + (f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""),
            values,
            "give all machines the same recipe and overrides; what has to differ can be written ${oc.env:NAME}",
        )


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
