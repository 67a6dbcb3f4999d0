"""The files beside a model with which sentence-transformers computes its embeddings as the recipe ``embedding`` does.

They have the names and keys that all versions of sentence-transformers since 2.2 read: ``modules.json`` lists the steps
from a text to its embedding, each with its own configuration.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from automodel_ckpt.config.callables.plugins import callable_of
from automodel_ckpt.config.kinds.embedding import EmbeddingConfig
from automodel_ckpt.config.tree.rules import Target

_MODES = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
_OTHER_MODES = ("max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")


def sentence_transformers_files(
    section: EmbeddingConfig, dataset: Target, model_config: PreTrainedConfig | None
) -> dict[str, bytes]:
    """The files by relative path; empty for a model without a configuration of transformers, which has no export.

    *dataset* is the section of the training data: texts are truncated to its ``seq_length``.
    """
    if model_config is None:
        return {}
    steps = ["", "1_Pooling"]
    kinds = ["Transformer", "Pooling"]
    if section.normalize:
        steps.append("2_Normalize")
        kinds.append("Normalize")
    modules = []
    for number, (path, kind) in enumerate(zip(steps, kinds, strict=True)):
        type_name = f"sentence_transformers.models.{kind}"
        modules.append({"idx": number, "name": str(number), "path": path, "type": type_name})
    files: dict[str, Any] = {
        "modules.json": modules,
        "sentence_bert_config.json": {
            "max_seq_length": _longest_text(dataset, model_config),
            "do_lower_case": False,
        },
        "1_Pooling/config.json": _pooling(section, model_config),
        "config_sentence_transformers.json": {
            "prompts": {"query": section.query_prompt, "document": section.document_prompt},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine" if section.normalize else "dot",
        },
    }
    if section.normalize:
        files["2_Normalize/config.json"] = {}
    return {name: json.dumps(content, indent=2).encode() + b"\n" for name, content in files.items()}


def _pooling(section: EmbeddingConfig, model_config: PreTrainedConfig) -> Mapping[str, Any]:
    pooling: dict[str, Any] = {
        "word_embedding_dimension": model_config.get_text_config().hidden_size
    }
    for mode in (*_MODES.values(), *_OTHER_MODES):
        pooling[f"pooling_mode_{mode}"] = mode == _MODES[section.pooling]
    # The prompt's tokens are pooled like all others.
    pooling["include_prompt"] = True
    return pooling


def _longest_text(dataset: Target, model_config: PreTrainedConfig) -> int | None:
    """The number of tokens that texts are truncated to; None: no limit is known."""
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    limits = [context if limit is None else limit for limit in _limits(dataset)]
    known = [limit for limit in limits if isinstance(limit, int)]
    return max(known) if known else context


def _limits(section: Target) -> Iterator[Any]:
    """Yield the lengths of texts in a section of data and in the sections inside it, also those that are defaults."""
    parameters = inspect.signature(callable_of(section)).parameters
    if "seq_length" in section.kwargs:
        yield section.kwargs["seq_length"]
    elif "seq_length" in parameters:
        default = parameters["seq_length"].default
        yield None if default is inspect.Parameter.empty else default
    if section.kwargs.get("query_length") is not None:
        yield section.kwargs["query_length"]
    for value in section.kwargs.values():
        nested = value.values() if isinstance(value, Mapping) else [value]
        for each in nested:
            if isinstance(each, Target):
                yield from _limits(each)
