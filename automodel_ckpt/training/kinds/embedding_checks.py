"""What the recipe ``embedding`` does not support, and how it uses files of models with a head."""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import AutoModel, PreTrainedConfig

from automodel_ckpt.config.callables.plugins import callable_of
from automodel_ckpt.config.keys.kinds import EmbeddingConfig
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.models.attention.attention_direction import attend_both_ways, causal_layers
from automodel_ckpt.models.config_checks import sees_later_tokens
from automodel_ckpt.models.hf_names import tensor_names_in
from automodel_ckpt.models.inspect.forward import model_without_adapters
from automodel_ckpt.models.inspect.model_names import present_name
from automodel_ckpt.models.inspect.repository import fetched_directory
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.model_layers import decoder_layers
from automodel_ckpt.parallel.parallelize import reshard
from automodel_ckpt.parallel.ranks.agree import on_all_ranks
from automodel_ckpt.training.model.sections import data_sections, row_multiple
from automodel_ckpt.training.model.trainable import Trainable
from automodel_ckpt.training.unsupported import Unsupported

log = logging.getLogger("automodel_ckpt")

_DIVIDED = "embeddings are pooled from complete texts, which these ranks would divide"
UNSUPPORTED = (
    Unsupported("packed_sequence", "each text has a row, from which its embedding is pooled"),
    Unsupported("loss_fn", "the section embedding describes the loss"),
    Unsupported("generation", "a model without an output layer generates no text"),
    Unsupported("model.mtp", "no further token is predicted"),
    Unsupported("distributed.pp_size", _DIVIDED, "remove pp_size; tp_size and fsdp2 are supported"),
    Unsupported("distributed.cp_size", _DIVIDED, "remove cp_size; tp_size and fsdp2 are supported"),
)
"""The keys that the recipe does not support."""
_POOLER = "pooler.*"


def misplaced_in_data(
    config: RecipeConfig, names: Sequence[str], what: str, place: str
) -> list[Problem]:
    """Describe the arguments *names* in sections of data, for *what* reason. The key *place* NAME is the right one."""
    problems = []
    for key, each in data_sections(config).items():
        for name in names:
            if each is not None and name in each.kwargs:
                hint = f"set {place}{name.removeprefix('pair_')} instead"
                problems.append(Problem(what, f"{key}.{name}", str(each.kwargs[name]), hint))
    return problems


def check_architecture(model_config: PreTrainedConfig | None) -> None:
    """Raise :class:`RecipeError` for an encoder-decoder: its decoder would need texts as well."""
    if model_config is not None and getattr(model_config, "is_encoder_decoder", False):
        raise RecipeError(
            "the recipe embedding supports encoders and decoders, not both in one model",
            where="model",
            value=f"a {model_config.model_type} model",
            hint="use an encoder such as BERT, or a decoder such as Llama",
        )


def see_both_ways(config: RecipeConfig, model_config: PreTrainedConfig | None, where: str) -> bool:
    """Let the tokens of a decoder see later ones, because the key *where* is ``bidirectional``.

    Returns whether the model may not support it. Raises :class:`RecipeError` if it could not be exported.
    """
    if model_config is None:
        raise RecipeError(
            "the attention of a model by _target_ cannot be changed",
            where=where,
            value="bidirectional",
            hint="let your code build such a model, and remove the key",
        )
    if config.peft is not None and not sees_later_tokens(model_config):
        raise RecipeError(
            "adapters are loaded with the config of their base, in which tokens see only earlier ones",
            where=where,
            value="bidirectional, with peft",
            hint='remove the section peft; or train the adapters on a copy of the base with "is_causal": false in '
            "its config.json, without this key",
        )
    return attend_both_ways(model_config)


def check_attention(
    trainable: Trainable, config: RecipeConfig, layout: RankLayout, where: str
) -> None:
    """Raise :class:`RecipeError` if the model does not follow the setting with which tokens see later ones.

    A collective.
    """
    model = model_without_adapters(trainable.model)
    multiple = row_multiple(config, layout)
    layers = decoder_layers(model)
    with trainable.compute():
        causal = causal_layers(model, layers, multiple, trainable.forward_options)
    reshard(trainable.model)
    if on_all_ranks(layout.gloo_group, not causal):
        return
    numbers = ", ".join(map(str, causal[:4])) + (", ..." if len(causal) > 4 else "")
    raise RecipeError(
        "this model does not support bidirectional attention",
        where=where,
        value=f"{type(model).__name__}: tokens do not see later ones in layer {numbers} of {len(layers)}",
        hint="remove the key, or use a decoder such as Llama, Mistral, Qwen3 or Gemma",
    )


def with_backbone(config: RecipeConfig, model_config: PreTrainedConfig | None) -> RecipeConfig:
    """Return *config* with the settings for a model without a head, whatever the files of the base contain.

    * Tensors of a head are not used: those without the prefix of the backbone, if other tensors have it.
    * A pooler, a layer that BERT has after the encoder, is not part of an embedding. It is frozen, because it gets no
      gradient, for which ddp would wait, and gets no adapters. Files may lack it, and exports contain it unchanged.
    """
    section = config.model
    if not isinstance(section, ModelConfig) or model_config is None:
        return config
    # Private in transformers 5.17 to 5.24.
    found = AutoModel._model_mapping.get(type(model_config), ())
    classes: tuple[Any, ...] = found if isinstance(found, tuple) else (found,)
    section = replace(
        section, allow_unexpected=[*section.allow_unexpected, *_head_tensors(section, classes)]
    )
    if any("add_pooling_layer" in inspect.signature(each).parameters for each in classes):
        section = replace(
            section,
            freeze_if_present=[*section.freeze_if_present, _POOLER],
            allow_missing=[*section.allow_missing, _POOLER],
        )
        if config.peft is not None:
            excluded = [*config.peft.exclude_if_present, _POOLER]
            config = replace(config, peft=replace(config.peft, exclude_if_present=excluded))
    return replace(config, model=section)


def _head_tensors(section: ModelConfig, classes: Sequence[Any]) -> list[str]:
    """The names of tensors in the files of a pretrained model that are not of its backbone."""
    if section.from_pretrained is None:
        return []
    directory = fetched_directory(os.path.expanduser(section.from_pretrained), section.revision)
    if directory is None:
        return []
    names = tensor_names_in(directory)
    prefixes = tuple(f"{each.base_model_prefix}." for each in classes if each.base_model_prefix)
    heads = [name for name in names if not name.startswith(prefixes)]
    # The files of a backbone have no prefix at all.
    # Weights are compared under the names that transformers gives the weights of the first BERT files (gamma, beta).
    return [*heads, *map(present_name, heads)] if len(heads) < len(names) else []


_MODES = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
_OTHER_MODES = ("max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")


def sentence_transformers_files(
    section: EmbeddingConfig, dataset: Target, model_config: PreTrainedConfig | None
) -> dict[str, bytes]:
    """The files by relative path. Empty for a model without a configuration of transformers, which has no export.

    *dataset* is the section of the training data: texts are truncated to its ``seq_length``.
    """
    if model_config is None:
        return {}
    steps = ["", "1_Pooling"]
    kinds = ["Transformer", "Pooling"]
    if section.normalize:
        steps.append("2_Normalize")
        kinds.append("Normalize")
    pooling: dict[str, Any] = {
        "word_embedding_dimension": model_config.get_text_config().hidden_size
    }
    for mode in (*_MODES.values(), *_OTHER_MODES):
        pooling[f"pooling_mode_{mode}"] = mode == _MODES[section.pooling]
    # The prompt's tokens are pooled like all others.
    pooling["include_prompt"] = True
    modules = []
    for number, (path, kind) in enumerate(zip(steps, kinds, strict=True)):
        type_name = f"sentence_transformers.models.{kind}"
        modules.append({"idx": number, "name": str(number), "path": path, "type": type_name})
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    files: dict[str, Any] = {
        "modules.json": modules,
        "sentence_bert_config.json": {
            # The number of tokens that texts are truncated to.
            "max_seq_length": max(_limits(dataset), default=context),
            "do_lower_case": False,
        },
        "1_Pooling/config.json": pooling,
        "config_sentence_transformers.json": {
            "prompts": {"query": section.query_prompt, "document": section.document_prompt},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine" if section.normalize else "dot",
        },
    }
    if section.normalize:
        files["2_Normalize/config.json"] = {}
    return {name: json.dumps(content, indent=2).encode() + b"\n" for name, content in files.items()}


def _limits(section: Target) -> Iterator[int]:
    """Yield the lengths of texts in a section of data and in the sections inside it, also a default."""
    parameter = inspect.signature(callable_of(section)).parameters.get("seq_length")
    given = section.kwargs.get("seq_length", parameter and parameter.default)
    for length in (given, section.kwargs.get("query_length")):
        if isinstance(length, int):
            yield length
    for value in section.kwargs.values():
        for each in value.values() if isinstance(value, Mapping) else [value]:
            if isinstance(each, Target):
                yield from _limits(each)
