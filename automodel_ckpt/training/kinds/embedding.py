"""The recipe ``embedding``: what it does not support, its use of files of models with a head, pairs of all ranks."""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.config.callables.plugins import callable_of
from automodel_ckpt.config.keys.kinds import EmbeddingConfig
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.recipe_rules import Unsupported
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.collate import IGNORE_INDEX, Tensors
from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.loss.ranking import Candidates, Texts, hidden_rows
from automodel_ckpt.models.attention.attention_direction import attend_both_ways, causal_layers
from automodel_ckpt.models.config_reading import sees_later_tokens
from automodel_ckpt.models.hf_names import tensor_names_in
from automodel_ckpt.models.inspect.interface import model_without_adapters
from automodel_ckpt.models.inspect.model_names import present_name
from automodel_ckpt.models.inspect.repository import fetched_directory
from automodel_ckpt.parallel.mesh import data_group, gather_parts
from automodel_ckpt.parallel.mesh_sizes import RankLayout
from automodel_ckpt.parallel.model_layers import decoder_layers
from automodel_ckpt.parallel.parallelize import reshard
from automodel_ckpt.parallel.ranks.agree import on_all_ranks
from automodel_ckpt.training.model.sections import data_sections, row_multiple
from automodel_ckpt.training.model.trainable import Trainable

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
            hint="remove the key",
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
        hint="remove the key",
    )


class BothWays:
    """A recipe with the key ``attention`` in its section. As a base class, it precedes the class of a fine-tuning.

    With ``bidirectional``, the tokens of a decoder see later ones, which its model may not support.
    """

    _probes_attention = False

    def build_model_config(self: Any) -> PreTrainedConfig | None:
        """Read the configuration of the model, and let tokens see later ones if the section asks for it."""
        config: PreTrainedConfig | None = super().build_model_config()  # type: ignore[misc]
        if self.section.attention == "bidirectional":
            where = f"{self.section_key}.attention"
            self._probes_attention = see_both_ways(self.config, config, where)
        return config

    def build_trainable(self: Any, *arguments: Any, **keywords: Any) -> Any:
        """Build the model, and check that its attention follows the setting."""
        trainable = super().build_trainable(*arguments, **keywords)  # type: ignore[misc]
        if self._probes_attention and not self.is_dry_run:
            where = f"{self.section_key}.attention"
            check_attention(trainable, self.config, self.layout, where)
        return trainable


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
    pooling: ValueDict = {"word_embedding_dimension": model_config.get_text_config().hidden_size}
    for mode in (*_MODES.values(), *_OTHER_MODES):
        pooling[f"pooling_mode_{mode}"] = mode == _MODES[section.pooling]
    # The prompt's tokens are pooled like all others.
    pooling["include_prompt"] = True
    modules = []
    for number, (path, kind) in enumerate(zip(steps, kinds, strict=True)):
        type_name = f"sentence_transformers.models.{kind}"
        modules.append({"idx": number, "name": str(number), "path": path, "type": type_name})
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    files: ValueDict = {
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


@dataclass(frozen=True)
class Parts:
    """Something of each text of this rank: of the *queries* [B, ...], their *documents* [B, ...] and the further
    *negatives* [K, ...]."""

    queries: Tensor
    documents: Tensor
    negatives: Tensor

    @property
    def num_pairs(self) -> int:
        return len(self.queries)

    def padded(self, num_pairs: int, num_negatives: int) -> Tensor:
        """One tensor [2 x num_pairs + num_negatives, ...], in which zeros pad each part."""
        sizes = (num_pairs, num_pairs, num_negatives)
        parts = (self.queries, self.documents, self.negatives)
        padded = []
        for part, size in zip(parts, sizes, strict=True):
            num_missing = size - len(part)
            filler = part.new_zeros(num_missing, *part.shape[1:])
            padded += [part, filler]
        return torch.cat(padded)

    def to(self, device: torch.device) -> Parts:
        """The parts on *device*."""
        return Parts(self.queries.to(device), self.documents.to(device), self.negatives.to(device))

    @staticmethod
    def joined(parts: Sequence[Parts]) -> Parts:
        """The parts of several micro-batches as one."""
        return Parts(
            torch.cat([part.queries for part in parts]),
            torch.cat([part.documents for part in parts]),
            torch.cat([part.negatives for part in parts]),
        )


def num_pairs_of(micro_batch: Tensors) -> int:
    """The number of pairs of a micro-batch. 0 if it only keeps this rank in step with the others."""
    is_filler = not bool((micro_batch["labels"] != IGNORE_INDEX).any())
    return 0 if is_filler else len(micro_batch["num_negatives"])


def parts_of(values: Tensor, micro_batch: Tensors) -> Parts:
    """Divide *values* [texts, ...] of a micro-batch, or without rows if it only keeps this rank in step."""
    num_pairs = num_pairs_of(micro_batch)
    if num_pairs == 0:
        # A slice, so that a gradient still reaches the model: fsdp2 and ddp reduce it on all ranks.
        return Parts(values[:0], values[:0], values[:0])
    end = 2 * num_pairs
    return Parts(values[0:end:2], values[1:end:2], values[end:])


def own_candidates(
    micro_batches: Sequence[Tensors], digests: Parts, embeddings: Parts, *, hides_equal: bool
) -> Candidates:
    """The candidates for the pairs of this rank's *micro_batches*: for each pair only its own documents.

    *digests* and *embeddings* belong to the texts of the micro-batches. With *hides_equal*, a negative with the same
    text as the pair's document is not a candidate.
    """
    counts = [each["num_negatives"] for each in micro_batches if num_pairs_of(each)]
    pairs = torch.arange(digests.num_pairs)
    num_negatives = torch.cat([pairs[:0], *counts])
    owners = torch.cat([pairs, pairs.repeat_interleave(num_negatives)])
    documents = torch.cat([digests.documents, digests.negatives])
    is_there = torch.ones_like(owners, dtype=torch.bool)
    texts = Texts(digests.queries, documents, is_there[: len(pairs)], is_there)
    values = torch.cat([embeddings.documents, embeddings.negatives])
    found = Embedded(texts, embeddings.queries, values).candidates(pairs, hides_equal=hides_equal)
    is_of_other = owners != pairs.unsqueeze(1)
    found.hides_documents.logical_or_(is_of_other.to(found.hides_documents.device))
    return found


@dataclass(frozen=True)
class Embedded:
    """The *texts* of all ranks, and the embeddings of their *queries* [Q, H] and *documents* [D, H]."""

    texts: Texts
    queries: Tensor
    documents: Tensor

    def candidates(self, own: Tensor, *, hides_equal: bool) -> Candidates:
        """The candidates for the pairs *own* [B]. With *hides_equal*, equal texts are not negatives."""
        hides_documents, hides_queries = hidden_rows(self.texts, own, hides_equal=hides_equal)
        device = self.queries.device
        return Candidates(
            self.queries,
            self.documents,
            own.to(device),
            hides_documents.to(device),
            hides_queries.to(device),
        )


class PairsOverRanks:
    """Exchanges digests and embeddings among the ranks with other parts of each global batch."""

    def __init__(self, layout: RankLayout) -> None:
        """A collective: every rank creates one."""
        self._layout = layout
        self._group = data_group(layout)

    def gather(self, digests: Parts, embeddings: Parts) -> tuple[Embedded, Tensor]:
        """Gather the *digests*, on the host, and the *embeddings* [n, H], with gradients, of all ranks' texts.

        Also returns the numbers of the pairs that are this rank's. A collective.
        """
        counts = self._on_host(torch.tensor([digests.num_pairs, len(digests.negatives)]))
        num_pairs, num_negatives = counts.amax(dim=0).tolist()
        gathered = self._on_host(digests.padded(num_pairs, num_negatives))
        has_pair = torch.arange(num_pairs) < counts[:, :1]
        has_negative = torch.arange(num_negatives) < counts[:, 1:]
        has_query = has_pair.flatten()
        has_document = torch.cat([has_query, has_negative.flatten()])
        texts = Texts(*_divided(gathered, num_pairs), has_query, has_document)
        first = self._layout.dp_rank * num_pairs
        own = torch.arange(first, first + digests.num_pairs)
        values = gather_parts(embeddings.padded(num_pairs, num_negatives), self._group)
        return Embedded(texts, *_divided(values, num_pairs)), own

    def _on_host(self, values: Tensor) -> Tensor:
        """Stack *values* of equal shape of the ranks with other parts of the data: [ranks, ...]. A collective."""
        if self._group is None:
            return values.unsqueeze(0)
        parts = [torch.empty_like(values) for _ in range(self._layout.world_size)]
        dist.all_gather(parts, values, group=self._layout.gloo_group)
        sizes = self._layout.sizes
        # Ranks of a tensor parallel group, which are neighbors, have the same texts.
        return torch.stack(parts[:: sizes.tp * sizes.cp])


def _divided(gathered: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
    """The queries [Q, ...] and the documents [D, ...] in padded parts [ranks, n, ...]: document i < Q is of query i."""
    num_negatives = gathered.shape[1] - 2 * num_pairs
    parts = torch.split(gathered, [num_pairs, num_pairs, num_negatives], dim=1)
    queries, documents, negatives = (part.flatten(0, 1) for part in parts)
    return queries, torch.cat([documents, negatives])
