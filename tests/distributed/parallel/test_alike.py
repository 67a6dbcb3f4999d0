"""Ranks whose machines were given different recipes, software or data are refused before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.training.start import start_rank as rank_consistency
from tests.support import ranks

RECIPE = "optimizer: {lr: 1.0e-2}\nmodel:\n  sizes: [1, 2]\n  name: ${oc.env:BASE}\n"

VERSIONS = rank_consistency._versions()


def refusal(config_yaml: str, lengths: int | None = None, **versions: str) -> tuple[str, ...]:
    """What this rank reports; *versions* replace those that it has installed."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_consistency, "_versions", lambda: VERSIONS | versions)
            rank_consistency.validate_equal_on_all_ranks(config_yaml, dist.group.WORLD)
        rank_consistency.validate_equal_lengths("dataset", lengths, dist.group.WORLD)
    except RecipeError as error:
        return tuple(str(error).splitlines())
    return ()


CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({"config_yaml": "# other layout\n" + RECIPE.replace("[1, 2]", "\n  - 1\n  - 2")}, []),
    (
        {"config_yaml": RECIPE.replace("1.0e-2", "5.0e-3") + "seed: 7\n"},
        [
            "rank 1: this rank has another recipe, or other software, than rank 0",
            "  where:  optimizer.lr, seed",
            "  value:  optimizer.lr: 0.005, not 0.01; seed: 7, not None",
        ],
    ),
    (
        {"config_yaml": RECIPE, "torch": "2.4.0"},
        [
            "rank 1: this rank has another recipe, or other software, than rank 0",
            "  where:  versions.torch",
            f"  value:  versions.torch: 2.4.0, not {VERSIONS['torch']}",
        ],
    ),
    (
        {"config_yaml": RECIPE, "lengths": 43},
        [
            "the ranks do not have the same data: their data sets are not equally long",
            "  where:  dataset",
            "  value:  44 samples on rank 0, 43 on rank 1",
        ],
    ),
]


def test_ranks_with_another_recipe_software_or_data_are_refused_on_all() -> None:
    def each_case() -> list[tuple[str, ...]]:
        second = dist.get_rank() == 1
        return [
            refusal(**({"config_yaml": RECIPE, "lengths": 44} | (different if second else {})))
            for different, _ in CASES
        ]

    first, second = ranks.run(each_case, 2)
    assert first == second
    for reported, (_, lines) in zip(first, CASES, strict=True):
        assert list(reported[: len(lines)]) == lines
        assert bool(reported) == bool(lines)


def test_one_rank_asks_nobody() -> None:
    rank_consistency.validate_equal_on_all_ranks("no: [yaml", None)
    rank_consistency.validate_equal_lengths("dataset", 3, None)
