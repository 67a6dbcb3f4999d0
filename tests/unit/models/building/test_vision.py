"""Vision-language models: their parts by name, and what their tensors are called in files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.config_reading import load_model_config
from automodel_ckpt.models.hf_names import names_in_files
from automodel_ckpt.models.inspect.interface import (
    AutoMultimodalModel,
    image_token_ids,
    parameters_of,
)
from automodel_ckpt.models.model_checks import freeze
from tests.support.models.vision import FAMILIES, make_base

FEW_OF_FAMILIES = [
    pytest.param(family, marks=[] if family in ("llava", "qwen2_5_vl") else [pytest.mark.further])
    for family in FAMILIES
]


def model_of(family: str) -> Any:
    config, _ = FAMILIES[family]()
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config)


@pytest.mark.parametrize("family", FEW_OF_FAMILIES)
def test_every_parameter_belongs_to_one_part_of_the_model(family: str) -> None:
    names = [name for name, _ in model_of(family).named_parameters()]
    parts = {
        part: parameters_of(part, names) for part in ("vision_tower", "projector", "language_model")
    }
    assert all(parts.values())
    assert sorted(name for part in parts.values() for name in part) == sorted(names)


def test_a_projector_inside_the_vision_tower_is_a_projector() -> None:
    names = [
        "model.visual.merger.mlp.0.weight",
        "model.visual.blocks.0.attn.proj.weight",
        "lm_head.weight",
    ]
    assert parameters_of("projector", names) == names[:1]
    assert parameters_of("vision_tower", names) == names[1:2]


@pytest.mark.parametrize("family", FEW_OF_FAMILIES)
def test_parts_are_frozen_by_their_names(family: str) -> None:
    model = model_of(family)
    freeze(model, ["vision_tower", "projector"])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(parameters_of("language_model", dict(model.named_parameters())))
    with pytest.raises(RecipeError, match="did you mean vision_tower"):
        freeze(model, ["vison_tower"])


def test_a_part_that_a_language_model_does_not_have_is_refused() -> None:
    with pytest.raises(RecipeError, match="no parameter's name matches"):
        freeze(torch.nn.Sequential(torch.nn.Linear(2, 2)), ["vision_tower"])


def test_the_class_of_a_repository_with_code_can_be_registered() -> None:
    """transformers registers it while it builds the model."""
    config = type("OwnConfig", (PreTrainedConfig,), {"model_type": "own_multimodal"})
    model = type("OwnModel", (PreTrainedModel,), {"config_class": config})
    AutoMultimodalModel.register(config, model)
    assert type(AutoMultimodalModel.from_config(config())) is model


@pytest.mark.parametrize("family", FEW_OF_FAMILIES)
def test_names_in_files_are_those_that_transformers_saves(family: str, tmp_path: Path) -> None:
    base = make_base(tmp_path, family)
    with safe_open(base / "model.safetensors", "pt") as file:
        expected = set(file.keys())
    for model, base_dir in (
        (model_of(family), None),
        (AutoModelForImageTextToText.from_pretrained(base), base),
    ):
        names = names_in_files(model, base_dir).names
        tied = set(model.all_tied_weights_keys)
        assert {
            names.get(name, name) for name in model.state_dict() if name not in tied
        } == expected


def test_a_base_whose_files_have_the_names_of_memory_keeps_them(tmp_path: Path) -> None:
    model = model_of("llava")
    assert names_in_files(model).names
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    assert names_in_files(model, tmp_path) == ({}, {})


def test_names_of_earlier_versions_in_the_files_of_a_base_stay(tmp_path: Path) -> None:
    base = make_base(tmp_path, "llava")
    written = {}
    with safe_open(base / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            # As the published models have it, and transformers 4 reads it.
            older = name.replace("vision_tower.", "vision_tower.vision_model.")
            written[older] = file.get_tensor(name)
    save_file(written, base / "model.safetensors", {"format": "pt"})
    loaded: Any = AutoModelForImageTextToText.from_pretrained(base, output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"]
    names = names_in_files(model, base).names
    assert {names.get(name, name) for name in model.state_dict()} == written.keys()


def test_a_configuration_of_several_parts_takes_its_ids_from_the_processor() -> None:
    _, processor = FAMILIES["gemma3"]()
    settings = {"model_type": "gemma3", "text_config": {"hidden_size": 32}}
    config = load_model_config(
        from_config=settings, tokenizer=processor.tokenizer, processor=processor
    )
    assert config.text_config.vocab_size == len(processor.tokenizer)
    names = processor.tokenizer.convert_tokens_to_ids(
        ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]
    )
    assert [config.image_token_index, config.boi_token_index, config.eoi_token_index] == names
    assert set(names) <= image_token_ids(config, processor)
    assert settings == {"model_type": "gemma3", "text_config": {"hidden_size": 32}}
