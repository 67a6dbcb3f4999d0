"""The config of a recipe's model as a file, for weights of other programs that are converted to its names."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.convert.names.registry import model_types


@contextlib.contextmanager
def config_directory(modules: Mapping[str, nn.Module]) -> Iterator[Path | None]:
    """Yield a temporary directory with the config.json of the module ``model``; None if no names are converted to it.

    Weights of Megatron and torchtitan do not always state which model they are for. The model of the recipe does.
    """
    config: Any = None
    if "model" in modules:
        config = getattr(unwrap(modules["model"]), "config", None)
    if getattr(config, "model_type", None) not in model_types():
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="automodel_ckpt-config-") as directory:
        content = json.loads(config.to_json_string(use_diff=False))
        Path(directory, "config.json").write_text(json.dumps(content))
        yield Path(directory)
