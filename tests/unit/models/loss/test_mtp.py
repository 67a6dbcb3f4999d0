"""Multi-token prediction: which models and depths are supported, the labels of each depth, and names in files."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.loss.causal import labels_of_depths
from automodel_ckpt.models.hf_names import names_in_files
from automodel_ckpt.models.loss.mtp import add_mtp, ahead, is_of_mtp, mtp_of, with_mtp_names
from automodel_ckpt.models.loss.mtp_families import FAMILIES, MtpPlan, patterns_in_files, plan_mtp
from automodel_ckpt.models.meta_init import InitialValues, on_meta
from tests.support.models import mtp

NEW = {"repeat_layer": False, "factor": 0.1, "is_new": True}


def plan(config: Any, num_depths: int | None = None, **options: Any) -> MtpPlan:
    return plan_mtp(config, num_depths=num_depths, **(NEW | options))


def model_of(family: str, num_depths: int = 1) -> Any:
    config = mtp.config_of(family)
    wanted = plan(config, num_depths)

    def made() -> Any:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        add_mtp(model, wanted)
        return model

    return on_meta(made)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_what_plain_pytorch_does(family: str) -> None:
    torch.manual_seed(0)
    config = mtp.config_of(family)
    model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    add_mtp(model, plan(config, 2, repeat_layer=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    reference = mtp.Reference(family, weights, num_layers=1)
    tokens = torch.arange(3, 12)
    sample = {"input_ids": tokens.tolist(), "labels": tokens.tolist()}
    expected = reference.losses([sample], 2)
    layers = mtp_of(model)
    assert layers is not None
    layers.install(model, model.get_output_embeddings())
    with layers.computing():
        logits = model(input_ids=tokens[None], use_cache=False).logits
    for depth, rows in enumerate(logits):
        loss = F.cross_entropy(rows[: -1 - depth], tokens[1 + depth :], reduction="sum")
        torch.testing.assert_close(loss, expected[depth], rtol=1e-6, atol=1e-5)
    assert len(model(input_ids=tokens[None], use_cache=False).logits) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_name_in_files_for_each_tensor_and_initial_values(family: str) -> None:
    model = model_of(family)
    found = with_mtp_names(model, names_in_files(model), frozenset())
    files: list[str] = []
    for name in model.state_dict(keep_vars=True):
        if is_of_mtp(name):
            assert (name in found.names) != (name in found.parts), name
            files += [found.names[name]] if name in found.names else found.parts[name]
    assert len(files) == len(set(files))
    assert not set(files) & {n for n in model.state_dict(keep_vars=True) if not is_of_mtp(n)}
    assert all(name.startswith(("mtp.", "model.layers.2.")) for name in files)
    assert not any("depths" in name or "decoder" in name for name in files)
    assert InitialValues(model, 0).are_complete()


def test_the_number_of_depths_is_that_of_the_config_and_exports_state_it() -> None:
    config = mtp.config_of("deepseek_v3")
    assert plan(config, is_new=False).num_depths == 1
    repeated = plan(config, 3, repeat_layer=True, is_new=False)
    assert (repeated.num_depths, repeated.num_stored) == (3, 1)
    assert plan(config, 2).num_stored == 2
    assert config.num_nextn_predict_layers == 2
    assert '"num_nextn_predict_layers": 2' in config.to_json_string()
    # The files of Qwen3-Next have one, and its config.json does not say so.
    assert plan(mtp.config_of("qwen3_next"), is_new=False).num_depths == 1


@pytest.mark.parametrize(
    ("config", "num_depths", "is_new", "message"),
    [
        (LlamaConfig(), 1, True, "not supported for this type of model"),
        (mtp.config_of("qwen3_5_text"), None, False, "no layers for multi-token prediction"),
        (mtp.config_of("qwen3_next"), 2, True, "at most 1"),
        (mtp.config_of("deepseek_v3"), 2, False, "of the base is 1"),
    ],
)
def test_depths_that_files_cannot_have_are_an_error(
    config: Any, num_depths: int | None, is_new: bool, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        plan(config, num_depths, is_new=is_new)


@pytest.mark.parametrize("number", [-1, "many", 10**9])
def test_a_config_with_a_senseless_number_of_depths_is_an_error(number: Any) -> None:
    config = mtp.config_of("qwen3_5_text")
    config.mtp_num_hidden_layers = number
    with pytest.raises(RecipeError):
        plan(config, is_new=False)
    if number == 10**9:
        # A base may have such a config, although the recipe does not ask for the layers.
        assert len(patterns_in_files(config)) < 1000


def test_labels_of_a_depth_are_further_ahead_and_never_of_another_sample() -> None:
    labels = torch.tensor([[-100, 1, 2, 3, -100, 5, 6, 7]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    found = labels_of_depths(labels, 2, positions)
    # Position i predicts the label in column i + 1.
    assert found.tolist() == [
        [-100, 1, 2, 3, -100, 5, 6, 7],
        [-100, 2, 3, -100, -100, 6, 7, -100],
        [-100, 3, -100, -100, -100, 7, -100, -100],
    ]
    alone = labels_of_depths(labels, 1)
    assert alone[1].tolist() == [-100, 2, 3, -100, 5, 6, 7, -100]
    # Position ids of images have three rows for each sample.
    assert labels_of_depths(labels, 1, positions.expand(3, 1, 8)).tolist() == alone.tolist()
    short = labels_of_depths(torch.tensor([[4, 5]]), 3)
    assert (short[1:] == -100).all()
    assert ahead(torch.ones(1, 2, 4), 3).tolist() == torch.zeros(1, 2, 4).tolist()
