"""config.json for programs before transformers 5, which ignore the newer keys and compute with their defaults."""

import json
from typing import Any

import pytest
from transformers import (
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    ModernBertConfig,
    PreTrainedConfig,
    Qwen2VLConfig,
    Qwen3MoeConfig,
)

from automodel_ckpt.checkpoint.export.files import with_older_keys, without_older_keys
from automodel_ckpt.checkpoint.export.hf_assets import HFAssets
from automodel_ckpt.checkpoint.state.model_config import config_changes

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The keys that transformers 4.57 wrote.
CASES: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    "a dtype": (LlamaConfig.from_dict({"dtype": "bfloat16"}), {"torch_dtype": "bfloat16"}),
    "a base": (LlamaConfig.from_dict({"rope_theta": 5e5}), {"rope_theta": 5e5}),
    "a scaled base": (
        LlamaConfig.from_dict({"rope_theta": 5e5, "rope_scaling": dict(LLAMA3)}),
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    ),
    "a rotated part": (
        GPTNeoXConfig.from_dict({"rotary_pct": 0.5, "rotary_emb_base": 20000.0}),
        {"rotary_pct": 0.5, "rotary_emb_base": 20000.0},
    ),
    "bases by the kind of layer": (
        Gemma3TextConfig.from_dict({"rope_theta": 2e6, "rope_local_base_freq": 3e4}),
        {"rope_theta": 2e6, "rope_local_base_freq": 3e4},
    ),
    "bases with names of their own": (
        ModernBertConfig.from_dict({"global_rope_theta": 2e6, "local_rope_theta": 3e4}),
        {"global_rope_theta": 2e6, "local_rope_theta": 3e4},
    ),
    "a number of experts": (
        Qwen3MoeConfig.from_dict({"num_experts": 6, "rope_theta": 1e6}),
        {"num_experts": 6, "rope_theta": 1e6},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_config_json_has_the_keys_of_transformers_4_and_reads_the_same(case: str) -> None:
    config, wanted = CASES[case]
    written = json.loads(HFAssets(config).config_json())
    assert {key: written.get(key) for key in wanted} == wanted
    assert type(config).from_dict(json.loads(json.dumps(written))).to_dict() == config.to_dict()
    plain = json.loads(config.to_json_string())
    assert without_older_keys(written) == plain
    # A checkpoint of an earlier revision has the same model.
    assert not config_changes(plain, written).function


def test_parts_have_them_too_and_what_is_stated_is_kept() -> None:
    config = Qwen2VLConfig(text_config={"rope_theta": 7e5, "rope_scaling": {"type": "mrope"}})
    plain = json.loads(config.to_json_string())
    assert with_older_keys(plain)["text_config"]["rope_theta"] == 7e5
    assert with_older_keys({"model_type": "llama", "rope_theta": 3.0, "rope_parameters": {}}) == {
        "model_type": "llama",
        "rope_theta": 3.0,
        "rope_parameters": {},
    }


def test_a_changed_base_is_one_difference() -> None:
    saved, here = (
        json.loads(HFAssets(LlamaConfig.from_dict({"rope_theta": theta})).config_json())
        for theta in (1e4, 5e5)
    )
    assert len(config_changes(saved, here).function) == 1
