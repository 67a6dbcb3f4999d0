"""A base model with fresh weights on disk, for adapters to be trained on: what ``from_pretrained`` needs of one."""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from automodel_ckpt.durable_io import fsync_directory, fsync_file
from automodel_ckpt.errors import RecipeError, os_problem
from automodel_ckpt.models.build import build_model

log = logging.getLogger("automodel_ckpt")

_WHERE = "peft.base_dir"


def make_base(
    directory: Path,
    config: PreTrainedConfig,
    *,
    auto_class: Any,
    dtype: str,
    seed: int,
    preprocessor: Any,
) -> bool:
    """Have a Hugging Face directory of a model by *config*, its weights drawn from *seed*; returns whether it is new.

    It appears whole or not at all. Raises :class:`RecipeError` where it cannot be written, or another model's files
    stand there.
    """
    try:
        if directory.exists():
            _check_is_same_base(directory, config)
            return False
        partial = directory.with_name(f".{directory.name}.partial-{uuid.uuid4().hex}")
        partial.mkdir(parents=True)
        try:
            _fill(partial, config, auto_class, dtype, seed, preprocessor)
            partial.rename(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        problem = os_problem(
            error, "the base model cannot be written", hint=f"set another directory in {_WHERE}"
        )
        raise RecipeError.all_of([problem]) from error
    return True


def _fill(
    directory: Path,
    config: PreTrainedConfig,
    auto_class: Any,
    dtype: str,
    seed: int,
    preprocessor: Any,
) -> None:
    with torch.random.fork_rng(devices=[]):
        # fork_rng restores the CPU generator only, so the accelerators' generators must not be seeded.
        torch.default_generator.manual_seed(seed)
        model: Any = build_model(config, auto_class=auto_class, dtype=dtype)
    model.save_pretrained(directory)
    if preprocessor is not None:
        preprocessor.save_pretrained(directory)
    for path in directory.iterdir():
        fsync_file(path)
    fsync_directory(directory)
    log.info(
        "created a base with fresh weights: %s, %s parameters",
        type(model).__name__,
        f"{sum(p.numel() for p in model.parameters()):,}",
    )


def _check_is_same_base(directory: Path, config: PreTrainedConfig) -> None:
    """The settings of a base that stands there already must be those of the recipe."""
    path = directory / "config.json"
    stored = json.loads(path.read_bytes()) if path.is_file() else {}
    wanted = json.loads(config.to_json_string(use_diff=False))
    defaults = json.loads(type(config)().to_json_string(use_diff=False))
    ignored = {"transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path"}
    differ = [
        key
        for key in sorted({*stored, *wanted} - ignored)
        if stored.get(key, defaults.get(key)) != wanted.get(key, defaults.get(key))
    ]
    if not stored or differ:
        raise RecipeError(
            "the directory of the base contains another model",
            where=_WHERE,
            value=f"{directory} (differs in {', '.join(differ[:5])})"
            if stored
            else f"{directory} (no config.json)",
            hint="name another directory; or, to train on what stands there, name it in model.from_pretrained "
            "and leave from_config and base_dir out",
        )
