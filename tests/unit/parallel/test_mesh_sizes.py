"""The grid of ranks, from numbers alone."""

import pytest
import torch
from torch.distributed import ProcessGroup

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.mesh_sizes import (
    RankLayout,
    Sizes,
    choose_strategy,
    require_replicas,
    share_out,
)


def layout(rank: int, sizes: Sizes) -> RankLayout:
    return RankLayout(rank, sizes, rank, torch.device("cpu"), ProcessGroup(rank, sizes.world))


def test_data_parallel_ranks_are_what_the_other_sizes_leave() -> None:
    assert share_out(8, tp_size=2) == Sizes(dp_shard=4, tp=2)
    assert share_out(8, tp_size=2, dp_replicate_size=2) == Sizes(dp_replicate=2, dp_shard=2, tp=2)
    assert share_out(8, dp_size=2, pp_size=2, tp_size=2).world == 8
    assert str(share_out(8, tp_size=2, dp_replicate_size=4)) == "dp_replicate 4 x tp 2"
    assert str(share_out(1)) == "one rank"


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


def test_auto_shards_over_data_parallel_ranks_where_there_are_several() -> None:
    grids = [share_out(1), share_out(2, tp_size=2), share_out(2)]
    assert [choose_strategy("auto", sizes) for sizes in grids] == ["single", "single", "fsdp2"]
    assert choose_strategy("single", share_out(2, tp_size=2)) == "single"
    assert choose_strategy("ddp", share_out(2)) == "ddp"
    assert choose_strategy("auto", share_out(2, cp_size=2)) == "fsdp2"


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


def test_tensor_parallel_ranks_share_a_part_of_the_data_and_one_of_them_speaks_for_it() -> None:
    grid = Sizes(dp_replicate=2, dp_shard=2, tp=2, pp=2)
    places = [layout(rank, grid) for rank in range(grid.world)]
    assert [place.dp_rank for place in places] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert [place.tp_rank for place in places] == [0, 1] * 8
    assert [place.pp_rank for place in places] == [0] * 8 + [1] * 8
    assert sorted(place.dp_rank for place in places if place.reports) == [0, 1, 2, 3]
    assert places[0].world_size == 16
    assert places[0].dp_size == 4


def test_context_parallel_ranks_share_samples_but_each_has_tokens_and_random_numbers_of_its_own() -> (
    None
):
    grid = Sizes(dp_shard=2, cp=2, tp=2)
    places = [layout(rank, grid) for rank in range(grid.world)]
    assert [place.dp_rank for place in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place.cp_rank for place in places] == [0, 0, 1, 1] * 2
    assert [place.random_stream for place in places] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [place.rank for place in places if place.reports] == [0, 4]
    assert [place.rank for place in places if place.reports_loss] == [0, 2, 4, 6]
    assert str(grid) == "dp_shard 2 x cp 2 x tp 2"
