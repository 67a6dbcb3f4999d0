"""How a rank of a run starts: the process groups, stop requests, the log, and what torch sets per process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import transformers
import yaml
from torch.distributed import ProcessGroup

from automodel_ckpt.base.rng import seed_everything
from automodel_ckpt.base.version import __version__
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import unused_without_checkpoints
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.mesh import RankLayout, close_distributed, init_distributed
from automodel_ckpt.parallel.precision import float32_precision, set_float32_precision
from automodel_ckpt.parallel.ranks import agree
from automodel_ckpt.parallel.ranks.stop import PeerStop, StopRequest, stop_request
from automodel_ckpt.training.values.run_log import RunLog
from automodel_ckpt.training.watch.batch_errors import listed

log = logging.getLogger("automodel_ckpt")


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
        problem = RecipeError(
            "this rank has another recipe, or other software, than rank 0",
            where=listed(different),
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


def _versions() -> dict[str, str]:
    # Without the build (+cu128): nodes with different hardware may need different builds.
    torch_version, _, _ = torch.__version__.partition("+")
    return {
        "automodel_ckpt": __version__,
        "torch": torch_version,
        "transformers": transformers.__version__,
    }


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def start_rank(
    config: RecipeConfig, config_yaml: str, resources: ExitStack
) -> tuple[RankLayout, StopRequest, RunLog]:
    """Open the process groups and the log, and seed all ranks equally, so that they draw the same fresh weights.

    *config_yaml* is the text of the resolved recipe, which all ranks compare. *resources* gets what closes the groups
    and the log. Collective. Raises :class:`RecipeError` on all ranks if their recipes differ.
    """
    section = config.distributed
    if config.logging.trackers:
        from automodel_ckpt.logs.trackers import require_trackers

        require_trackers(config.logging.trackers, has_logs=config.checkpoint.enabled)
    # Registered before the groups exist: init_distributed may fail after it has opened some.
    resources.callback(close_distributed)
    layout = init_distributed(
        backend=section.backend,
        timeout_minutes=section.timeout_minutes,
        **section.mesh_sizes,
    )
    # First: with another learning rate on one node, its shards would train apart silently.
    validate_equal_on_all_ranks(config_yaml, layout.gloo_group)
    request = stop_request()
    if layout.world_size > 1:
        # torch has no public function for the default store.
        peer_stop = PeerStop(request, dist.distributed_c10d._get_default_store())
        resources.callback(peer_stop.close)
    if not sys.stderr.isatty():
        # A file would get each state of a progress bar.
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    run_log = RunLog(config.logging, layout)
    resources.callback(run_log.close)
    if unused := unused_without_checkpoints(config):
        log.info(
            "nothing is saved, because checkpoint.enabled is false; no effect: %s",
            ", ".join(unused),
        )
    if config.deterministic:
        # cuBLAS reads it when it is initialized; without it, deterministic algorithms raise on GPUs.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    device_type = layout.device.type
    set_float32_precision(float32_precision(config, device_type), device_type)
    seed_everything(config.seed)
    return layout, request, run_log


_PACKAGE = "automodel_ckpt."


def check_part(owner: object, method: str, part: object, kind: type) -> None:
    """Raise :class:`RecipeError` if the *part* that a *method* of a user's class returned is of another *kind*."""
    if not isinstance(part, kind):
        raise RecipeError(
            f"{method}() must return a {kind.__module__}.{kind.__name__}",
            where=f"{type(owner).__name__}.{method}",
            value=type(part).__name__,
            hint=f"return one, or the changed result of super().{method}()",
        )


_FORMER_METHODS = {
    "already_complete": "end",
    "build_benchmarks": "build_loop",
    "build_completions": "build_loop",
    "build_memory": "build_checkpointer",
    "build_replica_check": "build_saves",
    "build_step_scheduler": "build_training",
    "build_validation": "build_dataloader",
    "build_validation_sets": "build_dataloader",
    "check_benchmarks": "check_measurements",
    "check_metric_keys": "check_measurements",
    "finish_step": "step",
    "local_init_from": "fill_from_weights",
    "make_up_validation": "validate",
    "reference_name": "section",
    "reference_revision": "section",
    "set_generation": "build",
}
"""Methods of recipes and loops that earlier versions called, and what to override now."""


def check_classes(recipe: Any, base: Any) -> None:
    """Raise :class:`RecipeError` if *recipe* names a class of another kind than *base*, :class:`Recipe`, does.

    So is a method that nothing calls: one of earlier versions, and with a pipeline the loss or step of the recipe.
    """
    for owner in (type(recipe), recipe.loop_class):
        for name, present in _FORMER_METHODS.items():
            if hasattr(owner, name):
                raise RecipeError(
                    "a recipe overrides a method that is not called any more",
                    where=f"{owner.__name__}.{name}",
                    value=name,
                    hint=f"override {present} instead (docs/guides/write-a-recipe.md)",
                )
    own = []
    # What the recipes of this package add to an objective, the last stage applies.
    if not getattr(recipe.build_objective, "__module__", "").startswith(_PACKAGE):
        own.append(f"{type(recipe).__name__}.build_objective")
    for name, method in (
        ("loop_class", "train_step"),
        ("objective_class", "loss"),
        ("saves_class", ""),
    ):
        named, kind = getattr(recipe, name), getattr(base, name)
        if not isinstance(named, type) or not issubclass(named, kind):
            raise RecipeError(
                f"{name} of the recipe must be a subclass of {kind.__name__}",
                where=f"{type(recipe).__name__}.{name}",
                value=named,
                hint=f"derive the class from {kind.__module__}.{kind.__name__}",
            )
        if getattr(named, method, None) is not getattr(kind, method, None):
            own.append(f"{named.__name__}.{method}")
    if own and recipe.layout.in_stages:
        raise RecipeError(
            "a pipeline computes the loss stage by stage, and this recipe computes it in its own way",
            where="distributed.pp_size",
            value=own[0],
            hint="leave pp_size out; a recipe of yours can override Objective.row_loss, which the last stage calls",
        )


def check_model(recipe: Any) -> None:
    """Raise :class:`RecipeError` if ``build`` created no model, or replaced ``model`` alone: the loop would train the
    former one."""
    what = "the recipe's build() has created no model"
    hint = "call super().build() in it, and then add your own attributes"
    model = getattr(recipe, "model", None)
    if model is not None and hasattr(recipe, "trainable"):
        if model is recipe.trainable.model:
            return
        what = (
            "the recipe replaces model after build_trainable, and the loop trains trainable.model"
        )
        hint = "extend build_trainable to return dataclasses.replace(trainable, model=...)"
    where, value = f"{type(recipe).__name__}.build", type(model).__name__
    raise RecipeError(what, where=where, value=value, hint=hint)


def check_hidden_methods(recipe: object) -> None:
    """Raise :class:`RecipeError` if ``build`` gave an attribute the name of a method.

    It would be called in the method's place, perhaps hours later.
    """
    kind = type(recipe)
    for name, value in vars(recipe).items():
        if callable(getattr(kind, name, None)) and not callable(value):
            raise RecipeError(
                "an attribute hides a method of the recipe",
                where=f"{kind.__name__}.build",
                value=name,
                hint="give the attribute another name",
            )
