"""An exported model computes exactly what the trained one does, in plain transformers, without our package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from automodel_ckpt.checkpoint.consolidate import consolidate
from automodel_ckpt.checkpoint.hf_assets import HFAssets
from automodel_ckpt.checkpoint.trees import module_state
from tests.support.shards import cut, write_checkpoint

READER = """
import sys, torch
sys.modules["automodel_ckpt"] = None
from transformers import AutoModelForCausalLM
path, inputs, output = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
ids = torch.load(inputs)
with torch.no_grad():
    logits = model(ids).logits
ones = torch.ones_like(ids[:1])
greedy = model.generate(ids[:1], attention_mask=ones, do_sample=False, max_new_tokens=24, pad_token_id=0)
torch.save({"logits": logits, "greedy": greedy, "dtype": str(model.dtype)}, output)
"""


def tiny_llama(tied: bool, dtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, initializer_range=0.3, eos_token_id=None,
        attn_implementation="eager",
    )  # fmt: skip
    # Not .to(dtype): that rounds the rotary frequencies too, which are no weights and which loading computes anew.
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 0), (torch.bfloat16, 1)])
def test_the_export_gives_equal_logits(tmp_path: Path, tied: bool, dtype: torch.dtype, dim: int) -> None:
    model = tiny_llama(tied, dtype)
    state, ties = module_state(model)
    HFAssets.from_model(model).write(tmp_path / "c" / "model" / ".hf_metadata")
    write_checkpoint(tmp_path / "c", state, [p for f, t in state.items() for p in cut(f, t, 3, dim)], tied=ties)
    output = consolidate(tmp_path / "c").output
    ids = torch.arange(34).reshape(2, 17) % 97
    torch.save(ids, tmp_path / "ids.pt")
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    subprocess.run(
        [sys.executable, "-c", READER, output, tmp_path / "ids.pt", tmp_path / "out.pt"],
        check=True, env=environment, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    with torch.no_grad():
        want = model(ids).logits
    assert found["dtype"] == str(dtype)
    assert (found["logits"] - want).abs().max().item() == 0
    assert len(set(found["greedy"][0, 17:].tolist())) >= 8, "a degenerate model proves nothing"
