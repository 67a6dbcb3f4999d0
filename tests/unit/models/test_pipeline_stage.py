"""Stages cut from a model compute, one after the other, what the whole model does, under the names of the whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.pipeline_stage import (
    check_stages,
    keep_stage,
    layers_of,
    parameters_of_stages,
)
from tests.support.parallel import VOCABULARY, model_of
from tests.unit.models.test_packing_probe import build

SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 2,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}


def cut(model: Any, num_stages: int) -> list[Any]:
    stages = [copy.deepcopy(model) for _ in range(num_stages)]
    for number, stage in enumerate(stages):
        keep_stage(stage, number, num_stages)
    return stages


def test_layers_are_shared_out_in_order_as_evenly_as_can_be() -> None:
    assert [list(layers_of(7, stage, 3)) for stage in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [len(layers_of(4, stage, 4)) for stage in range(4)] == [1] * 4


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize(
    ("kind", "settings"), [("llama", {}), ("qwen3", SLIDING | {"tie_word_embeddings": True})]
)
def test_stages_compute_together_what_the_whole_model_does(
    kind: str, settings: dict[str, Any], num_stages: int
) -> None:
    model: Any = model_of(kind, num_hidden_layers=4, **settings)
    check_stages(model, num_stages)
    tokens = torch.randint(0, VOCABULARY, (2, 7))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2)
    whole = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    first, *others = cut(model, num_stages)
    hidden = first(input_ids=tokens, position_ids=positions, use_cache=False).logits
    for stage in others:
        hidden = stage(inputs_embeds=hidden, position_ids=positions, use_cache=False).logits
    assert torch.equal(hidden, whole)


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_holds_its_own_parameters_under_their_names_in_the_whole_model(tied: bool) -> None:
    model: Any = model_of(num_hidden_layers=3, tie_word_embeddings=tied)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    stages = cut(model, 2)
    held = [{name for name, _ in stage.named_parameters()} for stage in stages]
    assert held == [
        {names[id(p)] for p in parameters} for parameters in parameters_of_stages(model, 2)
    ]
    assert held[0] | held[1] == set(names.values())
    assert held[0] & held[1] == ({"model.embed_tokens.weight"} if tied else set())
    assert "model.layers.2.mlp.up_proj.weight" in held[1]
    if tied:
        assert stages[1].lm_head.weight is stages[1].model.embed_tokens.weight


def refusal(model: Any, num_stages: int = 2) -> str:
    with pytest.raises(RecipeError) as caught:
        check_stages(model, num_stages)
    return str(caught.value)


def test_a_model_that_does_more_to_hidden_states_than_its_layers_do_is_refused() -> None:
    assert "it has no transformer.embed_tokens" in refusal(build("gpt2"))
    model: Any = model_of()
    scaled = model.model.forward
    model.model.forward = lambda inputs_embeds, **rest: scaled(
        inputs_embeds=2 * inputs_embeds, **rest
    )
    assert "modifies hidden states" in refusal(model)
    model = model_of()
    model.model.extra = torch.nn.Linear(2, 2)
    assert "parameters elsewhere (model.extra.weight)" in refusal(model)


def test_more_stages_than_layers_are_refused() -> None:
    text = refusal(model_of(), 3)
    assert "the model has 2 layers" in text
    assert "set it to 2 or less" in text
