"""What a model's tensors are called in Hugging Face files, where that differs from their names in memory.

transformers renames while it loads: a LLaVA file's ``language_model.model.embed_tokens.weight`` is
``model.language_model.embed_tokens.weight`` in memory. Its ``save_pretrained`` renames back, since that is what other
readers of such files expect; so do checkpoints.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

log = logging.getLogger(__name__)


def names_in_files(model: nn.Module, base_dir: Path | None = None) -> dict[str, str]:
    """{name in memory: name in files} of the tensors whose names differ; call it before the model is sharded.

    A name that stands in the base model's own files, in *base_dir*, is kept. Nothing is renamed where transformers
    would split or merge tensors too.
    """
    if not isinstance(model, PreTrainedModel):
        return {}
    names = list(model.state_dict(keep_vars=True))
    markers = {name: torch.tensor(number) for number, name in enumerate(names)}
    try:
        reverted = revert_weight_conversion(model, markers)
        found = {names[int(marker)]: name for name, marker in reverted.items()}
    except Exception as error:  # an operation on tensors, which markers are too small for
        log.debug("tensors keep their names of memory in files: %s: %s", type(error).__name__, error)
        return {}
    if found.keys() != set(names):
        return {}
    kept = _names_of(base_dir) if base_dir is not None else set()
    return {fqn: name for fqn, name in found.items() if name != fqn and fqn not in kept}


def _names_of(base_dir: Path) -> set[str]:
    index, single = base_dir / "model.safetensors.index.json", base_dir / "model.safetensors"
    if index.is_file():
        return set(json.loads(index.read_bytes())["weight_map"])
    if not single.is_file():
        return set()
    with safe_open(single, "pt") as file:
        return set(file.keys())
