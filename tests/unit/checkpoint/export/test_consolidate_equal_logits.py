"""An exported model computes exactly what the trained one does, in plain transformers, without our package."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from automodel_ckpt.checkpoint import HFAssets
from tests.support.checkpoints import consolidate
from tests.support.models.shards import cut, write_assets, write_checkpoint
from tests.support.models.sizes import model_sizes
from tests.support.servers.command_server import CommandServer

READER = """
import sys, torch
sys.modules["automodel_ckpt"] = None
from transformers import AutoModelForCausalLM
inputs, *places = sys.argv[1:]
ids = torch.load(inputs)
ones = torch.ones_like(ids[:1])
for place in places:
    exported = f"{place}/c/model/consolidated"
    model = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(ids).logits
    greedy = model.generate(ids[:1], attention_mask=ones, do_sample=False, max_new_tokens=24, pad_token_id=0)
    torch.save({"logits": logits, "greedy": greedy, "dtype": str(model.dtype)}, f"{place}/out.pt")
"""


def tiny_llama(tied: bool, dtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        **model_sizes(vocab=97, hidden=32, inner=56, layers=2, heads=4, kv_heads=2),
        tie_word_embeddings=tied,
        initializer_range=0.3,
        eos_token_id=None,
        attn_implementation="eager",
    )
    # Not .to(dtype): that rounds the rotary frequencies too, which are no weights and which loading computes anew.
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def export(place: Path, tied: bool, dtype: torch.dtype, dim: int) -> Any:
    """Export a model to *place*/c/model/consolidated, from three shards cut along *dim*; returns it."""
    model = tiny_llama(tied, dtype)
    state, ties = model.state_dict(), {}
    if tied:
        del state["lm_head.weight"]
        ties["lm_head.weight"] = "model.embed_tokens.weight"
    write_assets(HFAssets.from_model(model), place / "c" / "model" / ".hf_metadata")
    write_checkpoint(
        place / "c", state, [p for f, t in state.items() for p in cut(f, t, 3, dim)], tied=ties
    )
    assert consolidate(place / "c").output == place / "c" / "model" / "consolidated"
    return model


def test_exports_give_equal_logits(tmp_path: Path, commands: CommandServer) -> None:
    cases = [
        (torch.float32, 0, True),
        (torch.float32, 0, False),
        (torch.bfloat16, 1, True),
        (torch.bfloat16, 1, False),
    ]
    places = [tmp_path / str(number) for number in range(len(cases))]
    models = [
        export(place, tied, dtype, dim)
        for place, (dtype, dim, tied) in zip(places, cases, strict=True)
    ]
    ids = torch.arange(34).reshape(2, 17) % 97
    torch.save(ids, tmp_path / "ids.pt")
    (tmp_path / "reader.py").write_text(READER)
    read = commands.run(
        "plain",
        str(tmp_path / "reader.py"),
        str(tmp_path / "ids.pt"),
        *map(str, places),
        cwd=tmp_path,
    )
    assert read.returncode == 0, read.stderr
    for model, place, (dtype, *_) in zip(models, places, cases, strict=True):
        found = torch.load(place / "out.pt", weights_only=True)
        with torch.no_grad():
            want = model(ids).logits
        assert found["dtype"] == str(dtype)
        assert (found["logits"] - want).abs().max().item() == 0
        assert len(set(found["greedy"][0, 17:].tolist())) >= 8, "a degenerate model proves nothing"
