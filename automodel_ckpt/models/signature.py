"""What a model's files do not say: its tensors' names in memory, which of them are tied, which stand transposed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.models.hf_names import names_in_files

_TRANSPOSED = (Conv1D, nn.Embedding)


class ModelSignature(NamedTuple):
    """*files* maps each name in memory to that in the files, *tied* each further name of a tensor (in memory) to its
    first; the weights of the modules *transposed* have one row for each input."""

    files: Mapping[str, str]
    tied: Mapping[str, str]
    transposed: frozenset[str]


def outline(directory: Path) -> ModelSignature:
    """The outline of the transformers model in *directory*, built without memory. Raises :class:`CheckpointUnusable`
    where it is none of the library's own."""
    model = _empty_model(directory)
    renamed, stored = names_in_files(model, directory).names, _stored_names(directory)
    prefix: str = model.base_model_prefix
    files = {
        name: _spelled(renamed.get(name, name), prefix, stored)
        for name in model.state_dict(keep_vars=True)
    }
    transposed = {name for name, module in model.named_modules() if isinstance(module, _TRANSPOSED)}
    return ModelSignature(files, dict(model.all_tied_weights_keys), frozenset(transposed))


def _empty_model(directory: Path) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        model_class = getattr(transformers, (config.architectures or ["?"])[0])
        if not (
            isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
        ):
            raise ValueError(
                f"{config.architectures} is not a model"
            )  # the file may name any function
        with torch.device("meta"):
            return model_class(config)
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointUnusable(
            "the base is not a model of the transformers library",
            where=str(directory / "config.json"),
            value=str(error).strip()[:300],
            hint="load the base and the adapter with peft in your own code, and call merge_and_unload",
        ) from error


def _stored_names(directory: Path) -> set[str]:
    found: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found.update(file.keys())
    return found


def _spelled(name: str, prefix: str, stored: set[str]) -> str:
    """The name as the files have it: they may be without the *prefix* of the model inside, or have it in addition."""
    candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((candidate for candidate in candidates if candidate in stored), name)
