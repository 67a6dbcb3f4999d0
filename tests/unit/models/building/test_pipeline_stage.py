"""Stages cut from a model compute, one after the other, what the whole model does, under the names of the whole."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.pipeline_stage import LocalStage, check_stages, parameters_of_stages
from tests.support.models.sizes import model_sizes
from tests.support.runs.parallel import VOCABULARY, model_of

SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 2,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}


COMMON: dict[str, Any] = {
    **model_sizes(hidden=32, inner=48, layers=4, heads=4, kv_heads=4, vocab=VOCABULARY),
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    # Embeddings are scaled, logits are capped.
    "gemma2": {**COMMON, "head_dim": 8, "sliding_window": 2},
    "granite": {**COMMON, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "cohere": COMMON,
    # Other names.
    "phi": COMMON,
    "gpt_neox": COMMON,
    "qwen3_moe": {
        **COMMON,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    },
}


def cut(model: Any, num_stages: int) -> list[tuple[Any, LocalStage]]:
    """Copies of *model* with one stage each."""
    parts = []
    for stage in range(num_stages):
        part = copy.deepcopy(model)
        parts.append((part, LocalStage(part, stage, num_stages)))
    return parts


def through_stages(parts: list[tuple[Any, LocalStage]], tokens: Any, **options: Any) -> Any:
    """The logits of *tokens* after all stages, in their order."""
    hidden = None
    for model, local in parts:
        given = {"input_ids": tokens}
        if hidden is not None:
            given = {"inputs_embeds": local.receive(hidden, tokens.shape[1])}
        hidden = model(**given, use_cache=False, **options).logits
    return hidden


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
    parts = cut(model, num_stages)
    assert torch.equal(through_stages(parts, tokens, position_ids=positions), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_several_families_can_be_divided(family: str) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**FAMILIES[family]))
    model.eval()
    check_stages(model, 4)
    tokens = torch.randint(0, VOCABULARY, (2, 7))
    whole = model(input_ids=tokens, use_cache=False).logits
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = []
    for parameters in parameters_of_stages(model, 4):
        held.append({names[id(parameter)] for parameter in parameters})
    parts = cut(model, 4)
    assert torch.equal(through_stages(parts, tokens), whole)
    for (part, _), expected in zip(parts, held, strict=True):
        assert {name for name, _ in part.named_parameters()} == expected
    assert set().union(*held) == set(names.values())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_are_divided_with_the_layers_that_they_are_in() -> None:
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    model: Any = get_peft_model(model_of(num_hidden_layers=4), config).eval()
    check_stages(model, 2)
    tokens = torch.randint(0, VOCABULARY, (2, 7))
    whole = model(input_ids=tokens, use_cache=False).logits
    parts = cut(model, 2)
    assert torch.equal(through_stages(parts, tokens), whole)
    for number, (part, _) in enumerate(parts):
        layers = {
            name.split(".layers.")[1][0] for name, _ in part.named_parameters() if "lora" in name
        }
        assert layers == ({"0", "1"} if number == 0 else {"2", "3"})


def refusal(model: Any, num_stages: int = 2) -> str:
    with pytest.raises(RecipeError) as caught:
        check_stages(model, num_stages)
    return str(caught.value)


def test_models_whose_layers_cannot_run_on_separate_ranks_are_rejected() -> None:
    bert: Any = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING["bert"](**COMMON | {"is_decoder": True})
    )
    assert "transformers has no plan for its stages" in refusal(bert)
    model: Any = model_of()
    model.model.extra = torch.nn.Linear(2, 2)
    assert "parameters elsewhere (model.extra.weight)" in refusal(model)
    model.config.num_kv_shared_layers = 1
    assert "its layers share values (num_kv_shared_layers)" in refusal(model)


def test_more_stages_than_layers_are_refused() -> None:
    text = refusal(model_of(), 3)
    assert "layers of the model: 2" in text
    assert "distributed.pp_size" in text
    assert "layers of the model: 1" in refusal(model_of(num_hidden_layers=1))
