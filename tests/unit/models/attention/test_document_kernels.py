"""Kernels for the documents of a row: what they compute, what they are called with, and which of them is chosen."""

from __future__ import annotations

import dataclasses
import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch

from automodel_ckpt.models.attention.by_document import (
    Kernel,
    UnsupportedByKernel,
    attend_by_document,
    attend_by_mask,
    attention_by_pairs,
    compares_name,
    installed_kernels,
    validate_kernel,
)
from automodel_ckpt.models.attention.document_kernels import (
    KERNELS,
    Request,
    SdpaKernel,
    preferred_kernels,
)
from automodel_ckpt.models.attention.documents import Documents
from automodel_ckpt.models.attention.flex_kernel import FlexKernel, block_rows
from automodel_ckpt.models.attention.length_kernels import VarlenKernel
from tests.unit.models.building.test_build import GEMMA2
from tests.unit.models.building.test_packing_probe import build, loss_and_gradients, samples

pytestmark = [
    # Raised inside torch._dynamo, about its own question.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    # Flex attention without a kernel is its definition, to compare with.
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

CPU = torch.device("cpu")
OPTIONS = {"use_cache": False}
TASK = Request("cpu", torch.bfloat16, 16, 16, num_heads=4, num_key_heads=2)


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cumulative: torch.Tensor,
    longest: int,
    before: int,
    scale: float | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of [T, heads, D] as kernels with variable lengths define it, for one document after the other."""
    assert cumulative.dtype == torch.int32
    task = Request(
        "cpu",
        query.dtype,
        query.shape[2],
        value.shape[2],
        query.shape[1],
        key.shape[1],
        scale,
        softcap=softcap,
    )
    outputs = []
    borders = cumulative.tolist()
    for start, end in pairwise(borders):
        length = end - start
        assert length <= longest
        distances = torch.arange(length)[:, None] - torch.arange(length)
        mask = distances >= 0
        if before >= 0:
            mask &= distances <= before
        parts = [each[start:end].transpose(0, 1)[None] for each in (query, key, value)]
        outputs.append(attention_by_pairs(*parts, mask, task)[0])
    return torch.cat(outputs).to(query.dtype)


def varlen_2_10(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: Any = None,
) -> torch.Tensor:
    assert is_causal
    assert torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k
    return reference(query, key, value, cu_seq_q, max_q, -1, None)


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
    assert window_size[1] == 0
    assert torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k
    return reference(query, key, value, cu_seq_q, max_q, window_size[0], scale)


def varlen_2_13(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert window_size[1] == 0
    return reference(query, key, value, cu_seq_q, max_q, window_size[0], scale)


VARLEN = {
    "2.10": VarlenKernel(varlen_2_10, "cpu"),
    "2.11": VarlenKernel(varlen_2_11, "cpu"),
    "2.13": VarlenKernel(varlen_2_13, "cpu"),
}
ALL: dict[str, Kernel] = {
    **VARLEN,
    "flex": FlexKernel("cpu"),
    "sdpa": SdpaKernel(),
}
WINDOW = dataclasses.replace(TASK, window=5)
SCALE = dataclasses.replace(TASK, scale=0.3)
SOFTCAP = dataclasses.replace(TASK, softcap=2.0)
SINKS = dataclasses.replace(TASK, has_sinks=True)
DROPOUT = dataclasses.replace(TASK, has_dropout=True)
BIAS = dataclasses.replace(TASK, needs_pairs="position_bias")
FULL = dataclasses.replace(TASK, dtype=torch.float32)
ODD = dataclasses.replace(TASK, head_dim=12, value_dim=12)
MIXED = dataclasses.replace(TASK, head_dim=32)
LARGE = dataclasses.replace(TASK, head_dim=512, value_dim=512)
CUDA = dataclasses.replace(TASK, device_type="cuda")


@pytest.mark.parametrize(
    ("name", "supported"),
    [
        ("2.10", [TASK]),
        ("2.11", [TASK, WINDOW, SCALE]),
        ("2.13", [TASK, WINDOW, SCALE]),
        ("flex", [TASK, WINDOW, SCALE, SOFTCAP, SINKS, FULL, MIXED, LARGE]),
        ("sdpa", [TASK, WINDOW, SCALE, DROPOUT, FULL, ODD, MIXED, LARGE]),
    ],
)
def test_a_kernel_knows_what_it_supports(name: str, supported: list[Request]) -> None:
    tasks = [TASK, WINDOW, SCALE, SOFTCAP, SINKS, DROPOUT, BIAS, FULL, ODD, MIXED, LARGE, CUDA]
    found = [task for task in tasks if not ALL[name].unsupported(task)]
    assert found == supported


def test_the_kernels_of_a_device_are_tried_from_the_best_to_the_mask() -> None:
    assert preferred_kernels("cuda", KERNELS, is_compiled=True) == ("varlen", "flex")
    assert preferred_kernels("cuda", ["sdpa", "flex"], is_compiled=False) == ("flex",)
    assert preferred_kernels("cpu", KERNELS, is_compiled=False) == ("sdpa",)
    assert preferred_kernels("cpu", KERNELS, is_compiled=True) == ()
    assert preferred_kernels("mps", KERNELS, is_compiled=False) == ()
    assert list(installed_kernels("cpu")) == ["sdpa"]
    # torch 2.10 and later have both.
    assert {"varlen", "flex"} <= set(installed_kernels("cuda"))


def test_varlen_attn_of_the_installed_torch_has_one_of_the_known_signatures() -> None:
    from torch.nn.attention.varlen import varlen_attn

    names = list(inspect.signature(varlen_attn).parameters)
    known = (varlen_2_10, varlen_2_11, varlen_2_13)
    assert names in [list(inspect.signature(each).parameters) for each in known], (
        "read models/attention/length_kernels.py again: torch changed varlen_attn"
    )


@pytest.fixture
def _flex_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rejects gradients of flex attention on a CPU, although its definition without a kernel has them."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)


def supported_cases() -> list[Any]:
    cases = []
    for name in ALL:
        for kind, task in {"plain": TASK, "window": WINDOW, "scale": SCALE}.items():
            if not ALL[name].unsupported(task):
                cases.append(pytest.param(name, task, id=f"{name}-{kind}"))
    cases.append(pytest.param("flex", SOFTCAP, id="flex-softcap"))
    cases.append(pytest.param("flex", SINKS, id="flex-sinks"))
    return cases


@pytest.mark.usefixtures("_flex_has_gradients")
@pytest.mark.parametrize(("name", "task"), supported_cases())
def test_outputs_and_gradients_are_those_of_the_mask(name: str, task: Request) -> None:
    validate_kernel(ALL[name], task, CPU)


@pytest.mark.parametrize("window", [None, 1, 100, 200])
def test_flex_blocks_leave_out_no_pair_that_the_mask_has(window: int | None) -> None:
    documents = Documents(((300, 1), (1, 90), (128, 2), (5, 1)), window, CPU)
    rows = block_rows(documents)
    assert torch.equal(rows.mask, documents.mask)
    length = documents.num_tokens
    positions = torch.arange(length)
    seen = rows.blocks.mask_mod(0, 0, positions[:, None], positions)
    assert torch.equal(seen[None, None], documents.mask)
    num_blocks = -(-length // 128)
    padded = torch.zeros(num_blocks * 128, num_blocks * 128, dtype=torch.bool)
    padded[:length, :length] = documents.mask[0, 0]
    by_block = padded.view(num_blocks, 128, num_blocks, 128)
    some, all_pairs = by_block.any(3).any(1), by_block.all(3).all(1)
    counts = (rows.blocks.kv_num_blocks, rows.blocks.kv_indices)
    full_counts = (rows.blocks.full_kv_num_blocks, rows.blocks.full_kv_indices)
    assert torch.equal(chosen(*counts), some & ~all_pairs)
    assert torch.equal(chosen(*full_counts), all_pairs)


def chosen(counts: Any, indices: Any) -> torch.Tensor:
    """[N, N] bool of a block mask's counts [1, 1, N] and indices [1, 1, N, N]."""
    found = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        found[row, indices[0, 0, row, :count].long()] = True
    return found


def test_a_kernel_that_computes_something_else_is_found() -> None:
    def too_wide(*tensors: Any, window_size: tuple[int, int], **options: Any) -> torch.Tensor:
        return varlen_2_11(*tensors, window_size=(window_size[0] + 1, 0), scale=options["scale"])

    too_wide.__signature__ = inspect.signature(varlen_2_11)  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedByKernel, match="something else"):
        validate_kernel(VarlenKernel(too_wide, "cpu"), WINDOW, CPU)


def one_row() -> dict[str, torch.Tensor]:
    from automodel_ckpt.data.batches.packing import RowLayout
    from automodel_ckpt.data.collate import PadCollator

    return RowLayout(32, one_row=True, multiple=8)(PadCollator(0)(samples()))


@pytest.mark.parametrize(
    ("model_type", "name", "is_able"),
    [
        ("llama", "2.10", True),
        ("llama", "2.11", True),
        ("llama", "2.13", True),
        ("mistral", "2.10", False),  # a window
        ("mistral", "2.11", True),
        ("gemma3_text", "2.13", True),
        ("llama", "flex", False),  # heads of 8
    ],
)
def test_a_model_attends_by_a_kernel_that_supports_all_of_its_layers(
    model_type: str, name: str, is_able: bool
) -> None:
    model = build(model_type, "sdpa").to(torch.bfloat16)
    assert attend_by_document(model, OPTIONS, kernel_name=f"test_{name}", kernel=ALL[name]) == (
        is_able
    )
    loss, gradients = loss_and_gradients(model, one_row())
    attend_by_mask(model)
    expected_loss, expected = loss_and_gradients(model, one_row())
    assert loss == pytest.approx(expected_loss, rel=2e-3)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert (ours - theirs).abs().max() <= 0.05 * theirs.abs().max() + 1e-3


def test_dropout_in_training_keeps_the_mask_with_kernels_without_dropout() -> None:
    model = build("llama", "sdpa").to(torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert not attend_by_document(model, OPTIONS, kernel_name="test_2.11", kernel=ALL["2.11"])
    assert attend_by_document(model, OPTIONS)


@pytest.mark.usefixtures("_flex_has_gradients")
def test_an_eager_model_with_a_softcap_attends_by_flex() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("gemma2", **GEMMA2)
    torch.manual_seed(0)
    # The default of transformers 5.23, which 5.17 does not choose.
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model: Any = AutoModelForCausalLM.from_config(config, **options)
    model.train()
    assert not attend_by_document(model, OPTIONS)
    kernel = FlexKernel("cpu")
    assert attend_by_document(model, OPTIONS, kernel_name="test_flex", kernel=kernel)
    loss, gradients = loss_and_gradients(model, one_row())
    attend_by_mask(model)
    expected_loss, expected = loss_and_gradients(model, one_row())
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_models_that_add_an_index_to_the_mask_under_the_name_sdpa_keep_the_mask() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    assert not compares_name(build("llama"))
    config = AutoConfig.for_model(
        "deepseek_v32",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=97,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert compares_name(model)
