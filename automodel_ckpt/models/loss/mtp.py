"""Multi-token prediction (MTP): layers that predict further tokens, which transformers does not train.

Depth k (from 1) predicts the token k + 1 positions ahead. At position i it gets the embedding of the token i + k and
the hidden state that the depth before it computed at i (depth 1: the model's last hidden state, after the final norm):

    hidden_k = norm(layers(projection([embedding_norm(embedding[i + k]); hidden_norm(hidden_(k - 1)[i])])))
    logits_k = output_layer(hidden_k)

The embedding and the output layer are the model's own. The layers, and the norm after them, are a small model of the
class of the model's decoder: so attention, positions, packing and experts are computed as in the model. The families
and the names of their tensors in files are in ``mtp_families.py``.

Sources: DeepSeek-V3's technical report, section 2.2; vLLM's ``deepseek_mtp``; NeMo AutoModel's
``components/models/common/mtp``, revision 36044ad3d (the input of depth 1 and of later depths, repeated layers).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_ckpt.checkpoint.files.type_aliases import TextDict, Texts, ValueDict, Values
from automodel_ckpt.errors import RecipeError, replaced_forward_pass
from automodel_ckpt.models.hf_names import InFiles
from automodel_ckpt.models.loss.mtp_families import REMOVE_MTP, WHERE, Family, MtpPlan

ATTRIBUTE = "mtp"
"""The attribute of a model that has the layers."""
_NOT_PASSED_ON = frozenset(
    {
        "input_ids",
        "inputs_embeds",
        "past_key_values",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)
"""Arguments of the model's decoder that the layers of a depth do not get."""


class PredictionDepth(nn.Module):
    """The layers of one depth: two norms, a projection, and a decoder without an embedding."""

    def __init__(self, decoder: Any) -> None:
        """*decoder* is a model of the class of the main model's decoder. Its last module is a norm."""
        super().__init__()
        size = decoder.config.hidden_size
        norm = _final_norm(decoder)
        self.embedding_norm = copy.deepcopy(norm)
        self.hidden_norm = copy.deepcopy(norm)
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.decoder = decoder

    def forward(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        arguments: Values,
        part: slice,
    ) -> Tensor:
        """Compute hidden states [B, t, H] after the norm, from embeddings [B, T, H] and hidden states [B, t, H].

        *arguments* are those that the main model's decoder got: masks, positions, and what attention needs, for
        complete rows. *part* are the t positions of a row that this rank computes.
        """
        embedded = self.embedding_norm(embeddings[:, part])
        projected = self.projection(torch.cat([embedded, self.hidden_norm(hidden)], dim=-1))
        if projected.shape[1] != embeddings.shape[1]:
            # The decoder makes masks for complete rows, and its first layer takes this rank's slice.
            after = embeddings.shape[1] - part.stop
            projected = F.pad(projected, (0, 0, part.start, after))
        output = self.decoder(inputs_embeds=projected, use_cache=False, **arguments)
        return output.last_hidden_state  # type: ignore[no-any-return]


class MultiTokenPrediction(nn.Module):
    """All layers for multi-token prediction of a model, which has this module as its attribute ``mtp``.

    Inside of :meth:`computing`, the output layer of the model gets the hidden states of all D depths behind the
    model's: [(1 + D) * B, T, H]. They are computed in the model's forward pass, because FSDP2 and DDP prepare and end
    their work there.
    """

    def __init__(self, model: Any, plan: MtpPlan) -> None:
        """Build the layers for *model*, on torch's default device and with its default dtype."""
        super().__init__()
        self.family, self.factor, self.num_depths = plan.family, plan.factor, plan.num_depths
        main = model.get_decoder()
        depths = [
            PredictionDepth(_depth_decoder(main, plan.family)) for _ in range(plan.num_stored)
        ]
        self.depths = nn.ModuleList(depths)
        self._call = _DecoderCall()
        self._noted: Tensor | None = None

    def install(
        self,
        model: Any,
        output_layer: nn.Module,
        part_of: Callable[[int], slice] | None = None,
    ) -> None:
        """Let forward passes of *model* compute the depths before its *output_layer*, inside of :meth:`computing`.

        Call it once, after adapters and sharding, which replace modules. *part_of* returns the positions that this rank
        computes of a row of so many tokens; None: all.
        """
        self._call.part_of = part_of
        self._call.embedding = model.get_input_embeddings()
        model.get_decoder().register_forward_pre_hook(self._note_decoder_call, with_kwargs=True)
        output_layer.register_forward_pre_hook(self._append_depths)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A context in which forward passes of the model compute the depths."""
        self._call.is_wanted = True
        try:
            yield
        finally:
            self._call.is_wanted = False
            self._call.embeddings, self._call.arguments = None, {}

    def note(self, losses: Tensor) -> None:
        """Keep the summed losses [D] of the depths in the latest forward pass."""
        self._noted = losses.mean()

    def take_noted(self) -> Tensor:
        """Return and clear the mean of the depths' summed losses in the latest forward pass; 0-dim, without the factor.

        Raises :class:`RecipeError` if :meth:`note` was not called.
        """
        if self._noted is None:
            raise replaced_forward_pass("multi-token prediction", "remove model.mtp")
        noted, self._noted = self._noted, None
        return noted

    def forward(self, hidden: Tensor, embeddings: Tensor, arguments: Values) -> list[Tensor]:
        """Compute the hidden states [B, t, H] of each depth.

        *hidden* [B, t, H] are the model's last hidden states, *embeddings* [B, T, H] what its first layer got, and
        *arguments* its decoder's arguments. t is T, unless context parallel ranks divide rows.
        """
        found: list[Tensor] = []
        part = slice(0, embeddings.shape[1])
        if self._call.part_of is not None:
            part = self._call.part_of(embeddings.shape[1])
        for number in range(self.num_depths):
            depth = self.depths[number % len(self.depths)]
            hidden = depth(ahead(embeddings, number + 1), hidden, arguments, part)
            found.append(hidden)
        return found

    def _note_decoder_call(
        self, _main: nn.Module, args: tuple[Any, ...], options: ValueDict
    ) -> tuple[tuple[Any, ...], ValueDict] | None:
        """Keep the arguments of a call of the model's decoder, and compute the embeddings once for both."""
        if not self._call.is_wanted:
            return None
        options = dict(options)
        if options.get("inputs_embeds") is None:
            options["inputs_embeds"] = self._call.embedding(options["input_ids"])
            options["input_ids"] = None
        self._call.embeddings = options["inputs_embeds"]
        for name, value in options.items():
            if name not in _NOT_PASSED_ON:
                self._call.arguments[name] = value
        return args, options

    def _append_depths(
        self, _output_layer: nn.Module, args: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        """Put the hidden states of the depths behind those that the output layer gets."""
        if self._call.embeddings is None:
            return None
        hidden, *others = args
        further = self(hidden, self._call.embeddings, self._call.arguments)
        self._call.embeddings, self._call.arguments = None, {}
        return torch.cat([hidden, *further]), *others


@dataclass
class _DecoderCall:
    """What the layers need of the latest call of the model's decoder."""

    is_wanted: bool = False
    part_of: Callable[[int], slice] | None = None
    embedding: Any = None
    """The model's embedding, called with token ids."""
    embeddings: Tensor | None = None
    arguments: ValueDict = field(default_factory=dict)


def ahead(values: Tensor, distance: int) -> Tensor:
    """Move *values* [B, T, H] *distance* positions to the left; the last positions are 0."""
    return F.pad(values[:, distance:], (0, 0, 0, min(distance, values.shape[1])))


def _depth_decoder(main: Any, family: Family) -> Any:
    """A decoder of the class of *main*, with the layers of one depth and without an embedding."""
    config = copy.deepcopy(main.config)
    for name, value in family.settings.items():
        # The layers of a decoder may change a list.
        setattr(config, name, copy.copy(value))
    if hasattr(config, "mtp_layers_block_type"):
        config.layers_block_type = list(config.mtp_layers_block_type)
    # The embedding is the main model's: this one is made only because the constructor makes one.
    config.vocab_size, config.pad_token_id = 1, None
    decoder = type(main)(config)
    decoder.set_input_embeddings(None)
    # Checkpoints of activations and packed rows read it, and nothing else of this config is the model's.
    config.vocab_size = main.config.vocab_size
    return decoder.train()


def _final_norm(decoder: Any) -> nn.Module:
    """The norm after the layers of a decoder, by the name of the decoder's attribute."""
    for name, child in decoder.named_children():
        if "norm" in name:
            return child  # type: ignore[no-any-return]
    raise RecipeError(
        "the decoder of this model has no final norm",
        where=WHERE,
        value=type(decoder).__name__,
        hint=REMOVE_MTP,
    )


def add_mtp(model: Any, plan: MtpPlan) -> None:
    """Add the layers of *plan* to a transformers model, in place, as its attribute ``mtp``.

    They have the model's dtype and the initial values of its class. On the meta device, call it in the context of that
    device.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        layers = MultiTokenPrediction(model, plan)
    finally:
        torch.set_default_dtype(before)
    setattr(model, ATTRIBUTE, layers)
    with torch.no_grad():
        for depth in layers.depths:
            model._init_weights(depth.projection)


def mtp_of(model: Any) -> MultiTokenPrediction | None:
    """The layers for multi-token prediction of a model without adapters. None when it has none."""
    layers = model._modules.get(ATTRIBUTE)
    return layers if isinstance(layers, MultiTokenPrediction) else None


def mtp_decoders(model: Any) -> list[nn.Module]:
    """The decoders of the layers of a model without adapters; empty if it has no such layers."""
    layers = mtp_of(model)
    if layers is None:
        return []
    found: list[nn.Module] = []
    for depth in layers.depths:
        assert isinstance(depth, PredictionDepth)
        found.append(depth.decoder)
    return found


def is_of_mtp(name: str) -> bool:
    """Whether *name* is the name of one of the layers in memory, in a model without adapters."""
    return name == ATTRIBUTE or name.startswith(f"{ATTRIBUTE}.")


def with_mtp_names(model: Any, found: InFiles, in_base: frozenset[str]) -> InFiles:
    """Give the layers of *model* the names of its family in *found*, the names and parts that transformers would write.

    *in_base* are the names in the files of the base. Fused experts that the base has as one tensor stay so.
    """
    prefixes = _prefixes_in_files(model)
    names, parts = dict(found.names), dict(found.parts)
    for fqn in model.state_dict(keep_vars=True):
        if not is_of_mtp(fqn):
            continue
        name = _renamed(names.get(fqn, fqn), prefixes)
        split = parts.pop(fqn, {})
        if not split or name in in_base:
            names[fqn] = name
            continue
        renamed = {_renamed(part_name, prefixes): part for part_name, part in split.items()}
        parts[fqn] = renamed
    return InFiles(names, parts)


def copies_in_files(model: Any, names: Texts) -> TextDict:
    """{name in files: stored name} of the copies of the embedding and the output layer that files of a family may have.

    *names* maps names in memory to stored names, where they differ.
    """
    layers = mtp_of(model)
    assert layers is not None
    ends = {"embedding": model.get_input_embeddings(), "output": model.get_output_embeddings()}
    stored = {
        end: names.get(fqn, fqn)
        for fqn, parameter in model.named_parameters()
        for end, layer in ends.items()
        if layer is not None and parameter is layer.weight
    }
    config = model.config.get_text_config()
    copies: TextDict = {}
    for number in range(len(layers.depths)):
        in_depth = layers.family.names(number, config)
        for end, prefix in (("embedding", in_depth.embedding), ("output", in_depth.output)):
            if prefix is not None:
                copies[f"{prefix}.weight"] = stored[end]
    return copies


def _prefixes_in_files(model: Any) -> TextDict:
    """{prefix in memory: prefix in files} of the names of the layers; each ends with a dot."""
    layers = mtp_of(model)
    assert layers is not None
    config = model.config.get_text_config()
    prefixes: TextDict = {}
    for number, depth in enumerate(layers.depths):
        assert isinstance(depth, PredictionDepth)
        names = layers.family.names(number, config)
        here = f"{ATTRIBUTE}.depths.{number}"
        for part in ("embedding_norm", "hidden_norm", "projection"):
            prefixes[f"{here}.{part}."] = f"{getattr(names, part)}."
        for name, child in depth.decoder.named_children():
            if "norm" in name:
                prefixes[f"{here}.decoder.{name}."] = f"{names.norm}."
            elif isinstance(child, nn.ModuleList):
                for index, prefix in enumerate(names.layers):
                    prefixes[f"{here}.decoder.{name}.{index}."] = f"{prefix}."
    return prefixes


def _renamed(name: str, prefixes: Texts) -> str:
    for here, in_files in prefixes.items():
        if name.startswith(here):
            return in_files + name.removeprefix(here)
    return name
