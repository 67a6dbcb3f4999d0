"""What ``build_trainable`` is asked to build: the input of each of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.training.model.sections import activation_mode, row_multiple

_FEATURES = "FEATURE_EXTRACTION"
_CLASSIFICATION = "SEQ_CLS"
"""peft's name of the task of a model without an output layer."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A model to build, by the sections of a recipe, for the ranks of a device mesh. No step changes it."""

    config: RecipeConfig
    """The recipe, with the data types of this device."""
    layout: RankLayout
    auto_class: Any
    """The class of transformers whose ``from_pretrained`` and ``from_config`` make the model."""
    task_type: str | None
    """peft's name of the task; None if peft has no class of models for it."""
    preprocessor: Any
    """The tokenizer or processor; None if there is none."""
    model_config: PreTrainedConfig | None
    """The transformers configuration; None for a model by ``_target_``."""
    shares_rows: bool
    """Whether samples may share rows without padding, if the model supports it."""
    packs_images: bool
    """Whether the samples of ``packed_sequence`` have images."""
    uses_dropout: bool
    """Whether a model that is trained keeps its dropout."""
    is_trained: bool
    """Whether parameters get gradients; otherwise the model is frozen and in evaluation mode."""
    is_dry_run: bool
    """Whether the model stays on the meta device, to be counted."""
    keeps_masters: bool
    """Whether parameters that are trained beside a base in 16 bits get float32."""
    keeps_frozen_types: bool
    """Whether frozen parameters keep the 16 bits of their files."""

    @property
    def has_task_head(self) -> bool:
        """Whether the model has a classification head, which its pretrained files may lack."""
        return self.task_type == _CLASSIFICATION

    @property
    def predicts_tokens(self) -> bool:
        """Whether the output layer computes logits of tokens."""
        return not self.has_task_head and self.task_type != _FEATURES

    @property
    def offloads_activations(self) -> bool:
        """Whether activations are kept in the memory of the host between the passes."""
        return self.is_trained and activation_mode(self.config.model) == "offload"

    @property
    def row_multiple(self) -> int:
        """Rows are padded to a multiple of this many tokens."""
        return row_multiple(self.config, self.layout)
