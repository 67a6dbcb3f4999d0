"""The kernel that reads the lengths of documents: which models it is enabled for, and what it computes."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from automodel_ckpt.models.attention.by_document import attend_by_document, attend_by_mask
from automodel_ckpt.models.attention.documents import VarlenKernel
from tests.support.models.sizes import model_sizes
from tests.unit.models.building.test_packing_probe import build, loss_and_gradients, samples

OPTIONS = {"use_cache": False}


def varlen_2_11(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Attention of [T, heads, D] by torch's definition of its kernel, one document after the other."""
    assert cu_seq_q.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k
    before, after = window_size
    assert after == 0
    outputs = []
    for start, end in pairwise(cu_seq_q.tolist()):
        assert end - start <= max_q
        distances = torch.arange(end - start)[:, None] - torch.arange(end - start)
        mask = (distances >= 0) & ((distances <= before) | (before < 0))
        parts = [each[start:end].transpose(0, 1)[None] for each in (query, key, value)]
        output = F.scaled_dot_product_attention(*parts, mask, scale=scale, enable_gqa=True)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def varlen_2_13(
    query: torch.Tensor, key: torch.Tensor, *others: Any, enable_gqa: bool = False, **options: Any
) -> torch.Tensor:
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return varlen_2_11(query, key, *others, **options)


def across_documents(*tensors: Any, window_size: tuple[int, int], **options: Any) -> torch.Tensor:
    without_documents = tensors[3].new_tensor([0, tensors[0].shape[0]])
    length = tensors[0].shape[0]
    changed = (*tensors[:3], without_documents, without_documents, length, length)
    return varlen_2_11(*changed, window_size=window_size, **options)


def stand_in(function: Any) -> VarlenKernel:
    kernel = VarlenKernel(function)
    # Kernels are registered with transformers by their labels.
    kernel.label = function.__name__
    return kernel


def one_row() -> dict[str, torch.Tensor]:
    from automodel_ckpt.data.batches.packing import RowLayout
    from automodel_ckpt.data.collate import PadCollator

    return RowLayout(32, one_row=True, multiple=8)(PadCollator(0)(samples()))


@pytest.mark.parametrize(
    ("model_type", "function"),
    [("llama", varlen_2_11), ("llama", varlen_2_13), ("gemma3_text", varlen_2_11)],
)
def test_outputs_and_gradients_are_those_of_the_mask(model_type: str, function: Any) -> None:
    model = build(model_type, "sdpa").to(torch.bfloat16)
    assert attend_by_document(model, OPTIONS, kernel=stand_in(function))
    loss, gradients = loss_and_gradients(model, one_row())
    attend_by_mask(model)
    expected_loss, expected = loss_and_gradients(model, one_row())
    assert loss == pytest.approx(expected_loss, rel=2e-3)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert (ours - theirs).abs().max() <= 0.05 * theirs.abs().max() + 1e-3


def test_models_that_it_does_not_support_keep_the_mask() -> None:
    kernel = stand_in(varlen_2_11)
    model = build("llama", "sdpa")
    # float32
    assert not attend_by_document(model, OPTIONS, kernel=kernel)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert not attend_by_document(model.to(torch.bfloat16), OPTIONS, kernel=kernel)
    assert attend_by_document(model, OPTIONS)


def test_a_kernel_that_computes_something_else_is_not_used() -> None:
    model = build("llama", "sdpa").to(torch.bfloat16)
    assert not attend_by_document(model, OPTIONS, kernel=stand_in(across_documents))


def test_models_that_add_an_index_to_the_mask_under_the_name_sdpa_keep_the_mask() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "deepseek_v32", **model_sizes(hidden=32, inner=48, layers=1, heads=4, kv_heads=4, vocab=97)
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    assert not attend_by_document(model, OPTIONS)
