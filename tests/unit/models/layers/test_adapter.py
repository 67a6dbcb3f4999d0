"""Which modules get an adapter, what peft is given for them, and what is refused by name."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from automodel_ckpt.checkpoint.state.module_tensors import adapter_keys
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.layers.adapter import add_adapters, copy_saved_modules
from automodel_ckpt.models.layers.adapter_layers import find_modules
from automodel_ckpt.models.layers.lora import Lora
from automodel_ckpt.models.meta_init import InitialValues, allocate, initialise, on_meta
from automodel_ckpt.models.quantize import check_quantization, type_beside_quantized
from automodel_ckpt.training.gradients import check_all_trained
from tests.support.models.sizes import model_sizes


def llama(**more: Any) -> Any:
    return AutoModelForCausalLM.from_config(
        LlamaConfig(**model_sizes(vocab=40, hidden=16, inner=24, layers=2, heads=2), **more)
    )


class Twins(nn.Module):
    """Two towers with layers of the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.ModuleDict({"proj": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
        self.vision = nn.ModuleDict(
            {"text": nn.ModuleDict({"proj": nn.Linear(2, 2)}), "subproj": nn.Linear(2, 2)}
        )


def test_names_wildcards_and_all_linear_choose_layers() -> None:
    model = llama()
    everything, _ = find_modules(model, Lora())
    assert len(everything) == 14 and "lm_head" not in everything
    assert find_modules(model, Lora(target_modules="q_proj"))[0] == [
        f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)
    ]
    assert find_modules(model, Lora(target_modules=["*.layers.1.*.[qk]_proj"]))[0] == [
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.k_proj",
    ]
    without, _ = find_modules(model, Lora(exclude_modules=["*.layers.0.*", "down_proj"]))
    assert len(without) == 6
    optional = ["*.layers.0.*", "down_proj", "*vision*"]
    assert find_modules(model, Lora(exclude_if_present=optional))[0] == without
    targets, saved = find_modules(model, Lora(modules_to_save=["lm_head", "norm", "*.1.mlp"]))
    assert saved == ["model.layers.1.mlp", "model.norm", "lm_head"]
    assert not [name for name in targets if "layers.1.mlp" in name]


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"target_modules": ["q_porj"]}, "did you mean q_proj"),
        ({"target_modules": "*.self_atn.*"}, "there are embed_tokens, q_proj"),
        ({"target_modules": "self_attn"}, "model.layers.0.self_attn is a LlamaAttention"),
        ({"modules_to_save": ["head"]}, "no module has this name"),
        ({"exclude_modules": ["lm_haed"]}, "did you mean lm_head"),
        (
            {"target_modules": ["lm_head"], "modules_to_save": ["lm_head"]},
            "both fully trained and adapted",
        ),
        ({"exclude_modules": ["*"]}, "no layer is left to adapt"),
    ],
)
def test_names_that_choose_nothing_or_contradict_each_other_are_refused(
    lora: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        find_modules(llama(), Lora(**lora))
    assert said in str(caught.value) and "peft." in str(caught.value)


def test_the_weights_of_fused_experts_belong_in_another_key() -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = MixtralConfig(vocab_size=8, hidden_size=8, intermediate_size=8, **sizes)
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    expected = r"down_proj has the weights of fused experts[\s\S]*list it in peft.target_parameters"
    with pytest.raises(RecipeError, match=expected):
        find_modules(model, Lora(target_modules=["q_proj", "down_proj"]))


def test_single_layers_have_other_ranks_and_alphas() -> None:
    lora = Lora(
        target_modules=["q_proj", "v_proj"],
        rank_pattern={"1.self_attn.q_proj": 3, "q_proj": 8},
        alpha_pattern={"*.1.*": 5},
    )
    added = add_adapters(llama(), lora, task_type="CAUSAL_LM")
    found = {}
    for name, layer in added.model.named_modules():
        if hasattr(layer, "lora_A") and layer.lora_A:
            rank = layer.lora_A["default"].weight.shape[0]
            found[name.removeprefix("base_model.model.model.")] = rank, layer.scaling["default"]
    assert found == {
        "layers.0.self_attn.q_proj": (8, 2.0),
        "layers.0.self_attn.v_proj": (8, 2.0),
        "layers.1.self_attn.q_proj": (3, 5 / 3),
        "layers.1.self_attn.v_proj": (8, 5 / 8),
    }
    assert added.peft_config.rank_pattern == lora.rank_pattern
    # A glob has no equal in peft's language but names.
    assert added.peft_config.alpha_pattern == {
        "^model.layers.1.self_attn.q_proj": 5,
        "^model.layers.1.self_attn.v_proj": 5,
    }
    assert added.description["ranks"] == {"model.layers.1.self_attn.q_proj": 3}
    wrong = Lora(target_modules=["q_proj"], rank_pattern={"v_proj": 3}, alpha_pattern={"x": 3})
    with pytest.raises(RecipeError) as caught:
        add_adapters(llama(), wrong, task_type="CAUSAL_LM")
    assert "peft.rank_pattern" in str(caught.value) and "peft.alpha_pattern" in str(caught.value)
    assert "there are q_proj" in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        # Sums of float16 and bfloat16 are float32.
        (torch.float16, torch.float32),
    ],
)
def test_what_is_not_quantized_stays_in_bfloat16_so_that_hidden_states_do(
    dtype: torch.dtype, expected: torch.dtype
) -> None:
    model: Any = llama().to(dtype)
    model.is_quantized = True
    added = add_adapters(model, Lora(target_modules=["q_proj"]), task_type="CAUSAL_LM")
    types: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    for name, parameter in added.model.named_parameters():
        types["lora_" in name].add(parameter.dtype)
        assert parameter.requires_grad == ("lora_" in name)
    assert types == {True: {torch.float32}, False: {expected}}
    assert type_beside_quantized(dtype) == expected


def test_layers_that_peft_would_take_for_experts_or_refuses_get_no_adapter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1}
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "qk_rope_head_dim": 2,
        "qk_nope_head_dim": 2,
    }
    parts = {
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    }
    low_rank = {"kv_lora_rank": 2, "q_lora_rank": 2, "v_head_dim": 4, "moe_intermediate_size": 8}
    experts = AutoConfig.for_model("deepseek_v3", **sizes, **heads, **parts, **low_rank)
    mixture = AutoModelForCausalLM.from_config(experts)
    added = add_adapters(mixture, Lora(), task_type="CAUSAL_LM")
    assert not [
        name
        for name, _ in added.model.named_parameters()
        if "lora_" in name and ".experts." in name
    ]
    unsuited = "peft does not support adapters on these layers of this model, so they get none: "
    assert f"{unsuited}down_proj, gate_proj, up_proj" in caplog.text
    with pytest.raises(
        RecipeError,
        match=r"does not support adapters on these layers[\s\S]*shared_experts\.up_proj",
    ):
        find_modules(mixture, Lora(target_modules=["q_proj", "*.shared_experts.*"]))
    config = AutoConfig.for_model("mamba", **sizes, state_size=2)
    mamba = AutoModelForCausalLM.from_config(config)
    with pytest.raises(RecipeError, match=r"peft does not support adapters on[\s\S]*out_proj"):
        add_adapters(mamba, Lora(target_modules=["out_proj"]), task_type="CAUSAL_LM")
    mamba = AutoModelForCausalLM.from_config(config)
    added = add_adapters(mamba, Lora(), task_type="CAUSAL_LM").model
    assert f"{unsuited}out_proj" in caplog.text
    # The mixer multiplies with the weight of dt_proj itself.
    tokens = torch.arange(8)[None]
    added(input_ids=tokens, labels=tokens).loss.backward()
    unused = "1 of them: backbone.layers.0.mixer.dt_proj; if no batch uses them, leave them out: peft.exclude"
    check_all_trained(added, has_adapters=True, is_error=False)
    assert unused in caplog.text
    with pytest.raises(RecipeError, match=r"\['backbone\.layers\.\*\.mixer\.dt_proj'\]"):
        check_all_trained(added, has_adapters=True, is_error=True)


@pytest.mark.parametrize(
    ("family", "fields", "not_linear"),
    [
        ("phimoe", {"num_local_experts": 2}, "router"),
        ("llama4_text", {"num_local_experts": 2, "head_dim": 8, "moe_layers": [0]}, "router"),
        ("falcon", {}, ""),
    ],
)
def test_layers_that_return_something_else_than_a_linear_layer_get_no_adapter(
    family: str, fields: dict[str, Any], not_linear: str, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **sizes, **heads, **fields)
    )
    state = torch.get_rng_state()
    targets, _ = find_modules(model, Lora())
    assert torch.equal(torch.get_rng_state(), state)
    assert targets and not [name for name in targets if name.endswith("router")]
    assert ("so they get none: router" in caplog.text) == bool(not_linear)
    adapted = add_adapters(model, Lora(), task_type="CAUSAL_LM").model
    tokens = torch.arange(8)[None]
    adapted.train()(input_ids=tokens, labels=tokens).loss.backward()
    if not_linear:
        with pytest.raises(
            RecipeError, match=r"does not support adapters on[\s\S]*exclude_modules"
        ):
            find_modules(model, Lora(target_modules=["*.router"]))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_layers_whose_adapters_peft_would_not_load_get_none(tmp_path: Path) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    layers = {"layer_types": ["full_attention"] * 2, "shared_expert_intermediate_size": 8}
    config = AutoConfig.for_model("laguna", **sizes, **heads, **experts, **layers)
    base = AutoModelForCausalLM.from_config(config)
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(RecipeError, match=r"not support adapters[\s\S]*1\.mlp\.shared_experts"):
        find_modules(base, Lora(target_modules=["*_proj"]))
    adapted = add_adapters(base, Lora(), task_type="CAUSAL_LM").model
    saved = {name for name, _ in adapted.named_modules() if name.endswith("lora_A.default")}
    assert any("layers.0.mlp.down_proj" in name for name in saved)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    # Otherwise, peft 0.20 warns that this base has no name whose vocabulary it could compare.
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(fresh, str(tmp_path / "adapter"))
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(loaded(tokens).logits, adapted.eval()(tokens).logits)


def test_modules_to_save_whose_names_end_like_others_are_refused() -> None:
    model = Twins()
    with pytest.raises(RecipeError, match="cannot distinguish these modules from others"):
        add_adapters(
            model, Lora(target_modules=["*subproj"], modules_to_save=["te*.proj"]), task_type=None
        )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"use_dora": True, "bias": "lora_only"},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": False},
    ],
)
def test_a_checkpoint_holds_what_trains_under_the_keys_that_peft_saves(
    tied: bool, lora: dict[str, Any]
) -> None:
    from peft import get_peft_model_state_dict

    model: Any = add_adapters(
        llama(tie_word_embeddings=tied), Lora(**lora), task_type="CAUSAL_LM"
    ).model
    keys = adapter_keys(model, model.state_dict())
    assert keys is not None
    assert {name for name, p in model.named_parameters() if p.requires_grad} <= keys.keys()
    assert (
        set(keys.values()) == get_peft_model_state_dict(model, save_embedding_layers=False).keys()
    )
    assert all("lora_" in name or "modules_to_save" in name for name in keys)


def test_resized_embeddings_that_are_trained_as_a_whole_are_saved_once() -> None:
    model = llama(tie_word_embeddings=True)
    model.resize_token_embeddings(44)
    lora = Lora(target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    wrapped = add_adapters(model, lora, task_type="CAUSAL_LM", num_base_rows=40).model
    keys = adapter_keys(wrapped, wrapped.state_dict()) or {}
    ends = {"base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"}
    assert {key for key in keys.values() if "lora_" not in key} == ends
    assert {name for name, p in wrapped.named_parameters() if p.requires_grad} <= keys.keys()


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_adapters_on_tied_ends_of_the_model_are_refused_unless_they_may_differ(target: str) -> None:
    lora = Lora(target_modules=[target])
    with pytest.raises(RecipeError, match="ensure_weight_tying to false"):
        add_adapters(llama(tie_word_embeddings=True), lora, task_type="CAUSAL_LM")
    add_adapters(llama(), lora, task_type="CAUSAL_LM")


def test_an_output_layer_that_several_embeddings_share_is_not_trained_as_a_whole() -> None:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    model = T5ForConditionalGeneration(T5Config(**sizes, tie_word_embeddings=True))
    lora = Lora(target_modules=["q"], modules_to_save=["lm_head"])
    with pytest.raises(RecipeError, match=r"tied to encoder.embed_tokens, decoder.embed_tokens"):
        add_adapters(model, lora, task_type="SEQ_2_SEQ_LM")
    add_adapters(model, replace(lora, ensure_weight_tying=False), task_type="SEQ_2_SEQ_LM")


@pytest.mark.parametrize(
    ("kind", "device", "strategy", "said"),
    [
        ("int8", "cpu", "single", "8 bits need a CUDA device; this is a cpu"),
        ("int8", "cuda", "fsdp2", "cannot be sharded by fsdp2"),
        ("nf4", "cuda", "ddp", "bitsandbytes is not installed"),
    ],
)
def test_a_base_that_cannot_be_quantized_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, kind: Any, device: str, strategy: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(RecipeError, match=said):
        check_quantization(kind, device=torch.device(device), strategy=strategy)


@pytest.mark.parametrize("saved", ["embed_tokens", "lm_head"])
def test_trained_copies_of_modules_begin_with_all_values_of_the_base(saved: str) -> None:
    """The scale of Gemma's embeddings is a buffer that no file contains. With tied weights, both modules are copied."""
    config = Gemma2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip

    def build() -> Any:
        return on_meta(lambda: AutoModelForCausalLM.from_config(config))

    base = build()
    modules = dict(base.named_modules())
    lora = Lora(target_modules=["q_proj"], modules_to_save=[saved])
    model = add_adapters(base, lora, task_type="CAUSAL_LM", num_base_rows=32).model
    # Memory that was not zero before: what is not copied, is seen.
    with mock.patch("torch.empty_like", lambda *a, **k: torch.full_like(*a, fill_value=7.0, **k)):
        allocate(model, torch.device("cpu"))
    initialise(modules, InitialValues(build(), 0), lambda name, module: lambda key: True)
    copy_saved_modules(model)
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        adapted = model(input_ids=tokens).logits
        with model.disable_adapter():
            expected = model(input_ids=tokens).logits
    torch.testing.assert_close(adapted, expected)
