"""Create a base model with fresh weights on disk, so that adapters can be trained without a pretrained model."""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from automodel_ckpt.base.durable_io import fsync_directory, fsync_file
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.sources.model_files import CODE_FILES, read_files, save_preprocessor
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.build import build_model
from automodel_ckpt.models.inspect.repository import (
    RepositoryOptions,
    code_directory,
    damaged_config,
)

_ADDED = {"transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path"}
_WHERE = "peft.base_dir"


def make_base(
    directory: Path,
    config: PreTrainedConfig,
    *,
    auto_class: Any,
    dtype: str,
    seed: int,
    preprocessor: Any,
    repository: RepositoryOptions,
) -> bool:
    """Create a Hugging Face directory with a model of *config* and weights drawn from *seed*, unless it exists.

    Returns whether it was created. The directory appears complete or not at all. Raises :class:`RecipeError` if it
    cannot be written, or contains another model.
    """
    if directory.exists():
        _check_is_same_base(directory, config)
        return False
    with torch.random.fork_rng(devices=[]):
        # fork_rng restores the CPU generator only, so the accelerators' generators must not be seeded.
        torch.default_generator.manual_seed(seed)
        model: Any = build_model(config, auto_class=auto_class, dtype=dtype, repository=repository)
    partial = directory.with_name(f".{directory.name}.partial-{uuid.uuid4().hex}")
    try:
        partial.mkdir(parents=True)
        _save(model, partial, preprocessor, repository.revision)
        partial.rename(directory)
    except OSError as error:
        hint = f"set another directory in {_WHERE}"
        raise RecipeError.of_system(error, "the base model cannot be written", hint=hint) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _save(model: Any, directory: Path, preprocessor: Any, revision: str | None) -> None:
    model.save_pretrained(directory)
    code = code_directory(model, revision)
    if code is not None:
        for name, content in read_files(code, CODE_FILES).items():
            (directory / name).write_bytes(content)
    if preprocessor is not None:
        save_preprocessor(preprocessor, directory)
    # Before the rename: after a power failure, the final name must not contain empty files.
    for path in directory.iterdir():
        fsync_file(path)
    fsync_directory(directory)


def _settings(value: Any) -> Any:
    """The settings of a model and of its parts, without what a model adds to them when it is built or saved."""
    if isinstance(value, PreTrainedConfig):
        value = json.loads(value.to_json_string(use_diff=False))
    if not isinstance(value, dict):
        return value
    return {key: _settings(each) for key, each in value.items() if key not in _ADDED}


def _check_is_same_base(directory: Path, config: PreTrainedConfig) -> None:
    """Raise :class:`RecipeError` unless an existing base can be read and has the settings of the recipe."""
    if damaged := damaged_config(str(directory), _WHERE):
        hint = "restore the file, or remove the directory: the next start creates it again"
        raise RecipeError.all_of([replace(problem, hint=hint) for problem in damaged.problems])
    stored: ValueDict = {}
    if (directory / "config.json").is_file():
        # Not from JSON alone: infinity is a mapping in the file ({"__float__": "Infinity"}).
        stored, _ = PreTrainedConfig.get_config_dict(directory, local_files_only=True)
    differ: list[str] = []
    if stored:
        # Through the class: a file has no keys without a value, and one of another version of transformers can lack
        # keys with default values, also in the configurations of the parts of a model.
        found = _settings(type(config).from_dict(stored))
        wanted = _settings(config)
        differ = [key for key in sorted({*found, *wanted}) if found.get(key) != wanted.get(key)]
    if not stored or differ:
        reason = f"differs in {', '.join(differ[:5])}" if stored else "no config.json"
        raise RecipeError(
            "the directory of the base contains another model",
            where=_WHERE,
            value=f"{directory} ({reason})",
            hint="name another directory; or, to train on that model, name it in model.from_pretrained "
            "and leave from_config and base_dir out",
        )
