"""Training of encoder-decoder models such as T5 and BART on pairs of a source and a target text.

The encoder reads the source, and the decoder learns to write the target. A micro-batch has transformers' form:
position i of the decoder predicts label i. The inputs of the decoder are the labels as the model itself shifts them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig

from automodel_ckpt.config.callables.plugins import build
from automodel_ckpt.config.recipe_rules import Unsupported
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.collate import IGNORE_INDEX, Tensors
from automodel_ckpt.data.seq2seq import SourceTargetCollator
from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.loss.causal import in_numpy
from automodel_ckpt.models.inspect.interface import class_and_message, model_without_adapters
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.model.trainable import Trainable
from automodel_ckpt.training.parts.objective import Objective


def shifted(model: Any, labels: Tensor) -> Tensor:
    """The inputs of the decoder [B, T] for *labels* [B, T], as *model* shifts them."""
    inner = model_without_adapters(model)
    shift = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
    # FSMT writes into its argument.
    labels = labels.clone()
    if shift is not None:
        return shift(labels=labels)  # type: ignore[no-any-return]
    config = inner.config
    # Blenderbot and M2M100 have the function alone. fsdp2 derives a class in another module.
    for kind in type(inner).__mro__:
        function = getattr(sys.modules[kind.__module__], "shift_tokens_right", None)
        if function is not None:
            return function(labels, config.pad_token_id, config.decoder_start_token_id)  # type: ignore[no-any-return]
    raise RecipeError(
        "this model does not state how decoder_input_ids, which dataloader.collate_fn can return, follow from labels",
        where="model",
        value=type(inner).__name__,
    )


def start_token(config: PreTrainedConfig | None) -> int | None:
    """The token with which the decoder starts.

    Returns None when the configuration does not state it (mBART: the language).
    """
    token = getattr(config, "decoder_start_token_id", None)
    if token is None:
        # T5Gemma.
        token = getattr(getattr(config, "decoder", None), "bos_token_id", None)
    return token if isinstance(token, int) else None


def check_forward(config: PreTrainedConfig) -> None:
    """Raise :class:`RecipeError` for a model with another loss than next-token prediction, or with a loss that depends
    on earlier passes."""
    # ProphetNet predicts later tokens too. NLLB's experts keep the capacity that an evaluation pass computes.
    for name, needed in (("ngram", 1), ("moe_eval_capacity_token_fraction", 0.0)):
        value = getattr(config, name, needed)
        if value > needed:
            raise RecipeError(
                "the recipe seq2seq does not train models with this setting",
                where="model",
                value=f"a {config.model_type} model with {name}: {value}",
                hint=f"set model.config_overrides: {{{name}: {needed}}}, or use another model, such as BART",
            )


def check_shift(model: Any, config: PreTrainedConfig) -> None:
    """Raise :class:`RecipeError` if the inputs of the decoder of *model* cannot follow from labels."""
    token = 1 if getattr(config, "pad_token_id", None) == 0 else 0
    found = ""
    try:
        first = int(shifted(model, torch.tensor([[token, token]]))[0, 0])
        size = getattr(config.get_text_config(decoder=True), "vocab_size", None)
        if size is not None and not 0 <= first < size:
            found = f"it starts with token {first} of {size}"
    except RecipeError:
        raise
    except Exception as error:
        found = class_and_message(error)
    if found:
        raise RecipeError(
            "the inputs of the decoder cannot follow from the labels",
            where="model",
            value=found,
            hint="set decoder_start_token_id and pad_token_id in model.from_config, or in model.config_overrides",
        )


_NO_PARTS = "the rows of the encoder and of the decoder cannot be divided among ranks"


class Seq2SeqObjective(Objective):
    """The loss of predicting each token of a target from the source and the tokens of the target before it."""

    def num_labels_of(self, micro_batch: Tensors) -> int:
        """Count the labels of *micro_batch*, including the labels of the first positions."""
        return int(np.count_nonzero(in_numpy(micro_batch["labels"]) != IGNORE_INDEX))

    def num_tokens_of(self, micro_batch: Tensors) -> int:
        """Count the tokens of the sources of *micro_batch*, and the labels."""
        mask = micro_batch.get("attention_mask")
        sources = (
            micro_batch["input_ids"].numel() if mask is None else np.count_nonzero(in_numpy(mask))
        )
        return self.num_labels_of(micro_batch) + int(sources)

    def rows_of(self, micro_batch: Tensors) -> Tensors:
        """The rows as the model sees them, with the inputs of the decoder. The labels get a first position without a
        label, so that each one is the next token of the position before, as in rows of a decoder."""
        labels = micro_batch["labels"]
        self.check_length(max(labels.shape[1], micro_batch["input_ids"].shape[1]))
        rows = dict(micro_batch)
        if "decoder_input_ids" not in rows:
            rows["decoder_input_ids"] = shifted(self.model, labels)
        rows["labels"] = F.pad(labels, (1, 0), value=IGNORE_INDEX)
        return rows

    def _part_of_row(self, length: int) -> slice:
        # The decoder computes as many positions as there are labels; the first position of rows_of is not one of them.
        return slice(0, length - 1)


class Seq2Seq(LLMFinetune):
    """Trains ``model``, an encoder and a decoder, to write the targets of ``dataset``."""

    auto_class = AutoModelForSeq2SeqLM
    task_type = "SEQ_2_SEQ_LM"
    shares_rows = False
    objective_class = Seq2SeqObjective
    unsupported = (
        Unsupported(
            "model._target_",
            "the inputs of the decoder depend on the model's configuration",
            "set model.from_pretrained or model.from_config",
        ),
        Unsupported("model.mtp", "multi-token prediction is defined for decoders alone"),
        Unsupported(
            "packed_sequence", "the encoder and the decoder have rows of different lengths"
        ),
        Unsupported("model.neftune_alpha", "its noise is defined for rows of one part of a model"),
        Unsupported("evaluation", "benchmarks complete prompts"),
        Unsupported("distributed.tp_size", _NO_PARTS, "remove tp_size: fsdp2 shards any model"),
        Unsupported("distributed.pp_size", _NO_PARTS, "remove pp_size: fsdp2 shards any model"),
        Unsupported("distributed.cp_size", _NO_PARTS),
    )

    def config_problems(self) -> list[Problem]:
        """List what the recipe does not support in its configuration."""
        problems = super().config_problems()
        if self.config.compile.enabled:
            what = "the recipe seq2seq does not support compile"
            problems.append(Problem(what, "compile.enabled", True, "remove the key"))
        return problems

    def build_model_config(self) -> PreTrainedConfig | None:
        """Read the configuration of the model. Raises :class:`RecipeError` for a model that is no encoder-decoder."""
        config = super().build_model_config()
        assert config is not None  # a model by _target_ is not supported
        if not config.is_encoder_decoder:
            raise RecipeError(
                "the recipe seq2seq trains models with an encoder and a decoder for texts",
                where="model",
                value=f"a {config.model_type} model",
            )
        check_forward(config)
        if not hasattr(config, "decoder_start_token_id") and not hasattr(config, "decoder"):
            # T5: the files of the pretrained models state the padding token; a fresh configuration has no value.
            config.decoder_start_token_id = config.pad_token_id
        return config

    def build_trainable(
        self, config: RecipeConfig | None = None, *, is_trained: bool = True
    ) -> Trainable:
        """Build the model, and check that it makes the inputs of its decoder if no ``collate_fn`` of the user does."""
        trainable = super().build_trainable(config, is_trained=is_trained)
        assert self.model_config is not None
        if self.config.dataloader.collate_fn is None:
            check_shift(trainable.model, self.model_config)
        return trainable

    def build_dataset(self, section: Target) -> Any:
        """Build the data set that a section names."""
        return build(
            section, tokenizer=self.tokenizer, start_token_id=start_token(self.model_config)
        )

    def usual_collate_fn(self) -> Any:
        """Build a collator that pads sources and targets."""
        padding = getattr(self.tokenizer, "pad_token_id", None)
        if padding is None:
            assert self.model_config is not None
            padding = getattr(self.model_config, "pad_token_id", None) or 0
        return SourceTargetCollator(padding, self.config.dataloader.pad_to_multiple_of)

    def labels_in_words(self, micro_batch: Mapping[str, Tensor]) -> list[str]:
        """The target of each sample of *micro_batch* as text, for ``--show-samples``."""
        texts = []
        for row in micro_batch["labels"].tolist():
            tokens = [token for token in row if token != IGNORE_INDEX]
            if self.tokenizer is None:
                texts.append(" ".join(map(str, tokens)) or "(nothing)")
            else:
                texts.append(self.tokenizer.decode(tokens) or "(nothing)")
        return texts
