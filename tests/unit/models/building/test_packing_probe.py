"""Which models keep samples apart that share a row, and that it makes no difference to loss and gradients there."""

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from automodel_ckpt.data.batches.packing import PackedDataset, RowLayout
from automodel_ckpt.data.collate import PadCollator
from automodel_ckpt.loss.causal import next_token_loss
from automodel_ckpt.models.attention.by_document import (
    Answer,
    keeps_samples_apart,
    padding_changes_outputs,
)
from automodel_ckpt.models.attention.row_masks import mask_by_positions
from automodel_ckpt.models.inspect.interface import (
    accepts_use_cache,
    attention_of,
    forward_parameters,
)
from automodel_ckpt.training.model.probes import probe_with_masks
from tests.support.models.sizes import model_sizes

_SIZES = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 4},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mamba": {"state_size": 4},
    "granitemoe": {"num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "falcon_h1": {
        "num_key_value_heads": 2,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
    },
    "afmoe": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}


def build(model_type: str, attention: str | None = None) -> Any:
    sizes = model_sizes(hidden=32, inner=48, layers=2, heads=4)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 97}
    known = (
        {}
        if model_type in ("gpt2", "bloom", "openai-gpt")
        else {**sizes, "max_position_embeddings": 64}
    )
    config = AutoConfig.for_model(model_type, **{**known, **ids, **_SIZES[model_type]})
    torch.manual_seed(0)
    options = {} if attention is None else {"attn_implementation": attention}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options).train()  # type: ignore[no-untyped-call]


APART = ["llama", "qwen3", "mistral", "gemma3_text", "gpt2"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("model_type", "one_row"), [*((name, False) for name in APART), ("llama", True)]
)
def test_models_that_mask_by_positions_are_recognised(
    model_type: str, attention: str, one_row: bool
) -> None:
    model = build(model_type, attention)
    assert keeps_samples_apart(model, one_row, {"use_cache": False})
    assert attention_of(model) == attention


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["opt", "bloom", "mamba"])
def test_models_whose_samples_see_each_other_are_recognised(model_type: str) -> None:
    assert not keeps_samples_apart(build(model_type), False, {"use_cache": False})


def test_a_model_whose_outputs_are_not_finite_is_recognised() -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    answer = keeps_samples_apart(model, False, {"use_cache": False})
    assert not answer
    assert answer.reason == " (its outputs are not finite: look for NaN in its weights)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_little_that_a_recurrent_layer_carries_over_is_recognised(dtype: torch.dtype) -> None:
    # Its attention keeps samples apart, and the state space layers beside it change the outputs by less than 1 %.
    assert not keeps_samples_apart(build("falcon_h1").to(dtype), False, {"use_cache": False})


def test_a_model_with_outputs_that_depend_on_padding_is_recognised() -> None:
    """CPM-Ant takes no attention mask, and expects padding on the left."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "dim_head": 8, "dim_ff": 24}
    lengths = {"prompt_length": 4, "prompt_types": 4, "vocab_size": 50, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = AutoConfig.for_model("cpmant", **sizes, **lengths)
    assert padding_changes_outputs(AutoModelForCausalLM.from_config(config), {})
    assert not padding_changes_outputs(build("llama"), {})
    assert not padding_changes_outputs(build("opt"), {})


def test_models_with_a_mask_of_a_fixed_length_have_no_longer_rows() -> None:
    answer = keeps_samples_apart(build("gpt_neo"), False, {"use_cache": False})
    assert not answer
    assert answer.reason == " (its mask has 64 positions, and rows can be longer)"
    for length, holds in ((64, True), (65, False)):
        answer = keeps_samples_apart(
            build("gpt_neo"), False, {"use_cache": False}, max_row_length=length
        )
        assert bool(answer) == holds


@pytest.mark.parametrize(("model_type", "expected"), [("granitemoe", True), ("openai-gpt", False)])
def test_use_cache_is_passed_where_a_model_inside_takes_it(model_type: str, expected: bool) -> None:
    model = build(model_type)
    assert "use_cache" not in forward_parameters(model)
    assert accepts_use_cache(model) == expected
    if expected:
        assert keeps_samples_apart(model, False, {"use_cache": False})


def test_a_classifier_that_passes_use_cache_itself_gets_none() -> None:
    part = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 20}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
    config = AutoConfig.for_model(
        "t5gemma", encoder={**part, **heads}, decoder={**part, **heads}, vocab_size=20
    )
    model = AutoModelForSequenceClassification.from_config(config)
    assert not accepts_use_cache(model)


def test_a_module_with_a_config_and_without_a_base_model_gets_no_use_cache() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build("llama")
            self.config = self.inner.config

        def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
            return self.inner(input_ids, **options)

    assert not accepts_use_cache(Model())


def test_a_model_that_fails_when_asked_is_not_used_so_and_its_own_error_is_kept() -> None:
    class Broken(nn.Linear):
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise KeyError("pixel_values")

    answer = keeps_samples_apart(Broken(2, 2), False, {})
    assert not answer
    assert answer.reason == " (a forward pass of a few tokens raised KeyError: 'pixel_values')"


def samples() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (12, 5, 2, 7, 1, 3)]
    return [{"input_ids": each, "labels": [-100, *each[1:]]} for each in tokens]


def loss_and_gradients(
    model: nn.Module, *batches: dict[str, torch.Tensor]
) -> tuple[float, list[torch.Tensor]]:
    """Summed over *batches*."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        loss = next_token_loss(model(**inputs, use_cache=False).logits, batch["labels"])
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("model_type", "hidden_size"), [*((name, 4096) for name in APART), ("llama", 8)]
)
def test_sharing_rows_changes_neither_loss_nor_gradients(
    model_type: str, attention: str, hidden_size: int
) -> None:
    model = build(model_type, attention).double().eval()
    collate, packs = PadCollator(0), PackedDataset(samples(), 13)
    expected_loss, expected = loss_and_gradients(
        model, *(collate([sample]) for sample in samples())
    )
    padded = collate(samples())
    for batch in (padded, collate([packs[i] for i in range(len(packs))])):
        rows = RowLayout(hidden_size)(batch)
        assert rows["input_ids"].numel() < padded["input_ids"].numel()
        loss, gradients = loss_and_gradients(model, rows)
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def probed(model: Any) -> Any:
    """What the probe needs of a model on one rank."""
    return SimpleNamespace(
        from_tokens=model, layout=SimpleNamespace(gloo_group=None, in_stages=False)
    )


@pytest.mark.parametrize("model_type", ["gpt_oss", "afmoe", "opt", "xglm"])
def test_models_that_ignore_positions_in_their_masks_get_masks(model_type: str) -> None:
    # Products of experts have no float64.
    model = build(model_type, "eager").eval()
    apart = partial(keeps_samples_apart, model, False, {"use_cache": False})
    if apart():
        pytest.skip("this version of transformers builds its masks by position ids")
    collate = PadCollator(0)
    separate = (collate([sample]) for sample in samples())
    expected_loss, expected = loss_and_gradients(model, *separate)
    assert probe_with_masks(probed(model), apart, mask_by_positions) == (Answer(True), True)
    loss, gradients = loss_and_gradients(model, RowLayout(4096)(collate(samples())))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_model_that_masks_do_not_help_stays_as_it_is() -> None:
    model = build("falcon_h1")
    apart = partial(keeps_samples_apart, model, False, {"use_cache": False})
    answer, has_masks = probe_with_masks(probed(model), apart, mask_by_positions)
    assert not answer and not has_masks
    assert not model.get_decoder()._forward_pre_hooks


@pytest.mark.parametrize("one_row", [True, False])
def test_rounding_of_experts_is_no_effect_of_another_sample(one_row: bool) -> None:
    assert keeps_samples_apart(build("mixtral"), one_row, {"use_cache": False})


def test_a_cache_of_keys_and_values_lets_samples_see_each_other() -> None:
    assert not keeps_samples_apart(build("llama"), False, {"use_cache": True})
