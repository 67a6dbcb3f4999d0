"""What the clients are given: tiny random Llamas, sharded by FSDP2 over two ranks, saved and exported here.

The initializer range is 0.3: at transformers' 0.02 greedy output is one token again and again, and proves nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, LlamaConfig

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, discover
from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.export.hf_assets import HFAssets
from automodel_ckpt.convert.targets.flow import export_to
from automodel_ckpt.examples.data.python_docs import train_tokenizer

NUM_TOKENS = 24
FORMATS: tuple[Literal["safetensors", "torch_save"], ...] = ("safetensors", "torch_save")
_VOCABULARY = 512
_WORDS = (
    "if",
    "for",
    "while",
    "with",
    "try",
    "import",
    "return",
    "yield",
    "class",
    "def",
    "del",
    "pass",
    "break",
    "lambda",
    "global",
    "assert",
    "raise",
    "from",
    "async",
    "not",
    "assignment",
    "expression",
    "operator",
    "module",
)
_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500_000.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "Llama, tied, F32": {"tie_word_embeddings": True},
    "Llama 3.1 positions, untied, BF16": {"tie_word_embeddings": False, "rope_parameters": _ROPE},
}
DTYPES = {"Llama, tied, F32": torch.float32, "Llama 3.1 positions, untied, BF16": torch.bfloat16}


def build(variant: str, dtype: torch.dtype) -> Any:
    """A model of the variant; the same weights in each call, rounded to *dtype*."""
    tokenizer = train_tokenizer(_VOCABULARY)
    torch.manual_seed(3)
    make_config: Any = LlamaConfig
    config = make_config(
        vocab_size=_VOCABULARY + 8,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        max_position_embeddings=256,
        attn_implementation="eager",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **VARIANTS[variant],
    )
    # Not .to(dtype): that rounds the rotary frequencies too, which are no weights.
    make_model: Any = AutoModelForCausalLM.from_config
    model = make_model(config, dtype=DTYPES[variant])
    if dtype != DTYPES[variant]:
        wide = make_model(config, dtype=dtype)
        wide.load_state_dict(model.state_dict())
        model = wide
    return model.eval()


def make(variant: str, directory: Path) -> dict[str, Any]:
    """Save and export the variant below *directory*; the job that clients are given."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start: Any = spawn
    start(_save, (variant, str(directory), port), nprocs=2)
    checkpoint = directory / "safetensors" / "epoch_0_step_1"
    native = consolidate(checkpoint, directory / "hf", log=_silent).output
    cast = consolidate(checkpoint, directory / "fp32", cast_dtype="fp32", log=_silent).output
    gguf = export_to(
        "gguf", checkpoint, directory / "model.gguf", cast_dtype="fp32", log=_silent
    ).output
    dcp = directory / "torch_save" / "epoch_0_step_1" / "model"
    return {
        "name": variant,
        "hf": str(native),
        "fp32": str(cast),
        "gguf": str(gguf),
        "dcp": str(dcp),
        "shards": str(checkpoint / "model"),
        "prompts": _prompts(variant),
        "state": _state(variant, directory),
        "logits": _logits(variant, directory),
    }


def _silent(_: str) -> None:
    """For exports: what they say of themselves is not asked."""


def _save(rank: int, variant: str, directory: str, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    dist.init_process_group("gloo")
    model = build(variant, DTYPES[variant])
    assets = HFAssets.from_model(model, tokenizer=train_tokenizer(_VOCABULARY))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    for name in FORMATS:
        options = CheckpointOptions(model_save_format=name, save_consolidated=False)
        checkpointer = Checkpointer(
            Path(directory) / name, options=options, assets={"model": assets}
        )
        with contextlib.closing(checkpointer):
            state = discover(SimpleNamespace(model=model))
            checkpointer.save(
                state, step=1, epoch=0, losses={"step": 1}, config_yaml="", progress={}
            )
    dist.destroy_process_group()


def _state(variant: str, directory: Path) -> str:
    """The weights that shards hold: of tied ones one."""
    state = build(variant, DTYPES[variant]).state_dict()
    if VARIANTS[variant]["tie_word_embeddings"]:
        del state["lm_head.weight"]
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()},
        directory / "state.safetensors",
    )
    return str(directory / "state.safetensors")


def _logits(variant: str, directory: Path) -> str:
    ids = torch.arange(68).reshape(2, 34) * 7 % _VOCABULARY
    with torch.no_grad():
        logits = build(variant, DTYPES[variant])(ids).logits
    save_file({"ids": ids, "logits": logits.contiguous()}, directory / "logits.safetensors")
    return str(directory / "logits.safetensors")


def _prompts(variant: str) -> list[dict[str, Any]]:
    """Each prompt with its tokens, and what the model that was saved continues it with, in single precision."""
    model, tokenizer = build(variant, torch.float32), train_tokenizer(_VOCABULARY)
    found = []
    for word in _WORDS:
        text = f"The {word} statement, and what it's for in 2024:"
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            continued = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                pad_token_id=0,
                eos_token_id=None,
            )
        found.append(
            {"text": text, "ids": ids[0].tolist(), "greedy": continued[0, ids.shape[1] :].tolist()}
        )
    varied = {tuple(prompt["greedy"]) for prompt in found}
    assert len(varied) > len(found) // 2 and len(set(found[0]["greedy"])) > NUM_TOKENS // 3, (
        "degenerate output"
    )
    return found
