"""Checks that need the number of ranks: the sizes of the device mesh and of the batches. Imports no torch."""

from __future__ import annotations

import os

from automodel_ckpt.cli.launch.started_ranks import started_world_size
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.mesh_sizes import (
    Sizes,
    choose_strategy,
    require_replicas,
    share_out,
)


def known_ranks(flags: LaunchFlags) -> int | None:
    """Return the number of ranks, if the command line or the environment determines it; otherwise None."""
    world_size = started_world_size(os.environ, flags)
    if world_size:
        return world_size
    if flags.nproc_per_node.isdecimal() and flags.nnodes.isdecimal():
        return int(flags.nproc_per_node) * int(flags.nnodes)
    return None


def check_ranks(loaded: LoadedRecipe, ranks: int | None) -> None:
    """Raise :class:`RecipeError` if the recipe does not fit the number of *ranks*; None: the number is not known yet.

    Checked are the parallel sizes, the global batch size, and ``checkpoint.verify_replicas``.
    """
    if ranks is None:
        return
    sizes = mesh_sizes(loaded, ranks)
    if loaded.config.checkpoint.verify_replicas:
        strategy = choose_strategy(loaded.config.distributed.strategy, sizes)
        require_replicas(strategy, sizes, loaded.origins["checkpoint.verify_replicas"])
    steps = loaded.config.step_scheduler
    dp_size = sizes.dp
    if steps.global_batch_size % (steps.local_batch_size * dp_size) == 0:
        return
    global_batch = loaded.tree.at("step_scheduler.global_batch_size")
    local_batch = loaded.tree.at("step_scheduler.local_batch_size")
    raise RecipeError(
        "step_scheduler.global_batch_size must be a multiple of local_batch_size x ranks",
        where=loaded.origins["step_scheduler.global_batch_size"],
        value=f"global_batch_size: {global_batch}, local_batch_size: {local_batch}, ranks: {dp_size}",
        hint="change the global batch, the local batch or the number of ranks",
    )


def mesh_sizes(loaded: LoadedRecipe, ranks: int) -> Sizes:
    """Return the sizes of the device mesh of *ranks* ranks. Raises :class:`RecipeError` if they do not fit together."""
    section = loaded.config.distributed
    sizes = share_out(ranks, **section.mesh_sizes)
    choose_strategy(section.strategy, sizes)
    return sizes
