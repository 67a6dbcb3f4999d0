"""The Triton kernel of rotary embeddings, beside float64. On a CPU it runs in Triton's interpreter (`make kernels`)."""

import os

import pytest
import torch

from automodel_ckpt.models.layers.fused_rotary import _rotated

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="Triton's kernels need a GPU, or TRITON_INTERPRET=1",
)
ROWS, LENGTH = 2, 5


@pytest.mark.parametrize("rows_of_angles", [1, ROWS])
@pytest.mark.parametrize("order", ["heads first", "tokens first", "elements first"])
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "size"), [(4, 8, 8), (3, 24, 24), (33, 96, 96), (5, 20, 8)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_and_their_gradients_are_those_of_float64(
    dtype: torch.dtype, num_heads: int, head_dim: int, size: int, order: str, rows_of_angles: int
) -> None:
    from automodel_ckpt.models.layers.rotary_kernels import rotate

    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(ROWS, num_heads, LENGTH, head_dim, generator=generator).to(dtype)
    angles = torch.randn(2, rows_of_angles, LENGTH, size, generator=generator).to(dtype)
    gradient = torch.randn(heads.shape, generator=generator).to(dtype)
    wide = heads.double().requires_grad_()
    exact = _rotated(wide, *angles.double())
    exact.backward(gradient.double())  # type: ignore[no-untyped-call]
    on_device = [laid_out(each.to(DEVICE), order) for each in (heads, gradient)]
    cosines, sines = angles.to(DEVICE)
    found = [
        rotate(on_device[0], cosines, sines),
        rotate(on_device[1], cosines, sines, inverse=True),
    ]
    assert wide.grad is not None
    for each, expected in zip(found, (exact.detach(), wide.grad), strict=True):
        assert each.dtype == dtype and each.shape == heads.shape
        # As attention reads it, and as the reshape behind it can view it.
        assert each.transpose(1, 2).is_contiguous()
        # The interpreter cuts digits off instead of rounding.
        tolerance = 1e-5 if dtype == torch.float32 else 2**-6
        torch.testing.assert_close(each.cpu().double(), expected, rtol=tolerance, atol=tolerance)


def laid_out(tensor: torch.Tensor, order: str) -> torch.Tensor:
    """The same values [B, H, T, D] in another order in memory."""
    if order == "tokens first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if order == "elements first":
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    return tensor
