"""Another model of the same shapes is noticed at a resume, by its config."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from automodel_ckpt.checkpoint.export.hf_assets import HFAssets
from automodel_ckpt.checkpoint.state.model_config import config_changes, saved_config
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.models import tiny

CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


def as_json(**changed: Any) -> dict[str, Any]:
    return json.loads(LlamaConfig(**CONFIG | changed).to_json_string())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"num_attention_heads": 8}, "num_attention_heads: 4 in the checkpoint, 8 here"),
        ({"hidden_act": "gelu"}, 'hidden_act: "silu" in the checkpoint, "gelu" here'),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps: 1e-06 in the checkpoint, 1e-05 here"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_parameters.rope_theta: 10000.0 in the checkpoint, 500000.0 here",
        ),
        ({"logit_scale": 2}, "logit_scale: not set in the checkpoint, 2 here"),
    ],
)
def test_a_change_of_what_the_weights_compute_is_found_with_both_values(
    changed: dict[str, Any], line: str
) -> None:
    changes = config_changes(as_json(), as_json(**changed))
    assert changes.function == (line,) and changes.training == ()


def test_a_change_of_names_versions_or_dropout_is_no_other_model() -> None:
    here = as_json(
        attention_dropout=0.1,
        use_cache=False,
        dtype="bfloat16",
        name_or_path="/elsewhere",
        eos_token_id=7,
    )
    changes = config_changes(as_json(), here | {"transformers_version": "6.0.0", "new_in_6": 1})
    assert changes.function == ()
    assert changes.training == ("attention_dropout: 0.0 in the checkpoint, 0.1 here",)


def test_more_positions_are_another_function_only_where_rope_scales_with_them() -> None:
    assert config_changes(as_json(), as_json(max_position_embeddings=4096)).function == ()
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    changes = config_changes(
        as_json(rope_parameters=rope), as_json(rope_parameters=rope, max_position_embeddings=4096)
    )
    assert changes.function == ("max_position_embeddings: 2048 in the checkpoint, 4096 here",)


def assets(**changed: Any) -> dict[str, HFAssets]:
    return {"model": HFAssets(LlamaConfig(**CONFIG | changed))}


@pytest.mark.parametrize("model_layout", ["shards", "hf"])
def test_a_resume_with_another_model_of_the_same_shapes_is_rejected_unless_it_is_allowed(
    tmp_path: Path, model_layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, made = tmp_path / "run", tiny.recipe()
    tiny.save(run, made, assets=assets(), model_layout=model_layout)
    assert tiny.load(run, made, assets=assets(attention_dropout=0.5))
    assert "attention_dropout: 0.0 in the checkpoint, 0.5 here" in caplog.text
    other = assets(num_attention_heads=8)
    with pytest.raises(
        CheckpointUnusable,
        match=r"num_attention_heads: 4 in the checkpoint, 8 here[\s\S]*allow_changed",
    ):
        tiny.load(run, made, assets=other)
    assert tiny.load(run, made, assets=other, allow_changed_model=True)
    assert "computes a different function" in caplog.text
    named = {"restore_from": "epoch_0_step_20", "on_incompatible": "sibling"}
    with pytest.raises(CheckpointUnusable, match="num_attention_heads: 4 in the checkpoint"):
        tiny.load(run, made, assets=other, **named)
    assert not (tmp_path / "run.sibling-1").exists()
    assert tiny.load(run, made, assets=other, on_incompatible="sibling") is None
    assert "continuing in" in caplog.text and "run.sibling-1" in caplog.text


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000])
def test_a_config_that_is_no_mapping_makes_the_checkpoint_unusable(
    tmp_path: Path, text: str
) -> None:
    assert saved_config(tmp_path, "model") is None
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(text)
    with pytest.raises(CheckpointUnusable, match="config in the checkpoint cannot be read"):
        saved_config(tmp_path, "model")
