"""Fused layers on a GPU beside the modules that they replace, in float64 on the CPU."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from automodel_ckpt.models.layers.fused_adapters import fuse_adapters
from automodel_ckpt.models.layers.fused_gates import fuse_gates
from automodel_ckpt.models.layers.fused_norms import fuse_norms
from automodel_ckpt.models.layers.fused_rotary import fuse_rotary_embeddings
from tests.support.gpu import DEVICE, needs_gpu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
BATCH, LENGTH = 3, 37


def norm(size: int) -> nn.Module:
    module = LlamaRMSNorm(size)
    nn.init.uniform_(module.weight, 0.5, 1.5)
    return module


def gated(size: int) -> nn.Module:
    return LlamaMLP(
        LlamaConfig(hidden_size=size, intermediate_size=2 * size + 8, num_attention_heads=1)
    )


def adapted(size: int) -> nn.Module:
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["0"])
    layers = get_peft_model(nn.Sequential(nn.Linear(size, 2 * size + 8)), config)
    for name, parameter in layers.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return layers


KINDS: dict[str, tuple[Callable[[int], nn.Module], Callable[[nn.Module], int]]] = {
    "normalization": (norm, fuse_norms),
    "gated layer": (gated, fuse_gates),
    "adapter": (adapted, fuse_adapters),
}


def results(module: nn.Module, inputs: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the inputs and of the trained parameters."""
    leaf = inputs.detach().requires_grad_()
    output = module(leaf)
    # A gradient that is not contiguous, as attention returns them.
    output.transpose(0, 1).backward(gradient)  # type: ignore[no-untyped-call]
    trained = [each for each in module.parameters() if each.requires_grad]
    assert leaf.grad is not None
    return [output.detach(), leaf.grad, *(each.grad for each in trained if each.grad is not None)]


@needs_gpu
@pytest.mark.parametrize("size", [96, 100, 1022])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_float64(
    kind: str, dtype: torch.dtype, size: int
) -> None:
    build, fuse = KINDS[kind]
    torch.manual_seed(0)
    module = build(size).to(dtype)
    inputs = torch.randn(BATCH, LENGTH, size).to(dtype)
    on_gpu = copy.deepcopy(module).to(DEVICE)
    assert fuse(on_gpu) == 1
    with torch.no_grad():
        width = module(inputs).shape[-1]
    gradient = torch.randn(LENGTH, BATCH, width).to(dtype)
    exact = results(module.double(), inputs.double(), gradient.double())
    found = results(on_gpu, inputs.to(DEVICE), gradient.to(DEVICE))
    assert len(found) == len(exact)
    for here, there in zip(found, exact, strict=True):
        assert here.dtype == dtype
        difference = (here.cpu().double() - there).norm() / there.norm()
        assert difference < TOLERANCE[dtype]


@needs_gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("model_type", ["llama", "glm4_moe"])
def test_queries_and_keys_are_rotated_by_a_kernel(
    model_type: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from automodel_ckpt.models.layers import rotary_kernels

    num_calls = [0]

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        num_calls[0] += 1
        return rotate(*args, **options)

    rotate = rotary_kernels.rotate
    monkeypatch.setattr(rotary_kernels, "rotate", counted)
    torch.manual_seed(0)
    # Two heads of queries for each head of keys, of 24 elements, of which glm4_moe rotates 12.
    config = AutoConfig.for_model(
        model_type, vocab_size=64, hidden_size=96, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=24, initializer_range=0.1,
    )  # fmt: skip
    build: Any = AutoModelForCausalLM.from_config
    model = build(config, dtype=dtype).model
    [layer] = model.layers
    on_gpu = copy.deepcopy(layer.self_attn).to(DEVICE)
    assert fuse_rotary_embeddings(on_gpu) == 1
    inputs, gradient = torch.randn(2, BATCH, LENGTH, 96).to(dtype)
    places = torch.arange(LENGTH)[None]
    angles = model.rotary_emb(inputs.float(), places)
    assert angles[0].shape[-1] == (24 if model_type == "llama" else 12)

    def results(module: nn.Module, device: str, number: torch.dtype) -> list[torch.Tensor]:
        leaf = inputs.to(device, number).requires_grad_()
        rotations = tuple(each.to(device, number) for each in angles)
        output, _ = module(leaf, rotations, attention_mask=None)
        output.backward(gradient.to(device, number))
        assert leaf.grad is not None
        return [output.detach(), leaf.grad, *(each.grad for each in module.parameters())]

    exact = results(layer.self_attn.double(), "cpu", torch.float64)
    assert num_calls == [0]
    found = results(on_gpu, DEVICE, dtype)
    assert num_calls == [4]
    for here, there in zip(found, exact, strict=True):
        assert here.dtype == dtype
        difference = (here.cpu().double() - there).norm() / there.norm()
        assert difference < 2 * TOLERANCE[dtype]


@needs_gpu
def test_rows_of_other_lengths_need_no_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation takes longer than a step. Triton has kernels of other numbers for those that 16 divides."""
    import triton

    from automodel_ckpt.models.layers import gate_kernels, rotary_kernels
    from automodel_ckpt.models.loss import loss_kernels

    def compute(length: int) -> None:
        heads = torch.ones(1, length, 3, 48, device=DEVICE).transpose(1, 2)
        angles = torch.ones(1, length, 48, device=DEVICE)
        rotary_kernels.rotate(heads, angles, angles)
        rotary_kernels.rotate(heads, angles, angles, inverse=True)
        gate = torch.ones(1, length, 48, device=DEVICE)
        gate_kernels.product(gate, gate)
        gate_kernels.gradients(gate, gate, gate)
        labels = torch.zeros(length, dtype=torch.long, device=DEVICE)
        loss_kernels.losses_and_errors(gate[0], labels, 1.0, None, torch.float32, True)

    compute(33)
    compiled: list[Any] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda **options: compiled.append(options["repr"])
    )
    for length in (32, 31, 48, 2):
        compute(length)
    assert compiled == []
