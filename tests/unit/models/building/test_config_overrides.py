"""model.config_overrides, and the revision of a model's repository."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import LlamaConfig, LlamaForCausalLM

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.build import build_model
from automodel_ckpt.models.config_reading import load_model_config
from automodel_ckpt.models.inspect.repository import (
    RepositoryOptions,
    base_directory,
    fetched_directory,
)
from tests.support.models.sizes import model_sizes
from tests.support.servers.hub_cache import write_repository

TINY: dict[str, Any] = model_sizes(vocab=40, hidden=16, inner=24, layers=1, heads=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(path)
    return path


def test_overrides_reach_the_config_and_the_model_that_is_read(base: Path) -> None:
    overrides = {"attention_dropout": 0.25, "rope_parameters": {"rope_theta": 500.0}}
    config = load_model_config(from_pretrained=str(base), overrides=overrides)
    model: Any = build_model(config, from_pretrained=str(base))
    assert model.config.attention_dropout == 0.25
    assert model.config.rope_parameters == {"rope_theta": 500.0, "rope_type": "default"}
    assert model.config.hidden_size == 16


def test_overrides_of_a_section_leave_its_other_settings(tmp_path: Path) -> None:
    text = {"hidden_size": 64, "num_hidden_layers": 3}
    content = {"model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(content))
    overrides = {"text_config": {"attention_dropout": 0.5}}
    config: Any = load_model_config(from_config=str(tmp_path), overrides=overrides)
    assert config.text_config.attention_dropout == 0.5
    assert (config.text_config.hidden_size, config.text_config.num_hidden_layers) == (64, 3)


def test_an_alias_of_a_setting_replaces_what_the_file_calls_otherwise() -> None:
    settings = {"model_type": "gpt2", "n_embd": 8, "n_head": 2}
    config: Any = load_model_config(from_config=settings, overrides={"hidden_size": 16})
    assert (config.n_embd, config.hidden_size) == (16, 16)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"atention_dropout": 0.1}, "did you mean attention_dropout"),
        ({"hidden_size": "wide"}, "expected int"),
        ({"tie_word_embeddings": 1}, "expected bool"),
        ({"hidden_size": 15}, "transformers rejects this configuration"),
        ({"dtype": "bfloat16"}, "set model.dtype instead"),
        ({"auto_map": {"AutoConfig": "evil.Config"}}, "a model's code comes from its repo"),
        ({"_attn_implementation": "owner/kernel"}, "no setting"),
    ],
)
def test_a_wrong_override_is_an_error_with_its_key(
    base: Path, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_model_config(from_pretrained=str(base), overrides=overrides)
    assert message in str(caught.value)
    assert "model.config_overrides" in str(caught.value)


def test_all_wrong_overrides_are_reported_together(base: Path) -> None:
    overrides = {"hiden_size": 8, "text_config": {"a": 1}}
    with pytest.raises(RecipeError) as caught:
        load_model_config(from_pretrained=str(base), overrides=overrides)
    for name in overrides:
        assert f"model.config_overrides.{name}" in str(caught.value)


def test_a_revision_selects_the_snapshot_of_a_hub_name(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = write_repository(tmp_path, "org/twice", {"main": base, "v2": base})
    for branch, dropout in (("main", 0.0), ("v2", 0.5)):
        path = snapshots[branch] / "config.json"
        config = json.loads(path.read_bytes()) | {"attention_dropout": dropout}
        path.write_text(json.dumps(config))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    second = load_model_config(
        from_pretrained="org/twice", repository=RepositoryOptions(revision="v2")
    )
    first = load_model_config(from_config="org/twice")
    assert (first.attention_dropout, second.attention_dropout) == (0.0, 0.5)
    assert base_directory("org/twice", "v2") == snapshots["v2"]
    assert fetched_directory("org/twice", "v2") == snapshots["v2"]
    with pytest.raises(RecipeError, match="not in the cache"):
        load_model_config(
            from_pretrained="org/twice", repository=RepositoryOptions(revision="nowhere")
        )


def test_a_directory_has_no_revision(base: Path) -> None:
    with pytest.raises(RecipeError, match="has no revisions") as caught:
        load_model_config(from_pretrained=str(base), repository=RepositoryOptions(revision="v2"))
    assert "model.revision" in str(caught.value)


def test_a_written_config_may_have_the_older_settings_of_rotary_positions() -> None:
    """Recipes and config.json files from before transformers 5 have them."""
    older = {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    config: Any = load_model_config(from_config={"model_type": "llama", **older})
    found = config.rope_parameters
    assert (found["rope_theta"], found["rope_type"], found["factor"]) == (7.0, "linear", 2.0)
    with pytest.raises(RecipeError, match="have no setting 'rope_theta'"):
        load_model_config(from_config={"model_type": "gpt2", "rope_theta": 7.0})
