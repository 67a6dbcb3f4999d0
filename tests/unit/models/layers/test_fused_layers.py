"""Parts of layers with fewer kernels: the same outputs and gradients, and less memory."""

import copy
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from automodel_ckpt.models.layers import fused_rotary
from automodel_ckpt.models.layers.fused_adapters import _Product, fuse_adapters
from automodel_ckpt.models.layers.fused_gates import _GatedProduct, fuse_gates
from automodel_ckpt.models.layers.fused_norms import _RmsNorm, fuse_norms
from automodel_ckpt.models.layers.fused_rotary import (
    _recognized,
    _rotated,
    fuse_rotary_embeddings,
    restore_rotation,
)
from tests.unit.models.building.test_packing_probe import build, loss_and_gradients

pytestmark = [
    # peft's own use.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
]

TOKENS = (torch.arange(40) * 7 + 3).view(2, 20) % 97
ROWS = {"input_ids": TOKENS, "labels": TOKENS}


def adapted(dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Any:
    """A small model with adapters that change its outputs, and norms whose weights are not one."""
    generator = torch.Generator().manual_seed(seed)
    model = build("llama", "sdpa").to(dtype)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **options}
    model = get_peft_model(model, LoraConfig(**settings), autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05, generator=generator)
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model.train()


def kept_bytes(model: nn.Module) -> int:
    """Bytes that the backward pass of *model* needs, beside its parameters."""
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept.append(model(**ROWS).loss)
    return sum(found.values())


# ---------------------------------------------------------------- normalizations


@pytest.mark.parametrize(
    ("build_norm", "is_fused"),
    [
        (lambda: LlamaRMSNorm(8, 1e-6), True),
        (lambda: GptOssRMSNorm(8, 1e-5), True),
        (lambda: T5LayerNorm(8), True),
        (lambda: nn.RMSNorm(8, eps=1e-5), True),
        # Its weight is an offset from one.
        (lambda: GemmaRMSNorm(8), False),
        # It subtracts the mean.
        (lambda: nn.LayerNorm(8, bias=False), False),
        (lambda: nn.LayerNorm(8), False),
        (lambda: nn.BatchNorm1d(8), False),
    ],
    ids=["Llama", "GPT-OSS", "T5", "torch", "Gemma", "mean", "bias", "batch"],
)
def test_a_normalization_is_recognized_by_what_it_computes(
    build_norm: Callable[[], nn.Module], is_fused: bool
) -> None:
    plain = build_norm()
    fused = copy.deepcopy(plain)
    assert fuse_norms(nn.ModuleList([fused])) == int(is_fused)
    assert isinstance(fused, type(plain)) and type(fused).__name__ == type(plain).__name__
    inputs = torch.randn(4, 8)
    torch.testing.assert_close(fused(inputs), plain(inputs))


def changed(base: type[nn.Module], change: Callable[[Any, torch.Tensor], Any]) -> Any:
    """A class whose forward pass is a *change* of that of *base*; it is called with the module and the input."""
    return type("Changed", (base,), {"forward": lambda self, inputs: change(self, inputs)})


@pytest.mark.parametrize(
    "change",
    [
        # Epsilon is added elsewhere.
        lambda norm, x: (
            norm.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + norm.variance_epsilon)
        ),
        lambda norm, x: LlamaRMSNorm.forward(norm, x.clamp(-100, 100)),
        lambda norm, x: LlamaRMSNorm.forward(norm, x).flatten(0, -2),
        lambda norm, x: LlamaRMSNorm.forward(norm, x).bfloat16(),
    ],
    ids=["epsilon", "limit", "shape", "dtype"],
)
def test_another_normalization_is_noticed(change: Callable[[Any, torch.Tensor], Any]) -> None:
    assert fuse_norms(changed(LlamaRMSNorm, change)(8)) == 0


def test_the_gradients_of_a_normalization_are_right() -> None:
    inputs = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(8, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda *given: _RmsNorm.apply(*given, 1e-3), (inputs, weight))
    weight.requires_grad_(False)
    torch.autograd.gradcheck(lambda given: _RmsNorm.apply(given, weight, 1e-3), (inputs,))


# ---------------------------------------------------------------- gated layers


@pytest.mark.parametrize(
    ("model_type", "num_fused"), [("llama", 2), ("qwen3", 2), ("gemma3_text", 0)]
)
def test_a_gated_layer_is_recognized_by_what_it_computes(model_type: str, num_fused: int) -> None:
    plain = build(model_type, "sdpa")
    fused = copy.deepcopy(plain)
    assert fuse_gates(fused) == num_fused
    torch.testing.assert_close(
        loss_and_gradients(fused, ROWS), loss_and_gradients(plain, ROWS), rtol=1e-4, atol=1e-6
    )


def test_another_activation_and_another_product_are_noticed() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    config = LlamaConfig(**sizes)
    assert fuse_gates(LlamaMLP(config)) == 1
    assert fuse_gates(LlamaMLP(LlamaConfig(**sizes, hidden_act="gelu"))) == 0
    limited = LlamaMLP(config)
    limited.act_fn = changed(nn.SiLU, lambda silu, x: nn.SiLU.forward(silu, x).clamp(max=20.0))()
    assert fuse_gates(limited) == 0
    for change in (lambda product: product * 0.5, lambda product: product.flatten(0, -2)):
        other = changed(LlamaMLP, lambda mlp, x, by=change: by(LlamaMLP.forward(mlp, x)))
        assert fuse_gates(other(config)) == 0


def test_the_gradients_of_a_gated_product_are_right() -> None:
    factors = [torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    torch.autograd.gradcheck(_GatedProduct.apply, factors)


# ---------------------------------------------------------------- rotary embeddings


@pytest.mark.parametrize(
    ("model_type", "is_fused", "is_partial"),
    [
        ("llama", True, False),
        ("glm4_moe", True, True),
        # Pairs of neighbors, and other arguments.
        ("cohere", False, False),
        ("gptj", False, False),
    ],
)
def test_a_rotation_is_recognized_by_what_it_computes(
    model_type: str, is_fused: bool, is_partial: bool
) -> None:
    name = f"transformers.models.{model_type}.modeling_{model_type}"
    found = _recognized(importlib.import_module(name).apply_rotary_pos_emb)
    assert (found is not None) == is_fused
    assert found is None or found.is_partial == is_partial


class Kernel:
    """Stands in for the module of the kernel, which needs Triton; counts the calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def rotate(
        self, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, inverse: bool = False
    ) -> torch.Tensor:
        self.num_calls += 1
        if not inverse:
            return _rotated(heads, cosines, sines)
        leaf = torch.zeros_like(heads).requires_grad_()
        with torch.enable_grad():
            [found] = torch.autograd.grad(_rotated(leaf, cosines, sines), leaf, heads)
        return found


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The kernel, which computes tensors on a CPU."""
    stand_in = Kernel()
    monkeypatch.setitem(sys.modules, "automodel_ckpt.models.layers.rotary_kernels", stand_in)
    monkeypatch.setattr(fused_rotary, "_can_compute", lambda *tensors: True)
    rotate: Any = modeling_llama.apply_rotary_pos_emb
    # Another test may have replaced it.
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", getattr(rotate, "function", rotate))
    return stand_in


def test_layers_rotate_by_the_kernel(kernel: Kernel) -> None:
    model = build("llama", "sdpa")
    expected = loss_and_gradients(model, ROWS)
    assert kernel.num_calls == 0
    # Again: for another model.
    for _ in range(2):
        assert fuse_rotary_embeddings(model) == 2
    torch.testing.assert_close(loss_and_gradients(model, ROWS), expected)
    # Queries and keys of two layers, in both directions.
    assert kernel.num_calls == 8
    restore_rotation(build("llama", "sdpa"))
    torch.testing.assert_close(loss_and_gradients(model, ROWS), expected)
    assert kernel.num_calls == 8


# ---------------------------------------------------------------- adapters


def test_the_gradients_of_an_adapted_layer_are_right() -> None:
    def random(*shape: int, is_trained: bool = True) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=is_trained)

    weight, bias = random(6, 8, is_trained=False), random(6, is_trained=False)
    inputs, down, up = random(2, 3, 8), random(2, 8), random(6, 2)
    for given_bias in (bias, None):
        torch.autograd.gradcheck(
            lambda x, a, b, given=given_bias: _Product.apply(x, weight, given, a, b, 1.7),
            (inputs, down, up),
        )
    inputs.requires_grad_(False)
    torch.autograd.gradcheck(
        lambda a, b: _Product.apply(inputs, weight, bias, a, b, 1.7), (down, up)
    )


@pytest.mark.parametrize(
    ("options", "is_fused"),
    [
        ({}, True),
        ({"rank_pattern": {"q_proj": 2}, "use_rslora": True}, True),
        ({"lora_dropout": 0.5}, False),
        ({"use_dora": True}, False),
        ({"bias": "all"}, True),
        ({"lora_bias": True}, False),
    ],
    ids=["plain", "ranks", "dropout", "DoRA", "trained bias", "bias of B"],
)
def test_each_kind_of_adapter_computes_what_peft_computes(
    options: dict[str, Any], is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = adapted(**options)
    fused = copy.deepcopy(plain)
    names = list(fused.state_dict())
    assert fuse_adapters(fused) == 14
    assert list(fused.state_dict()) == names
    num_calls = 0
    apply = _Product.apply

    def counted(*given: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return apply(*given)

    monkeypatch.setattr(_Product, "apply", counted)
    fuse_norms(fused)
    results = []
    for model in (plain, fused):
        torch.manual_seed(0)
        results.append(loss_and_gradients(model, ROWS))
    assert num_calls == (14 if is_fused else 0)
    torch.testing.assert_close(results[1], results[0])


def test_layers_with_hooks_or_changed_parts_are_left_to_peft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = adapted()
    fuse_adapters(model)
    expected = model(**ROWS).logits

    def fails(*_: Any) -> None:
        raise AssertionError("computed together")

    monkeypatch.setattr(_Product, "apply", fails)
    called: list[int] = []

    def noted(forward: Callable[..., Any], inputs: torch.Tensor) -> Any:
        called.append(1)
        return forward(inputs)

    layers = [each for each in model.modules() if hasattr(each, "lora_A")]
    for number, layer in enumerate(layers):
        if number % 2:
            layer.base_layer.register_forward_hook(lambda *_: called.append(1))
        else:
            layer.base_layer.forward = functools.partial(noted, layer.base_layer.forward)
    torch.testing.assert_close(model(**ROWS).logits, expected)
    assert len(called) == len(layers)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.further)])
def test_layers_may_get_no_tokens(compiled: bool) -> None:
    # As an expert does to which no token was sent.
    model = adapted()
    for fuse in (fuse_norms, fuse_gates, fuse_adapters):
        assert fuse(model) > 0
    layer = model.get_decoder().layers[0]
    compute = nn.Sequential(layer.input_layernorm, layer.mlp)
    inputs = torch.zeros(0, 32, requires_grad=True)
    if compiled:
        compute = torch.compile(compute, backend="aot_eager", fullgraph=True)
    compute(inputs).sum().backward()
    assert inputs.grad is not None and inputs.grad.shape == (0, 32)
    assert not layer.mlp.down_proj.lora_B["default"].weight.grad.any()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_that_are_fused_are_compiled_from_the_operators_of_transformers(
    kernel: Kernel,
) -> None:
    plain = adapted()
    fused = copy.deepcopy(plain)
    for fuse in (fuse_norms, fuse_gates, fuse_rotary_embeddings, fuse_adapters):
        assert fuse(fused) > 0
    fused.base_model.model.model.layers[1].compile(backend="eager", fullgraph=True)
    expected = loss_and_gradients(plain, ROWS)
    kernel.num_calls = 0
    torch.testing.assert_close(loss_and_gradients(fused, ROWS), expected)
    # Queries and keys of the other layer, in both directions.
    assert kernel.num_calls == 4


# ---------------------------------------------------------------- models


def gradient_of(model: nn.Module) -> torch.Tensor:
    _, gradients = loss_and_gradients(model, ROWS)
    return torch.cat([each.flatten().double() for each in gradients])


@pytest.mark.further
def test_a_model_in_16_bits_is_no_less_exact_and_keeps_less() -> None:
    errors = {"plain": 0.0, "fused": 0.0}
    for seed in range(8):
        exact = gradient_of(adapted(seed=seed).double())
        plain = adapted(torch.bfloat16, seed=seed)
        fused = copy.deepcopy(plain)
        assert fuse_norms(fused) == 5 and fuse_gates(fused) == 2
        fuse_adapters(fused)
        errors["plain"] += float((gradient_of(plain) - exact).norm())
        # A copy of a model is fused too.
        errors["fused"] += float((gradient_of(copy.deepcopy(fused)) - exact).norm())
    assert errors["fused"] < errors["plain"]
    assert kept_bytes(fused) < 0.85 * kept_bytes(plain)
