"""The Triton kernels of gated layers, beside float64. On a CPU they run in Triton's interpreter (`make kernels`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_triton = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="Triton's kernels need a GPU, or TRITON_INTERPRET=1",
)


@needs_triton
# Of the interpreter: 1 / (1 + infinity) is right.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 4097), (3, 4096)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_product_and_gradients_are_those_of_float64(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    from automodel_ckpt.models.layers import gate_kernels

    generator = torch.Generator().manual_seed(0)
    gate, up, gradient = (torch.randn(shape, generator=generator).mul_(3).to(dtype) for _ in "123")
    # Exponentials of these overflow, or vanish.
    gate.view(-1)[0] = -1000
    gate.view(-1)[-1] = 1000
    wide = [each.double().requires_grad_() for each in (gate, up)]
    expected = F.silu(wide[0]) * wide[1]
    expected.backward(gradient.double())  # type: ignore[no-untyped-call]
    on_device = [each.to(DEVICE) for each in (gradient, gate, up)]
    found = [gate_kernels.product(*on_device[1:]), *gate_kernels.gradients(*on_device)]
    # The interpreter cuts digits off instead of rounding.
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    for each, exact in zip(found, (expected, wide[0].grad, wide[1].grad), strict=True):
        assert each.dtype == dtype and exact is not None
        torch.testing.assert_close(
            each.cpu().double(), exact.detach(), rtol=tolerance, atol=tolerance
        )


def test_the_kernels_compile_for_gpus_that_are_not_here() -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["22", "kernels"]
