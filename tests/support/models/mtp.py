"""Tiny models with layers for multi-token prediction, and their loss in plain PyTorch, written independently."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.support.models.experts import GROUPED, LATENT, SIZES

HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
SHARED_EXPERT = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
MAMBA = {
    "layers_block_type": ["linear_attention", "moe", "full_attention"],
    "mamba_num_heads": 2,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "head_dim": 8,
    "moe_shared_expert_intermediate_size": 8,
    "num_nextn_predict_layers": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**SIZES, **GROUPED, **LATENT, "first_k_dense_replace": 1},
    "glm4_moe": {**SIZES, **GROUPED, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**SIZES, **GROUPED, **LATENT},
    "nemotron_h": {**SIZES, **GROUPED, **MAMBA},
    "qwen3_next": {**SIZES, **SHARED_EXPERT, **HYBRID},
    "qwen3_5_text": {**SIZES, **HYBRID},
    "qwen3_5_moe_text": {**SIZES, **SHARED_EXPERT, **HYBRID},
}
"""Settings by model type. The number of layers of a hybrid model is that of its list."""
del FAMILIES["nemotron_h"]["num_hidden_layers"], FAMILIES["qwen3_5_text"]["num_experts_per_tok"]


def config_of(family: str) -> Any:
    return CONFIG_MAPPING[family](**FAMILIES[family])


def model_section(family: str) -> str:
    return f"--model.from_config={ {'model_type': family, **FAMILIES[family]} }"


class Reference(nn.Module):
    """A model of transformers, and beside it norms, projections and layers for D further tokens."""

    def __init__(
        self, family: str, weights: Mapping[str, torch.Tensor], *, num_layers: int
    ) -> None:
        super().__init__()
        config = config_of(family)
        config._attn_implementation = "eager"
        self.main: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        of_main = {name: value for name, value in weights.items() if not name.startswith("mtp.")}
        # *weights* lack the buffers of routers, which start at 0.
        wrong = self.main.load_state_dict(of_main, strict=False).unexpected_keys
        assert not wrong, wrong
        self.depths = nn.ModuleList()
        for number in range(num_layers):
            self.depths.append(_Depth(self.main, config, f"mtp.depths.{number}.", weights))

    def losses(
        self, samples: Iterable[Mapping[str, list[int]]], num_depths: int
    ) -> list[torch.Tensor]:
        """The summed cross-entropies of the next token and of each depth, over samples that are computed one by one."""
        sums = [torch.zeros(()) for _ in range(1 + num_depths)]
        for sample in samples:
            tokens = torch.tensor([sample["input_ids"]])
            labels = sample["labels"]
            hidden = self.main.model(input_ids=tokens, use_cache=False).last_hidden_state
            embedded = self.main.get_input_embeddings()(tokens)
            sums[0] = sums[0] + self._loss(hidden, labels, 1)
            for depth in range(1, num_depths + 1):
                module = self.depths[(depth - 1) % len(self.depths)]
                following = torch.zeros_like(embedded)
                for position in range(len(labels) - depth):
                    following[0, position] = embedded[0, position + depth]
                hidden = module(following, hidden)
                sums[depth] = sums[depth] + self._loss(hidden, labels, 1 + depth)
        return sums

    def _loss(self, hidden: torch.Tensor, labels: list[int], distance: int) -> torch.Tensor:
        total = torch.zeros(())
        logits = hidden[0] @ self.main.lm_head.weight.T
        for position in range(len(labels) - distance):
            label = labels[position + distance]
            if label != -100:
                total = total + F.cross_entropy(logits[position], torch.tensor(label))
        return total


class _Depth(nn.Module):
    def __init__(
        self, main: Any, config: Any, prefix: str, weights: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__()
        decoder = main.model
        config = copy.deepcopy(config)
        kinds = ["full_attention"]
        if config.model_type == "nemotron_h":
            kinds = ["full_attention", "moe"]
            config.layers_block_type = kinds
        else:
            config.layer_types = kinds
        config.first_k_dense_replace = 0
        config.mlp_layer_types = ["sparse"]
        layer_class = type(decoder.layers[0])
        self.layers = nn.ModuleList([layer_class(config, number) for number in range(len(kinds))])
        self._is_centered = config.model_type.startswith("qwen3")
        self._has_axes = config.model_type.startswith("qwen3_5")
        self._rotary = getattr(decoder, "rotary_emb", None)
        self._eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        norm = "norm_f" if config.model_type == "nemotron_h" else "norm"
        self.embedding_norm = nn.Parameter(weights[f"{prefix}embedding_norm.weight"].clone())
        self.hidden_norm = nn.Parameter(weights[f"{prefix}hidden_norm.weight"].clone())
        self.projection = nn.Parameter(weights[f"{prefix}projection.weight"].clone())
        self.norm = nn.Parameter(weights[f"{prefix}decoder.{norm}.weight"].clone())
        self._names = {
            f"{prefix}embedding_norm.weight": self.embedding_norm,
            f"{prefix}hidden_norm.weight": self.hidden_norm,
            f"{prefix}projection.weight": self.projection,
            f"{prefix}decoder.{norm}.weight": self.norm,
        }
        for name, value in self.layers.state_dict(keep_vars=True).items():
            full_name = f"{prefix}decoder.layers.{name}"
            if full_name in weights:
                value.data.copy_(weights[full_name])
                self._names[full_name] = value

    def parameters_by_name(self) -> dict[str, Any]:
        return self._names

    def forward(self, following: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        length = hidden.shape[1]
        halves = [
            self._normed(following, self.embedding_norm),
            self._normed(hidden, self.hidden_norm),
        ]
        states = torch.cat(halves, -1) @ self.projection.T
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        positions = torch.arange(length)[None]
        options: dict[str, Any] = {}
        if self._rotary is not None:
            of_axes = positions
            if self._has_axes:
                # Time, height and width, which are equal for text.
                of_axes = positions.expand(3, 1, length)
            options["position_embeddings"] = self._rotary(states, of_axes)
        for layer in self.layers:
            states = layer(states, attention_mask=mask, position_ids=positions, **options)
        return self._normed(states, self.norm)

    def _normed(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = 1 + weight if self._is_centered else weight
        return values / torch.sqrt(values.square().mean(-1, keepdim=True) + self._eps) * scale


def gradients_of(reference: Reference) -> dict[str, torch.Tensor]:
    """The gradients of all parameters, by the names that a run has in memory."""
    named = dict(reference.main.named_parameters())
    for depth in reference.depths:
        assert isinstance(depth, _Depth)
        named |= depth.parameters_by_name()
    return {name: value.grad for name, value in named.items() if value.grad is not None}
