"""The base that adapters with fresh weights need: created once, and recognized by the next start of the same recipe."""

import copy
import json
from pathlib import Path

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    FalconH1Config,
    LlavaConfig,
    PreTrainedConfig,
)

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.fresh_base import make_base
from automodel_ckpt.models.inspect.repository import RepositoryOptions

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG = LlavaConfig(
    vision_config={"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **SIZES},
    text_config={"model_type": "llama", "vocab_size": 32, **SIZES},
    image_token_index=31,
)


def base_is_made(
    directory: Path, config: PreTrainedConfig, auto_class: type = AutoModelForImageTextToText
) -> bool:
    """Whether the base of *config* is created in *directory*; False if it is there."""
    return make_base(
        directory,
        config,
        auto_class=auto_class,
        dtype="float32",
        seed=1,
        preprocessor=None,
        repository=RepositoryOptions(),
    )


def test_a_base_of_several_parts_is_recognized(tmp_path: Path) -> None:
    base = tmp_path / "base"
    # The parts of the written config have more fields (dtype) and fewer (those without a value).
    assert base_is_made(base, copy.deepcopy(CONFIG))
    assert not base_is_made(base, copy.deepcopy(CONFIG))
    other = copy.deepcopy(CONFIG)
    other.text_config.rms_norm_eps = 0.5
    with pytest.raises(RecipeError, match=r"another model[\s\S]*differs in text_config"):
        base_is_made(base, other)
    # As another version of transformers wrote it, which did not have this field.
    stored = json.loads((base / "config.json").read_text())
    del stored["text_config"]["attention_bias"]
    (base / "config.json").write_text(json.dumps(stored))
    assert not base_is_made(base, copy.deepcopy(CONFIG))
    (base / "config.json").write_text("{")
    with pytest.raises(RecipeError, match=r"config.json cannot be read[\s\S]*remove the directory"):
        base_is_made(base, copy.deepcopy(CONFIG))
    (base / "config.json").unlink()
    with pytest.raises(RecipeError, match=r"another model[\s\S]*no config.json"):
        base_is_made(base, copy.deepcopy(CONFIG))


def test_a_base_whose_config_has_an_infinite_number_is_recognized(tmp_path: Path) -> None:
    config = FalconH1Config(
        **SIZES, vocab_size=32, mamba_d_ssm=8, mamba_n_heads=2, mamba_d_head=4, mamba_d_state=4
    )
    assert config.time_step_limit[1] == float("inf")
    base = tmp_path / "base"
    assert base_is_made(base, copy.deepcopy(config), AutoModelForCausalLM)
    assert not base_is_made(base, copy.deepcopy(config), AutoModelForCausalLM)
