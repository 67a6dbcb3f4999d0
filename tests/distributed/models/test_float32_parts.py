"""Parts that a model keeps in float32: gathered and reduced in float32 beside others in bfloat16."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    M2M100Config,
    M2M100ForConditionalGeneration,
)

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.layers.adapter import add_adapters, copy_saved_modules, widen_trained
from automodel_ckpt.models.layers.lora import Lora
from automodel_ckpt.models.meta_init import constants_in, float32_names
from automodel_ckpt.parallel.fsdp_groups import check_gathered_types
from automodel_ckpt.parallel.parallelize import Parallelism, parallelize
from tests.support import ranks
from tests.support.models.sizes import model_sizes
from tests.support.runs import parallel
from tests.support.runs.parallel import VOCABULARY, global_batch, layout_here, train_steps

ROUTER = "model.layers.1.mlp.gate.weight"


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A mixture of *dtype* whose routers, which are trained, stay in float32. One of its two layers has experts."""
    config = DeepseekV3Config(
        **model_sizes(vocab=VOCABULARY, hidden=16, inner=16, layers=2, heads=2, kv_heads=2),
        initializer_range=0.3,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        moe_intermediate_size=8,
        num_experts_per_tok=2,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    # As in transformers 5.24.
    model._keep_in_fp32_modules_strict = {"mlp.gate.weight"}
    low = low_names(model)
    for name, parameter in model.named_parameters():
        if name in low:
            parameter.data = parameter.data.to(dtype)
    trained: nn.Module = model.train()
    return trained


def low_names(model: nn.Module) -> set[str]:
    kept = float32_names(model, torch.bfloat16)
    assert ROUTER in kept
    return {name for name, _ in model.named_parameters()} - kept


def sharded_steps(how: Parallelism, stored: torch.dtype, **sizes: int) -> list[tuple[float, float]]:
    layout = layout_here(**sizes)
    model = parallelize(model_of(stored), layout, how)
    steps = train_steps(model, layout)
    gradients = [each.grad for each in model.parameters() if each.requires_grad]
    assert all(each is None or each.dtype.is_floating_point for each in gradients)
    return steps


def plain_steps(num_parts: int, stored: torch.dtype) -> list[tuple[float, float]]:
    """(mean loss, gradient norm) of two steps with plain torch on one rank.

    A copy of the weights computes; it is in bfloat16, apart from what stays in float32.
    """
    masters, low = model_of(stored), low_names(model_of())
    trained = [each for each in masters.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    steps = []
    for number in range(2):
        tokens = global_batch(number)
        num_labels = tokens[:, 1:].numel()
        copy = model_of()
        pairs = list(zip(copy.named_parameters(), masters.parameters(), strict=True))
        for (name, each), master in pairs:
            data = master.detach().clone()
            each.data = data.bfloat16() if name in low else data
        total = 0.0
        for part in tokens.chunk(num_parts):
            logits = copy(input_ids=part, use_cache=False).logits
            labels = part[:, 1:].flatten()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum")
            (loss / num_labels).backward()
            total += loss.item()
            for (_, each), master in pairs:
                if each.grad is not None:
                    gradient = each.grad.to(master.dtype)
                    master.grad = gradient if master.grad is None else master.grad + gradient
                    each.grad = None
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((total / num_labels, norm.item()))
    return steps


def mixed(**settings: Any) -> Parallelism:
    names = float32_names(model_of(), torch.bfloat16)
    return Parallelism("fsdp2", compute_dtype=torch.bfloat16, float32_names=names, **settings)


@pytest.mark.parametrize(
    ("num_ranks", "settings", "sizes"),
    [
        (1, {}, {}),
        (2, {}, {}),
        pytest.param(2, {"defer_gradient_sync": True}, {}, marks=pytest.mark.further),
        pytest.param(4, {}, {"dp_replicate_size": 2}, marks=pytest.mark.further),
    ],
)
def test_fsdp2_in_bfloat16_computes_these_parts_in_float32(
    num_ranks: int, settings: dict[str, Any], sizes: dict[str, int]
) -> None:
    expected = plain_steps(2 * num_ranks, torch.float32)
    found = ranks.run(lambda: sharded_steps(mixed(**settings), torch.float32, **sizes), num_ranks)
    for each in found:
        assert each == [pytest.approx(step, rel=1e-6) for step in expected]


@pytest.mark.further
def test_divided_experts_get_the_weights_of_a_router_in_float32() -> None:
    def found() -> list[tuple[float, float]]:
        return sharded_steps(mixed(), torch.float32, ep_size=2)

    for each in ranks.run(found, 2):
        for (loss, norm), expected in zip(each, plain_steps(4, torch.float32), strict=True):
            # Gradients of an expert are rounded once for the tokens of both ranks.
            assert (loss, norm) == (
                pytest.approx(expected[0], rel=1e-6),
                pytest.approx(expected[1], rel=2e-3),
            )


def test_fsdp2_trains_them_beside_weights_in_bfloat16() -> None:
    expected = plain_steps(4, torch.bfloat16)
    found = ranks.run(lambda: sharded_steps(Parallelism("fsdp2"), torch.bfloat16), 2)
    for each in found:
        # The order of sums in bfloat16 differs.
        assert each == [pytest.approx(step, rel=2e-3) for step in expected]


def sharded_logits(
    model: nn.Module, inputs: torch.Tensor, float32_names: frozenset[str] = frozenset()
) -> torch.Tensor:
    """Shard *model* in place with fsdp2, which computes in bfloat16; return its logits."""
    how = Parallelism("fsdp2", compute_dtype=torch.bfloat16, float32_names=float32_names)
    sharded = parallelize(model, layout_here(), how)
    logits: torch.Tensor = sharded(input_ids=inputs, use_cache=False).logits
    return logits.detach()


def test_layers_get_positions_in_float32_if_the_model_computes_them_so() -> None:
    """ERNIE's layers compute with sines and cosines in float32, which fsdp2 would round to bfloat16."""
    plain = {name: each.bfloat16() for name, each in ernie().state_dict().items()}
    inputs = global_batch(0)
    expected = ernie()
    for name, parameter in expected.named_parameters():
        parameter.data = plain[name]
    logits = expected(input_ids=inputs, use_cache=False).logits

    (found,) = ranks.run(lambda: sharded_logits(ernie(), inputs), 1)
    assert torch.equal(found, logits)


def ernie() -> nn.Module:
    config = AutoConfig.for_model(
        "ernie4_5",
        **model_sizes(vocab=VOCABULARY, hidden=16, inner=16, layers=2, heads=2, kv_heads=1),
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def test_an_output_layer_in_float32_gets_inputs_in_float32() -> None:
    """HY's output layer is larger than a decoder layer here, so that fsdp2 gathers it separately."""
    inputs = global_batch(0)
    expected = hunyuan()
    names = float32_names(expected, torch.bfloat16)
    assert "lm_head.weight" in names
    for name, parameter in expected.named_parameters():
        if name not in names:
            parameter.data = parameter.data.bfloat16()
    logits = expected(input_ids=inputs, use_cache=False).logits

    def found() -> torch.Tensor:
        model: Any = hunyuan()
        sharded = sharded_logits(model, inputs, names)
        assert isinstance(model.get_output_embeddings(), FSDPModule)
        return sharded

    assert torch.equal(ranks.run(found, 1)[0], logits)


def hunyuan() -> nn.Module:
    config = AutoConfig.for_model(
        "hy_v4",
        **model_sizes(vocab=8 * VOCABULARY, hidden=16, inner=16, layers=1, heads=2, kv_heads=1),
        initializer_range=0.3,
        head_dim=8,
        moe_intermediate_size=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        index_head_dim=8,
        index_n_heads=2,
        index_topk=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def test_tables_of_positions_and_batch_normalization_suit_layers_in_bfloat16() -> None:
    """M2M100 adds a table, which is no parameter, to its embeddings. Running means stay in float32."""
    inputs = global_batch(0)
    features = torch.randn(4, 8)

    def found() -> tuple[torch.Tensor, torch.Tensor]:
        model = m2m()
        constants = constants_in(model, torch.bfloat16)
        assert constants == {
            f"model.{part}.embed_positions.weights" for part in ("encoder", "decoder")
        }
        how = Parallelism("fsdp2", compute_dtype=torch.bfloat16, constants=constants)
        sharded = parallelize(model, layout_here(), how)
        logits = sharded(input_ids=inputs, decoder_input_ids=inputs, use_cache=False).logits
        block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        names = float32_names(block, torch.bfloat16)
        assert names == {"1.weight", "1.bias"}
        how = Parallelism("fsdp2", compute_dtype=torch.bfloat16, float32_names=names)
        normalized = parallelize(block, layout_here(), how)(features)
        assert block[1].running_mean.dtype == torch.float32
        return logits.detach(), normalized.detach()

    ((logits, normalized),) = ranks.run(found, 1)
    plain = m2m(torch.bfloat16)
    plain.load_state_dict(m2m().state_dict())
    expected = plain(input_ids=inputs, decoder_input_ids=inputs, use_cache=False).logits
    assert torch.equal(logits, expected)
    assert normalized.dtype == torch.bfloat16


def m2m(dtype: torch.dtype = torch.float32) -> nn.Module:
    config = M2M100Config(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=32,
        dropout=0.0,
        attention_dropout=0.0,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        init_std=0.3,
    )
    torch.manual_seed(0)
    model: nn.Module = M2M100ForConditionalGeneration._from_config(config, dtype=dtype)
    return model


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(inputs)
        return outputs


class Tower(nn.Module):
    """It computes its inputs in the type of its first layer, as the audio tower of Fun-ASR."""

    _no_split_modules = ("Layer",)
    _keep_in_fp32_modules_strict = None

    def __init__(self, convert: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self._convert = convert

    def weight(self) -> torch.Tensor:
        return self.layers[0].linear.weight  # type: ignore[union-attr, return-value]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self._convert(self, inputs.float())
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


CONVERSIONS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "dtype": lambda tower, inputs: inputs.to(tower.weight().dtype),
    "first parameter": lambda tower, inputs: inputs.to(next(tower.parameters()).dtype),
    "to": lambda tower, inputs: inputs.to(tower.weight()),
    "type_as": lambda tower, inputs: inputs.type_as(tower.weight().data),
    "new tensor": lambda tower, inputs: tower.weight().new_zeros(inputs.shape) + inputs.bfloat16(),
    "state": lambda tower, inputs: inputs.to(
        dict(tower.named_parameters())["layers.1.linear.bias"]
    ),
}


def test_a_model_reads_the_type_in_which_a_layer_is_computed_before_it_is_gathered() -> None:
    inputs = torch.randn(2, 8)
    how = Parallelism("fsdp2", compute_dtype=torch.bfloat16)

    def sharded(
        convert: Callable[[Any, torch.Tensor], torch.Tensor], how: Parallelism = how
    ) -> nn.Module:
        return parallelize(Tower(convert), layout_here(), how)

    def found() -> dict[str, torch.Tensor]:
        outputs = {}
        for form, convert in CONVERSIONS.items():
            tower = sharded(convert)
            outputs[form] = tower(inputs).detach().clone()
            assert all(isinstance(each, DTensor) for each in tower.parameters())
        outputs["stored"] = sharded(CONVERSIONS["to"], Parallelism("fsdp2"))(inputs).detach()
        failing = sharded(lambda tower, inputs: inputs.bfloat16() @ tower.weight())
        with pytest.raises(RecipeError, match=r"outside of the layer") as error:
            failing(inputs)
        assert "mm with a weight of layers.0" in str(error.value)
        assert all(isinstance(each, DTensor) for each in failing.parameters())
        return outputs

    (outputs,) = ranks.run(found, 1)
    expected = Tower(CONVERSIONS["dtype"]).bfloat16()(inputs)
    for form in CONVERSIONS:
        assert torch.equal(outputs[form], expected), form
    assert torch.equal(outputs["stored"], Tower(CONVERSIONS["dtype"])(inputs))


class ConvertsSecretly(nn.Module):
    """Converts a layer in a way that its source does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        layers = [self.layer]
        layers[0].double()
        result: torch.Tensor = self.layer(inputs.double())
        return result


def test_a_conversion_in_the_forward_pass_is_an_error() -> None:
    def forward() -> None:
        model = parallelize(ConvertsSecretly(), layout_here(), Parallelism("fsdp2"))
        model(torch.ones(2, 4))
        with pytest.raises(
            RecipeError, match=r"fsdp2, layer\.\w+: from torch.float32 to torch.float64"
        ):
            check_gathered_types(model)

    ranks.run(forward, 1)


def test_on_one_rank_fsdp2_casts_what_trains_and_leaves_a_base_in_16_bits_alone() -> None:
    ((sharded, frozen), steps) = ranks.run(adapter_steps, 1)[0]
    assert sharded == {torch.float32}
    assert frozen == set()
    ((sharded, frozen), steps_of_two) = ranks.run(adapter_steps, 2)[0]
    assert (sharded, frozen) == ({torch.float32}, {torch.bfloat16})
    for one, two in zip(steps, steps_of_two, strict=True):
        assert one == pytest.approx(two, rel=0.03)


def adapter_steps() -> tuple[tuple[set[torch.dtype], set[torch.dtype]], list[tuple[float, float]]]:
    """The data types of the trained and of the frozen parameters that fsdp2 manages, and the steps."""
    layout = layout_here()
    base = parallel.model_of(tie_word_embeddings=False).to(torch.bfloat16)
    lora = Lora(modules_to_save=["lm_head"])
    model = add_adapters(base, lora, task_type="CAUSAL_LM", num_base_rows=VOCABULARY).model
    widen_trained(model)
    sharded = parallelize(model, layout, Parallelism("fsdp2", compute_dtype=torch.bfloat16))
    copy_saved_modules(sharded)
    trained, frozen = set(), set()
    for parameter in sharded.parameters():
        if isinstance(parameter, DTensor):
            (trained if parameter.requires_grad else frozen).add(parameter.dtype)
    return (trained, frozen), train_steps(sharded, layout, 2)
