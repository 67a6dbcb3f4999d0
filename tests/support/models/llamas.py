"""Tiny random Llamas with a tokenizer, saved as checkpoints: what clients of exports are asked to load.

The initializer range is 0.3: at transformers' 0.02 greedy output is one token again and again, and proves nothing.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from automodel_ckpt.checkpoint.export.hf_assets import HFAssets
from automodel_ckpt.checkpoint.state.module_tensors import module_state
from tests.support.models.shards import cut, write_assets, write_checkpoint
from tests.support.models.sizes import model_sizes
from tests.support.models.small_tokenizer import small_tokenizer

LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500_000.0,
}


def llama_checkpoint(
    path: Path,
    *,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    vocab_size: int = 300,
    dim: int = 1,
    base: Path | None = None,
    lost: str | None = None,
    **more: Any,
) -> Any:
    """Write a complete checkpoint of a Llama of 2 layers with grouped queries, cut in two along *dim*; returns it.

    *base* is where its base in bfloat16 is written. The tensor *lost* is not stored.
    """
    tokenizer = small_tokenizer(vocab_size)
    torch.manual_seed(3)
    config = LlamaConfig(
        **model_sizes(
            vocab=vocab_size + 4, hidden=32, inner=56, layers=2, heads=4, kv_heads=2, positions=256
        ),
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="eager",
        **more,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    state, ties = module_state(model)
    if base is not None:
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(base)
    assets = HFAssets.from_model(model, tokenizer=tokenizer, base_dir=base)
    write_assets(assets, path / "model" / ".hf_metadata")
    if lost is not None:
        del state[lost]
    write_checkpoint(
        path, state, [p for f, t in state.items() for p in cut(f, t, 2, dim)], tied=ties
    )
    return model
