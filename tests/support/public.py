"""Functions that recipes, guides and commands name, for tests: when a module moves, only this file changes."""

from __future__ import annotations

from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.export.export_manifest import export_problems
from automodel_ckpt.checkpoint.parts.verify import verify, verify_deep
from automodel_ckpt.convert.formats.format import ModelParameter, TrainingState
from automodel_ckpt.convert.formats.registry import detect, detect_run, formats_in
from automodel_ckpt.convert.open import open_source, open_weights
from automodel_ckpt.convert.targets.flow import export_to
from automodel_ckpt.data.batches.packing import PackedDataset
from automodel_ckpt.data.chat import messages
from automodel_ckpt.data.hellaswag import hellaswag
from automodel_ckpt.data.mixture import mixture
from automodel_ckpt.data.squad import squad
from automodel_ckpt.data.text import prompt_completion
from automodel_ckpt.data.token_files import megatron, nanogpt
from automodel_ckpt.examples.data.python_docs import train_tokenizer
from automodel_ckpt.integrations.transformers import CheckpointCallback

__all__ = [
    "CheckpointCallback",
    "ModelParameter",
    "PackedDataset",
    "StatefulRNG",
    "TrainingState",
    "consolidate",
    "detect",
    "detect_run",
    "export_problems",
    "export_to",
    "formats_in",
    "hellaswag",
    "megatron",
    "messages",
    "mixture",
    "nanogpt",
    "open_source",
    "open_weights",
    "prompt_completion",
    "squad",
    "train_tokenizer",
    "verify",
    "verify_deep",
]
