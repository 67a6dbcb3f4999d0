"""The Triton kernels of the loss head, beside float64. On a CPU they run in Triton's interpreter (`make kernels`)."""

import os

import pytest
import torch
import torch.nn.functional as F

from automodel_ckpt.models.loss import head_gradients
from automodel_ckpt.models.loss.fused_cross_entropy import (
    IDENTITY,
    LogitTransform,
    ZLoss,
    linear_cross_entropy,
    losses_and_errors,
)
from automodel_ckpt.models.loss.head_gradients import (
    CHUNK_ELEMENTS,
    KERNELS,
    ErrorBlocks,
    ErrorPlace,
)

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="Triton's kernels need a GPU, or TRITON_INTERPRET=1",
)

TRANSFORMS = [IDENTITY, LogitTransform(0.25), LogitTransform(1.0, 5.0), LogitTransform(3.0, 30.0)]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from automodel_ckpt.models.loss import loss_kernels

    monkeypatch.setitem(KERNELS, "cpu", ("triton", "torch"))
    # Vocabularies of these tests have several blocks, the last of them incomplete.
    monkeypatch.setattr(loss_kernels, "_BLOCK", 16)


def reference(
    logits: torch.Tensor, labels: torch.Tensor, transform: LogitTransform
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.double().requires_grad_()
    losses = F.cross_entropy(transform(leaf), labels, reduction="none")
    losses.sum().backward()
    assert leaf.grad is not None
    return losses.detach(), leaf.grad


def chunk(num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_columns)
    logits = torch.randn(9, num_columns, generator=generator).mul_(20)
    logits[0] *= 50  # exponentials of these overflow
    logits[1] *= 1e-3
    labels = torch.randint(0, num_columns, (9,), generator=generator)
    labels[3] = -100
    return logits.to(DEVICE), labels.to(DEVICE)


@pytest.mark.parametrize("num_columns", [1, 7, 16, 53, 64, 131])
def test_gradients_are_stored_in_blocks_of_columns(num_columns: int) -> None:
    logits, labels = chunk(num_columns)
    _, expected = reference(logits, labels, IDENTITY)
    memory = torch.full((20 * num_columns + 8,), 7.0, device=DEVICE)
    width = min(32, num_columns)
    blocks = ErrorBlocks(memory[: 20 * num_columns], 20, num_columns, width)
    losses_and_errors(
        logits, labels, None, IDENTITY, torch.float32, with_errors=True, place=ErrorPlace(blocks, 5)
    )
    for first in blocks.firsts:
        block = blocks.block(first)
        wanted = expected[:, first : first + 32]
        torch.testing.assert_close(block[5:14].double(), wanted, rtol=1e-6, atol=1e-6)
        # The rows of other chunks.
        assert (block[:5] == 7).all() and (block[14:] == 7).all()
    assert (memory[20 * num_columns :] == 7).all()


@pytest.mark.parametrize("num_columns", [1, 7, 16, 53, 64, 131])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=["as it is", "scaled", "capped", "both"])
def test_losses_and_gradients_are_those_of_float64(
    num_columns: int, dtype: torch.dtype, transform: LogitTransform
) -> None:
    logits, labels = chunk(num_columns)
    expected_losses, expected = reference(logits, labels, transform)
    own = logits.clone()
    losses, errors = losses_and_errors(own, labels, None, transform, dtype, with_errors=True)
    assert losses.dtype == torch.float32 and errors.dtype == dtype
    assert errors.data_ptr() == own.data_ptr(), "gradients must overwrite the logits"
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-5, atol=1e-5)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(errors.double(), expected, rtol=tolerance, atol=tolerance)
    assert losses[3] == 0 and not errors[3].any()


@pytest.mark.parametrize("transform", TRANSFORMS, ids=["as it is", "scaled", "capped", "both"])
def test_the_z_loss_is_added_to_losses_and_gradients(transform: LogitTransform) -> None:
    logits, labels = chunk(53)
    wide = logits.double().requires_grad_()
    squares = torch.logsumexp(transform(wide), 1).square() * (labels != -100)
    squares.sum().backward()
    expected_losses, expected = reference(logits, labels, transform)
    z_loss = ZLoss(1e-3, logits.device)
    losses, errors = losses_and_errors(
        logits, labels, None, transform, torch.float32, with_errors=True, z_loss=z_loss
    )
    expected_losses += 1e-3 * squares.detach()
    assert wide.grad is not None
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(errors.double(), expected + 1e-3 * wide.grad, rtol=1e-5, atol=1e-5)
    assert z_loss.take().item() == pytest.approx(1e-3 * squares.sum().item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num", [0, 1, 31, 32, 100])
def test_a_gradient_is_scaled_and_rounded_once(
    num: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from automodel_ckpt.models.loss import loss_kernels

    monkeypatch.setattr(loss_kernels, "_SCALE_BLOCK", 32)
    values = torch.randn(num, device=DEVICE)
    factor = torch.tensor(0.3, device=DEVICE)
    scaled = torch.full((num + 1,), 7.0, device=DEVICE, dtype=dtype)
    loss_kernels.scale(values, factor, scaled[:num])
    # Triton's interpreter truncates to bfloat16; a GPU rounds.
    tolerance = 2**-7 if INTERPRETED and dtype == torch.bfloat16 else 0
    expected = (values * factor).to(dtype)
    torch.testing.assert_close(scaled[:num], expected, rtol=tolerance, atol=0)
    assert scaled[num] == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=["as it is", "scaled", "capped", "both"])
def test_the_loss_of_chunks_has_the_gradients_of_float64(
    dtype: torch.dtype, transform: LogitTransform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHUNK_ELEMENTS, DEVICE, 53 * 5)
    monkeypatch.setattr(head_gradients, "_ROWS", 1)
    generator = torch.Generator().manual_seed(2)
    leaves, others = [], []
    for shape in ((12, 16), (53, 16), (53,)):
        values = torch.randn(shape, generator=generator).to(DEVICE, dtype)
        leaves.append(values.requires_grad_())
        others.append(values.detach().double().requires_grad_())
    targets = torch.randint(0, 53, (12,), generator=generator).to(DEVICE)
    targets[7] = -100
    loss = linear_cross_entropy(*leaves, targets, transform=transform)
    expected = F.cross_entropy(transform(F.linear(*others)), targets, reduction="sum")
    (loss * 0.3).backward()
    (expected * 0.3).backward()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(leaves, others, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=tolerance, atol=tolerance)
