"""Two checks of a recipe on two ranks: it trains like one process, and a killed run continues exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import ranks
from tests.support.runs.training import steps_of, train

Training = Callable[..., Callable[[], Any]]
"""``training(recipe file, name, *options)`` -> what trains on each rank, in the directory *name* next to the file."""


class Way(NamedTuple):
    """The options of a run on two ranks, and those that the run of one process has, too."""

    of_ranks: tuple[str, ...]
    of_both: tuple[str, ...] = ()


def check_like_one_process(
    recipe: Path,
    training: Training,
    logged: Callable[[Path], list[float]],
    ways: Mapping[str, Way],
    whole: str,
) -> None:
    """Train in each of the *ways* on two ranks, and with the option *whole* in one process.

    The values that *logged* finds in the directories of both runs have to be nearly the same.
    """
    alone = {way.of_both: f"one-{name}" for name, way in ways.items()}
    ranks.run_each([training(recipe, name, whole, *both) for both, name in alone.items()], 1)
    ranks.run_each(
        [training(recipe, name, *way.of_both, *way.of_ranks) for name, way in ways.items()], 2
    )
    for name, way in ways.items():
        expected = logged(recipe.parent / alone[way.of_both])
        assert expected
        assert logged(recipe.parent / name) == pytest.approx(expected, rel=1e-4), name


def check_killed_run(recipe: Path, training: Training, *options: str) -> None:
    """Kill a run of two ranks after five steps, and resume it: it ends as one that was not killed."""
    dying = partial(train, recipe, dies_after=5)
    killed = f"--checkpoint.checkpoint_dir={recipe.parent / 'killed'}"
    ended = ranks.outcomes(dying, 2, *options, killed, init=False)
    assert -9 in [outcome.exitcode for outcome in ended]
    both = [training(recipe, name, *options) for name in ("killed", "whole")]
    resumed, whole = ranks.run_each(both, 2)
    assert resumed == whole
    assert steps_of(recipe.parent / "killed") == steps_of(recipe.parent / "whole")
