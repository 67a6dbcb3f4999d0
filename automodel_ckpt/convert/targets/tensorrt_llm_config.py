"""The config.json of a TensorRT-LLM checkpoint, from that of a Hugging Face model. Imports no torch.

Source of the keys: modelopt.torch.export.tensorrt_llm_utils.convert_to_tensorrt_llm_config, nvidia-modelopt 0.47. The
base of the rotary embedding and its scaling are written too, where modelopt leaves them out with transformers 5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.errors import CheckpointUnusable

_MODEL_TYPES = ("llama", "mistral")
_DEFAULT_ROTARY_BASE = 10000.0
_REQUIRED = (
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
)


def tensorrt_llm_config(
    files: Mapping[str, bytes], dtype: str, num_ranks: int, where: str
) -> tuple[dict[str, Any], bytes]:
    """Return the Hugging Face config among *files*, and the content of TensorRT-LLM's config.json.

    *dtype* is torch's name of the weights' dtype. Raises :class:`CheckpointUnusable` if the model is not a Llama or
    Mistral, or has a feature that TensorRT-LLM's Llama does not.
    """
    content = files.get("config.json")
    if content is None:
        raise _unusable("TensorRT-LLM needs the model's config.json", "no such file", where)
    config = parse_json(content)
    if config.get("model_type") not in _MODEL_TYPES:
        what = "only Llama and Mistral models are written for TensorRT-LLM"
        raise _unusable(what, config.get("model_type"), where)
    for key in ("attention_bias", "mlp_bias", "sliding_window"):
        if config.get(key):
            what = f"a model with {key} is not written for TensorRT-LLM"
            raise _unusable(what, config[key], where)
    for key in _REQUIRED:
        if type(config.get(key)) is not int:
            raise _unusable(f"the model's config.json has no {key}", config.get(key), where)
    num_heads = config["num_attention_heads"]
    architecture = (config.get("architectures") or ["LlamaForCausalLM"])[0]
    result: dict[str, Any] = {
        "producer": {"name": "automodel_ckpt"},
        "architecture": architecture,
        "dtype": dtype,
        "logits_dtype": "float16",
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": config.get("num_key_value_heads") or num_heads,
        "hidden_size": config["hidden_size"],
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config.get("max_position_embeddings"),
        "hidden_act": config.get("hidden_act", "silu"),
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "head_size": config.get("head_dim") or config["hidden_size"] // num_heads,
        "intermediate_size": config["intermediate_size"],
        "position_embedding_type": "rope_gpt_neox",
        "share_embedding_table": False,
        "residual_mlp": False,
        "bias": False,
        "rotary_pct": 1.0,
        "rank": num_ranks - 1,
        "decoder": "llama",
        "rmsnorm": True,
        "lm_head_bias": False,
        **_rotary(config),
        "mapping": {"world_size": num_ranks, "tp_size": num_ranks, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }
    return config, json.dumps(result, indent=4).encode()


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base and the scaling of the rotary embedding, from either generation of Hugging Face's keys."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = parameters.get("rope_theta") or config.get("rope_theta") or _DEFAULT_ROTARY_BASE
    found: dict[str, Any] = {"rotary_base": base}
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind not in (None, "default"):
        scaling = {"type": kind}
        for key, value in parameters.items():
            if key not in ("rope_type", "type", "rope_theta"):
                scaling[key] = value
        found["rotary_scaling"] = scaling
    return found


def _unusable(what: str, value: object, where: str) -> CheckpointUnusable:
    return CheckpointUnusable(
        what,
        where=where,
        value=str(value)[:100],
        hint="export Hugging Face files (--to hf), and convert them with TensorRT-LLM's own scripts",
    )
