"""Compare FSDP2's mixed precision on one rank with plain torch, for each causal and seq2seq model of transformers.

    python -m tools.compare_families                # all of them: a quarter of an hour
    python -m tools.compare_families llama t5       # some of them

Each model gets two small layers and random weights, and takes four steps of SGD in bfloat16 with float32 weights. In
plain torch, ``torch.func.functional_call`` gets bfloat16 copies of the weights, through which gradients flow. Printed
is the largest relative difference between losses and gradient norms. Most are 0; a matrix that a model uses several
times, as the embedding of an encoder and a decoder, has gradients that are rounded in another order. Models that cannot
be made small with common settings are skipped. The exit code is 1 if a model differs by more than 3%, or fails.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from automodel_ckpt.models.inspect.converted_layers import convert_layers
from automodel_ckpt.models.inspect.float32_parts import constants_in, float32_names
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.mesh_sizes import Sizes
from automodel_ckpt.parallel.parallelize import Parallelism, parallelize
from automodel_ckpt.parallel.ranks.group_types import check_gathered_types

BFLOAT16 = torch.bfloat16
VOCABULARY, TOKENS, STEPS, RATE = 128, 16, 4, 0.5
MOST_PARAMETERS = 60_000_000
NEARLY_EQUAL, ALLOWED = 1e-4, 0.03
_SIZES = {
    32: "hidden_size d_model n_embd",
    64: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim max_position_embeddings n_positions "
    "expert_capacity",
    2: "num_hidden_layers n_layer num_layers encoder_layers decoder_layers num_decoder_layers num_key_value_heads "
    "num_experts_per_tok linear_num_key_heads",
    4: "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts linear_num_value_heads",
    8: "head_dim d_kv sliding_window state_size ssm_state_size mamba_d_state mamba_n_heads mamba_d_head "
    "mamba_num_heads mamba_head_dim linear_key_head_dim linear_value_head_dim qk_rope_head_dim qk_nope_head_dim "
    "v_head_dim",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank",
    1: "n_shared_experts n_group topk_group first_k_dense_replace bos_token_id decoder_start_token_id",
    VOCABULARY: "vocab_size",
}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_RANDOM = ("dropout", "pdrop", "jitter", "layerdrop")


class Family(NamedTuple):
    """A model type, and the class that builds it."""

    name: str
    auto_class: Any
    has_decoder_inputs: bool

    def inputs(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.has_decoder_inputs:
            return {"input_ids": tokens, "decoder_input_ids": tokens}
        return {"input_ids": tokens}


class Step(NamedTuple):
    loss: float
    norm: float


def families() -> Iterator[Family]:
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        yield Family(name, AutoModelForCausalLM, False)
    for name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        yield Family(name, AutoModelForSeq2SeqLM, True)


def small_config(name: str) -> Any:
    """The default configuration of a model type with few and small layers, and without random numbers."""
    default = AutoConfig.for_model(name)
    text = default.get_text_config()
    if text is default:
        config = AutoConfig.for_model(name, **_small(default))
    else:
        config = AutoConfig.for_model(name, text_config={**text.to_dict(), **_small(text)})
    config.use_cache = False
    return config


def _small(default: Any) -> dict[str, Any]:
    """Settings for a small model instead of those in *default*, as far as it has them."""
    settings: dict[str, Any] = {}
    for size, keys in _SIZES.items():
        settings |= {
            key: size for key in keys.split() if isinstance(getattr(default, key, None), int)
        }
    settings |= {key: value for key, value in _IDS.items() if hasattr(default, key)}
    if hasattr(default, "kv_lora_rank"):
        # Latent attention has keys for each head.
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    for key, value in vars(default).items():
        if isinstance(value, float) and any(word in key for word in _RANDOM):
            settings[key] = 0.0
        if key.endswith(("layer_types", "layers_block_type")) and isinstance(value, list):
            # Two kinds of layers, if there are several.
            others = [each for each in value if each != value[0]]
            settings[key] = [value[0], others[0] if others else value[0]]
    return settings


def built(family: Family, config: Any) -> nn.Module:
    """A model with the same weights at each call."""
    torch.manual_seed(0)
    made: Any = family.auto_class.from_config(copy.deepcopy(config), dtype=torch.float32)
    model: nn.Module = made.train()
    convert_layers(model)
    return model


def take_steps(family: Family, model: nn.Module, call: Any) -> list[Step]:
    """Train *model*; *call* computes its output from keyword arguments."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    generator = torch.Generator().manual_seed(0)
    steps: list[Step] = []
    for _ in range(STEPS):
        tokens = torch.randint(3, VOCABULARY, (2, TOKENS), generator=generator)
        logits = call(**family.inputs(tokens)).logits.float()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        if not steps:
            check_gathered_types(model)
        loss.backward()  # type: ignore[no-untyped-call]
        norm: Any = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(
            Step(loss.item(), getattr(norm, "full_tensor", lambda norm=norm: norm)().item())
        )
    return steps


def plain_run(family: Family, config: Any) -> list[Step]:
    """The steps with copies of the weights in bfloat16, made with plain torch."""
    model = built(family, config)
    kept, constants = float32_names(model, BFLOAT16), constants_in(model, BFLOAT16)
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name in constants:
                module._buffers[name.rpartition(".")[2]] = buffer.to(BFLOAT16)

    def call(**inputs: torch.Tensor) -> Any:
        copies: dict[str, torch.Tensor] = {}
        of_parameter: dict[int, torch.Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            is_cast = parameter.is_floating_point() and name not in kept
            copied = parameter.to(BFLOAT16) if is_cast else parameter
            copies[name] = of_parameter.setdefault(id(parameter), copied)
        return torch.func.functional_call(model, copies, (), inputs, tie_weights=False)

    return take_steps(family, model, call)


def sharded_run(family: Family, config: Any) -> list[Step]:
    """The steps as this program takes them on one rank."""
    model = built(family, config)
    how = Parallelism(
        "fsdp2",
        compute_dtype=BFLOAT16,
        float32_names=float32_names(model, BFLOAT16),
        constants=constants_in(model, BFLOAT16),
    )
    group = dist.group.WORLD
    assert group is not None
    sharded = parallelize(model, RankLayout(0, Sizes(), 0, torch.device("cpu"), group), how)
    return take_steps(family, sharded, sharded)


def difference(first: list[Step], second: list[Step]) -> float:
    """The largest relative difference between two runs."""
    pairs = (
        (a, b)
        for one, other in zip(first, second, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="model types of transformers; all without")
    names = parser.parse_args().names
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    counts = dict.fromkeys(("equal", "nearly equal", "different", "skipped"), 0)
    for family in families():
        if names and family.name not in names:
            continue
        try:
            config = small_config(family.name)
            with torch.device("meta"):
                size = sum(
                    each.numel() for each in family.auto_class.from_config(config).parameters()
                )
            if size > MOST_PARAMETERS:
                raise ValueError(f"{size:,} parameters")
            expected = plain_run(family, config)
        # Whatever these settings do to a model.
        except Exception as error:
            counts["skipped"] += 1
            print(
                f"{family.name:28} skipped: {str(error).splitlines()[0][:80] if str(error) else error!r}"
            )
            continue
        try:
            off = difference(sharded_run(family, config), expected)
        except Exception as error:
            counts["different"] += 1
            print(f"{family.name:28} failed: {error!r}", flush=True)
            continue
        kind = "equal" if off < NEARLY_EQUAL else "nearly equal" if off < ALLOWED else "different"
        counts[kind] += 1
        print(f"{family.name:28} {kind}: {off:.1e}", flush=True)
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()))
    return 1 if counts["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
