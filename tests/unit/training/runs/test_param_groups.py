"""Which parameters get which optimizer and options: weight decay, groups of a recipe, several optimizers together."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.trainer import Trainer

from automodel_ckpt.config.keys.optimizer import (
    OptimizerConfig,
    OptimizerGroup,
    OptimizerTarget,
    OptionsGroup,
    TargetGroup,
)
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.optim.build import FusedAdamW
from automodel_ckpt.optim.combined_optimizer import CombinedOptimizer
from automodel_ckpt.training.parts.optimizers import build_optimizer, trained_parameters
from tests.support.models.sizes import model_sizes

SIZES = {
    **model_sizes(hidden=16, inner=16, layers=1, heads=2, kv_heads=2, vocab=32, positions=16),
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "num_experts": 2,
    "num_local_experts": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def model_of(model_type: str = "llama", *, device: str = "cpu") -> Any:
    config = CONFIG_MAPPING[model_type](**SIZES)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config)


def grouped(section: Any, model: nn.Module) -> tuple[torch.optim.Optimizer, list[list[str]]]:
    """The optimizer, and the names that each of its groups trains."""
    optimizer, labels = build_optimizer(section, model, add_up=list, takes_own_steps=False)
    assert len(labels) == len(optimizer.param_groups)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return optimizer, [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3", "gpt2", "opt", "qwen2_moe", "olmo2", "gemma3_text", "bloom"]
)
def test_weight_decay_leaves_out_what_transformers_trainer_leaves_out(model_type: str) -> None:
    model = model_of(model_type, device="meta")
    decayed = Trainer.get_decay_parameter_names(None, model)
    found = {each.names[0] for each in trained_parameters(model) if not each.is_norm_or_bias}
    assert found == {name for name, _ in model.named_parameters()} & set(decayed)


def test_the_first_group_that_matches_a_parameter_has_it_and_options_are_inherited() -> None:
    groups: list[Any] = [
        OptimizerGroup(params=["*.q_proj.*"], lr=1e-3),
        OptimizerGroup(params=["*.layers.*norm*"], weight_decay=0.5),
        OptimizerGroup(params=["*.layers.*"], betas=(0.5, 0.6)),
    ]
    section = OptimizerConfig(
        lr=1e-2, weight_decay=0.1, no_decay=["*norm*", "*.k_proj.*"], groups=groups
    )
    optimizer, names = grouped(section, model_of())
    options = [(g["lr"], g["weight_decay"], tuple(g["betas"])) for g in optimizer.param_groups]
    usual = (0.9, 0.999)
    assert options == [
        (1e-2, 0.1, usual),
        (1e-2, 0.0, usual),
        (1e-3, 0.1, usual),
        (1e-2, 0.5, usual),
        (1e-2, 0.1, (0.5, 0.6)),
        (1e-2, 0.0, (0.5, 0.6)),
    ]
    layer = "model.layers.0."
    assert names[:4] == [
        ["model.embed_tokens.weight", "lm_head.weight"],
        ["model.norm.weight"],
        [f"{layer}self_attn.q_proj.weight"],
        [f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight"],
    ]
    assert names[5] == [f"{layer}self_attn.k_proj.weight"] and len(names[4]) == 5


def test_muon_trains_matrices_and_adamw_the_rest_as_two_optimizers_would() -> None:
    torch.manual_seed(0)
    model = model_of()
    twin = copy.deepcopy(model)
    muon = TargetGroup(
        "torch.optim.Muon", {"lr": 0.02, "weight_decay": 0.1}, params=["hidden_matrices"]
    )
    optimizer, names = grouped(OptimizerConfig(lr=1e-2, groups=[muon]), model)
    assert isinstance(optimizer, CombinedOptimizer) and len(names[2]) == 7
    parameters = dict(twin.named_parameters())
    plain = [
        FusedAdamW(
            [
                {"params": [parameters[n] for n in names[0]], "weight_decay": 0.01},
                {"params": [parameters[n] for n in names[1]], "weight_decay": 0.0},
            ],
            lr=1e-2,
        ),
        torch.optim.Muon([parameters[name] for name in names[2]], lr=0.02, weight_decay=0.1),
    ]
    tokens = torch.arange(8)[None]
    for step in range(4):
        for each, optimizers in ((model, [optimizer]), (twin, plain)):
            each(input_ids=tokens, labels=tokens).loss.backward()
            for one in optimizers:
                one.step()
                one.zero_grad()
        if step == 1:
            # The state of a copy, loaded back: nothing may refer to the objects from before.
            optimizer.load_state_dict(copy.deepcopy(optimizer).state_dict())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, parameters[name]), name


def refusal(section: Any, model: nn.Module | None = None) -> str:
    with pytest.raises(RecipeError) as caught:
        grouped(section, model or model_of(device="meta"))
    return str(caught.value)


def test_mistakes_in_groups_are_named() -> None:
    typo = refusal(
        OptimizerConfig(no_decay=["*norn*"], groups=[OptimizerGroup(params=["*.qproj.*", "*"])])
    )
    assert "optimizer.no_decay" in typo and "*norn*" in typo
    assert "optimizer.groups.0.params" in typo and "*.qproj.*" in typo and "lm_head.weight" in typo
    later = refusal(
        OptimizerConfig(groups=[OptimizerGroup(params=["*"]), OptimizerGroup(params=["*norm*"])])
    )
    assert "earlier groups have all parameters" in later and "optimizer.groups.1" in later
    matrices = refusal(OptimizerTarget("torch.optim.Muon", {}))
    same = refusal(OptimizerTarget("automodel_ckpt.optim.muon.Muon", {}))
    assert same == matrices
    assert "takes matrices only" in matrices and "hidden_matrices" in matrices
    group = OptionsGroup(params=["*norm*"], kwargs={"momentums": 0.5})
    unknown = refusal(OptimizerTarget("torch.optim.SGD", {"lr": 0.1}, groups=[group]))
    assert "no option momentums" in unknown and "momentum, nesterov" in unknown


def own_optimizer(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, weight_decay=0.1)


def test_a_function_gets_all_parameters_to_group_them_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AUTOMODEL_CKPT_TRUST", "tests")
    section = OptimizerTarget(f"{__name__}.own_optimizer", {"lr": 0.1})
    optimizer, _ = grouped(section, model_of())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1]


def test_optimizers_whose_state_cannot_be_saved_are_rejected_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setenv("AUTOMODEL_CKPT_TRUST", "torchao")
    rejected = refusal(OptimizerTarget("torchao.optim.AdamW8bit", {}))
    assert "cannot be saved" in rejected and "adam8bit.AdamW8bit" in rejected
