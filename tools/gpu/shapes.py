"""The models that are measured: the shapes of Llama 3.1 8B and Llama 3.2 1B, or tiny ones for a dry run.

Weights are random: the speed of dense layers does not depend on them, as long as they are not all zero.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.gpu.session import Figures

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
"""meta-llama/Llama-3.1-8B."""
LLAMA_1B: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
"""meta-llama/Llama-3.2-1B; its heads have 64 dimensions."""
TINY: dict[str, Any] = {
    **LLAMA_8B,
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
"""What a dry run trains instead."""


@dataclass(frozen=True)
class Work:
    """A model and what a step of it trains on: *batch* rows of *length* tokens in each of *accumulation* passes."""

    config: Mapping[str, Any]
    batch: int
    length: int
    accumulation: int
    warm_up: int
    """Steps that are not counted."""
    steps: int
    """Steps that are counted."""

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.length * self.accumulation


def work_of(config: Mapping[str, Any], *, is_dry_run: bool, **sizes: int) -> Work:
    """The work on a model of *config* with these sizes, or a tiny one with the same accumulation for a dry run."""
    given = {"batch": 1, "length": 4096, "accumulation": 1, "warm_up": 3, "steps": 8, **sizes}
    if is_dry_run:
        small = {**given, "batch": min(given["batch"], 2), "length": 32, "warm_up": 1, "steps": 2}
        return Work(TINY, **small)
    return Work(config, **given)


def num_parameters(config: Mapping[str, Any]) -> tuple[int, int]:
    """(all parameters of a Llama of these shapes, parameters of its embedding that compute nothing)."""
    hidden = config["hidden_size"]
    head_size = hidden // config["num_attention_heads"]
    queries_and_output = 2 * hidden * hidden
    keys_and_values = 2 * hidden * head_size * config["num_key_value_heads"]
    mlp = 3 * hidden * config["intermediate_size"]
    norms = 2 * hidden
    layers = config["num_hidden_layers"] * (queries_and_output + keys_and_values + mlp + norms)
    output_layer = hidden * config["vocab_size"]
    # A tied embedding is the output layer, which computes.
    embedding = 0 if config["tie_word_embeddings"] else output_layer
    return layers + hidden + output_layer + embedding, embedding


def flops_per_token(config: Mapping[str, Any], length: int, *, trains_all: bool) -> float:
    """Floating-point operations per trained token, counted as torchtitan does: attention as if it were not causal.

    With adapters, the gradients of the frozen weights are not computed, and the adapters' are not counted.
    """
    total, embedding = num_parameters(config)
    passes = 3 if trains_all else 2
    attention = 4 * int(config["num_hidden_layers"]) * int(config["hidden_size"]) * length
    return 2.0 * passes * (total - embedding) + 3.0 * float(attention)


def write_base(
    config: Mapping[str, Any],
    directory: Path,
    device: str,
    auto_class: str = "AutoModelForCausalLM",
) -> Figures:
    """Write a model of *config* with random bfloat16 weights, drawn on *device*, as a Hugging Face directory.

    Matrices have the standard deviation 0.02, and norms are ones. *auto_class* is the class of transformers that builds
    the model.
    """
    import torch
    import transformers
    from transformers import AutoConfig

    started = time.monotonic()
    settings = dict(config)
    made = AutoConfig.for_model(settings.pop("model_type"), **settings, dtype="bfloat16")
    with torch.device("meta"):
        build: Any = getattr(transformers, auto_class).from_config
        model = build(made, dtype=torch.bfloat16)
    model.to_empty(device=device)
    # Tensors on another device are no longer shared.
    model.tie_weights()
    torch.manual_seed(0)
    parameters = list(model.parameters())
    with torch.no_grad():
        for parameter in parameters:
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(1.0)
    model.save_pretrained(directory, max_shard_size="2GB")
    count = sum(parameter.numel() for parameter in parameters)
    yield "base", {"seconds": time.monotonic() - started, "parameters": count}
