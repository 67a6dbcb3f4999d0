"""The file of model states of a DeepSpeed checkpoint: shapes, tied names, counters, schedule, and other entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.sources.source import unusable
from automodel_ckpt.convert.formats.deepspeed.deepspeed_files import (
    Shape,
    StateFile,
    parallelism_error,
    rank_files,
)
from automodel_ckpt.convert.formats.format import Counters

# What the files of model states contain beside the model, with its name for the user.
_STATE_NAMES = {
    "lr_scheduler": "learning-rate schedule (lr_scheduler)",
    "data_sampler": "data position (data_sampler)",
    "random_ltd": "schedule of random layer token drop (random_ltd)",
    "optimizer": "optimizer state (optimizer)",
}
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_MODEL_KEYS = {
    "module",
    "buffer_names",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "universal_checkpoint_info",
    "ds_config",
    "ds_version",
    "num_experts",
    "ds_autoep_layers",
}


def model_states(tag: Path) -> StateFile:
    """Return the states of the model that rank 0 saved. Raises :class:`CheckpointUnusable`."""
    states = StateFile(tag, rank_files(tag).model[0])
    _check_states(states)
    return states


def _check_states(states: StateFile) -> None:
    """Raise :class:`CheckpointUnusable` if the model was divided by more than ZeRO, as far as its states show."""
    if not isinstance(states.value, dict):
        kind = type(states.value).__name__
        raise unusable("this file has no states of a model", states.path, kind)
    states.mapping("module")
    ranks = states.value.get("mp_world_size")
    if type(ranks) is int and ranks > 1:
        kind = f"tensor parallelism (mp_world_size {ranks})"
        raise parallelism_error(states.path, kind, ranks)
    if states.value.get("ds_autoep_layers"):
        raise parallelism_error(states.path, "expert parallelism", "ds_autoep_layers")


def parameter_shapes(states: StateFile) -> list[dict[str, Shape]]:
    """Return the shapes of the trained parameters by name, one mapping for each parameter group."""
    value = states.value.get("param_shapes")
    if not isinstance(value, (list, tuple)):
        raise unusable("the shapes of the parameters are missing", states.path, "param_shapes")
    return [dict(states.shapes(group)) for group in value]


def tied_parameters(states: StateFile) -> dict[str, str]:
    """Return {name of a tied parameter: name of the parameter that has its data}."""
    found: dict[str, str] = {}
    for name, stored in states.optional_mapping("shared_params").items():
        found[states.checked_name(name)] = states.checked_name(stored)
    return found


def counters_of(states: StateFile) -> Counters:
    """Return the counters of steps, epochs and samples, as far as they are stored."""
    value = states.value
    return Counters(
        _count(value, "global_steps"), _count(value, "epoch"), _count(value, "global_samples")
    )


def _count(value: Mapping[Any, Any], key: str) -> int | None:
    """Return the counter *key* of the model's states; None if there is none."""
    number = value.get(key)
    return number if type(number) is int and number >= 0 else None


def omitted_entries(value: Mapping[Any, Any]) -> Iterator[str]:
    """Yield what the model's states contain beside the model, in words."""
    for key, text in _STATE_NAMES.items():
        if value.get(key) is not None:
            yield text
    counters: list[str] = []
    for key in _COUNTERS:
        number = value.get(key)
        if type(number) is int:
            counters.append(f"{key} {number}")
    if counters:
        yield f"counters ({', '.join(counters)})"
    known = {*_STATE_NAMES, *_COUNTERS, *_MODEL_KEYS}
    others = [str(key)[:40] for key in value if key not in known and isinstance(key, str)]
    if others:
        shown = ", ".join(name for name in others[:8] if name.isprintable())
        yield f"entries that the training script added ({shown})"
