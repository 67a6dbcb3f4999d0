"""Experts, one tensor in memory with transformers 5: in checkpoints each is a tensor, as in the files of the base."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.export.hf_assets import HFAssets
from automodel_ckpt.checkpoint.state.fill_modules import Filling, fill_module
from automodel_ckpt.checkpoint.state.module_tensors import (
    StoredLayout,
    module_state,
    record_complete_tensors,
    set_stored_layout,
)
from automodel_ckpt.convert.open import open_weights
from automodel_ckpt.models.hf_names import names_in_files
from tests.support import ranks
from tests.support.models import tiny
from tests.support.models.sizes import model_sizes

SIZES: dict[str, Any] = {
    **model_sizes(hidden=8, inner=12, layers=1, heads=2, kv_heads=1, vocab=16),
    "num_experts_per_tok": 1,
}
CONFIGS = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=3, head_dim=4, moe_intermediate_size=6),
}


def made(seed: int, base: Path | None = None) -> Any:
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS["mixtral"])
    set_stored_layout(model, StoredLayout(*names_in_files(model, base)))
    record_complete_tensors(model)
    return model


def values(model: Any) -> dict[str, torch.Tensor]:
    return {
        n: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone()
        for n, v in model.state_dict().items()
    }


def trained(root: Path, base: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Saves on two ranks, which hold two experts and one; {layout: the values}."""
    found = {}
    for layout in ("shards", "hf"):
        model = made(1)
        assets = HFAssets.from_model(model, base_dir=base)
        fully_shard(model.model.layers[0].mlp.experts)
        fully_shard(model)
        tiny.save(
            root / layout,
            SimpleNamespace(model=model),
            assets={"model": assets},
            model_layout=layout,
        )
        other = made(2)
        fully_shard(other)
        assert tiny.load(root / layout, SimpleNamespace(model=other)) is not None
        found[layout] = values(other)
    weights = open_weights(base).modules["model"]
    fill_module(other, {name: Filling(weights, name) for name in weights.tensors}, "mean")
    return {**found, "base": values(other)}


def test_experts_of_two_ranks_are_saved_exported_and_read_one_by_one(tmp_path: Path) -> None:
    base = tmp_path / "base"
    made(3).save_pretrained(base)
    found = ranks.run(trained, 2, tmp_path, base)[0]
    for layout, expected in (("shards", made(1)), ("hf", made(1)), ("base", made(3))):
        assert all(
            torch.equal(found[layout][name], value) for name, value in values(expected).items()
        )
    with safe_open(base / "model.safetensors", "pt") as file:
        names = set(file.keys())
    for layout in ("shards", "hf"):
        checkpoint = (tmp_path / layout / "LATEST").resolve()
        here = made(4)
        assert tiny.load(tmp_path / layout, SimpleNamespace(model=here)) is not None
        assert all(
            torch.equal(value, values(here)[name]) for name, value in values(made(1)).items()
        )
        export = consolidate(checkpoint).output if layout == "shards" else checkpoint / "model"
        assert {name for file in export.glob("*.safetensors") for name in load_file(file)} == names
        loaded, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
        assert not any(info.values())
        assert all(
            torch.equal(value, loaded.state_dict()[name]) for name, value in values(made(1)).items()
        )


@pytest.mark.parametrize("family", CONFIGS)
def test_experts_have_the_names_and_the_values_that_transformers_saves(
    family: str, tmp_path: Path
) -> None:
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[family])
    model.save_pretrained(tmp_path)
    set_stored_layout(model, StoredLayout(*names_in_files(model, tmp_path)))
    expected = load_file(tmp_path / "model.safetensors")
    state, _ = module_state(model)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
