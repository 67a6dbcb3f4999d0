"""The grid of ranks, from numbers alone."""

import pytest

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.mesh_sizes import (
    Sizes,
    choose_strategy,
    require_replicas,
    share_out,
)


@pytest.mark.parametrize(
    ("world_size", "sizes", "hint"),
    [
        (2, {"tp_size": 3}, "start a multiple of 3 ranks"),
        (6, {"tp_size": 2, "dp_size": 2}, "start 4 ranks, or remove dp_size to derive it"),
        (4, {"dp_replicate_size": 3}, "set it to a divisor of 4"),
        (4, {"dp_replicate_size": 2, "ep_size": 4}, "set it to a divisor of 2"),
        (6, {"tp_size": 2, "cp_size": 2}, "start a multiple of 4 ranks"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_refused(
    world_size: int, sizes: dict[str, int], hint: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        share_out(world_size, **sizes)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "sizes", "what"),
    [
        ("single", Sizes(dp_shard=2), "one data parallel rank"),
        ("single", Sizes(cp=2), "one data parallel rank"),
        ("ddp", Sizes(dp_replicate=2), "no shards"),
        ("ddp", Sizes(dp_shard=2, tp=2), "tensor parallel layers"),
    ],
)
def test_a_strategy_that_cannot_use_the_grid_is_refused(
    strategy: str, sizes: Sizes, what: str
) -> None:
    with pytest.raises(RecipeError, match=what):
        choose_strategy(strategy, sizes)


def test_only_ddp_and_hsdp_have_replicas() -> None:
    require_replicas("ddp", Sizes(dp_shard=2), "recipe.yaml:3")
    require_replicas("fsdp2", Sizes(dp_replicate=2, dp_shard=2), "recipe.yaml:3")
    for strategy, sizes in (("fsdp2", Sizes(dp_shard=4, tp=2)), ("single", Sizes())):
        with pytest.raises(RecipeError, match=r"no replicas to compare\n  where:  recipe.yaml:3"):
            require_replicas(strategy, sizes, "recipe.yaml:3")
