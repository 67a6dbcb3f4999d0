"""How a rank of a run starts: the process groups, stop requests, the log, and what torch sets per process."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.distributed as dist

from automodel_ckpt.base.hub_retries import quiet_retries
from automodel_ckpt.base.seeds import seed_everything
from automodel_ckpt.config.defaults import unused_without_checkpoints
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.parallel.mesh import RankLayout, close_distributed, init_distributed
from automodel_ckpt.parallel.precision import float32_precision, set_float32_precision
from automodel_ckpt.parallel.ranks.stop import PeerStop, StopRequest, stop_request
from automodel_ckpt.training.values.run_log import RunLog
from automodel_ckpt.training.watch.rank_consistency import validate_equal_on_all_ranks

log = logging.getLogger("automodel_ckpt")


class StartedRank(NamedTuple):
    """What a rank has after its start."""

    layout: RankLayout
    stop_request: StopRequest
    run_log: RunLog


def start_rank(config: RecipeConfig, config_yaml: str, resources: ExitStack) -> StartedRank:
    """Open the process groups and the log, and seed all ranks equally, so that they draw the same fresh weights.

    *config_yaml* is the text of the resolved recipe, which all ranks compare. *resources* gets what closes the groups
    and the log. Collective. Raises :class:`RecipeError` on all ranks if their recipes differ.
    """
    section = config.distributed
    if config.logging.trackers:
        from automodel_ckpt.logs.tracker_process import require_trackers

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
    quiet_retries()
    run_log = RunLog(config.logging, layout)
    resources.callback(run_log.close)
    if unused := unused_without_checkpoints(config):
        log.info(
            "nothing is saved, because checkpoint.enabled is false; no effect: %s",
            ", ".join(unused),
        )
    _apply_process_settings(config, layout.device.type)
    return StartedRank(layout, request, run_log)


def _apply_process_settings(config: RecipeConfig, device_type: str) -> None:
    """Set what torch has one value of per process: determinism, the precision of products, and the seeds."""
    if config.deterministic:
        # cuBLAS reads it when it is initialized; without it, deterministic algorithms raise on GPUs.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    set_float32_precision(float32_precision(config, device_type), device_type)
    seed_everything(config.seed)
