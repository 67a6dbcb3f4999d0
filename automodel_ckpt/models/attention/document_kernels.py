"""The choice of the kernel that computes attention within the documents of a row.

The kernels leave out the pairs of tokens of different documents. The rows of a micro-batch are prepared once per
forward pass (:meth:`~automodel_ckpt.models.attention.kernel_request.Kernel.prepare`), outside of the layers, and the
layers only
pass the result on. Preparing needs no information from the device.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.nn.attention.varlen import varlen_attn

from automodel_ckpt.models.attention.flex_kernel import FlexKernel
from automodel_ckpt.models.attention.kernel_request import Kernel
from automodel_ckpt.models.attention.length_kernels import VarlenKernel
from automodel_ckpt.models.attention.sdpa_kernel import SdpaKernel

KERNELS = ("varlen", "flex", "sdpa")
"""The names of all kernels, the best of a device first."""


def installed_kernels(device_type: str) -> dict[str, Kernel]:
    """The kernels for a type of device that are installed, by name, the preferred one first."""
    kernels: dict[str, Kernel] = {"sdpa": SdpaKernel()}
    if device_type == "cuda":
        kernels["flex"] = FlexKernel()
        kernels["varlen"] = VarlenKernel(varlen_attn)
    names = preferred_kernels(device_type, kernels, is_compiled=False)
    return {name: kernels[name] for name in names}


def preferred_kernels(
    device_type: str, installed: Collection[str], *, is_compiled: bool
) -> tuple[str, ...]:
    """The names of the kernels to try on a type of device, the best first.

    *is_compiled*: whether torch.compile compiles the layers. One call per document would then be compiled again for
    each row.
    """
    if device_type == "cpu":
        return () if is_compiled else ("sdpa",)
    if device_type != "cuda":
        return ()
    return tuple(name for name in KERNELS if name in installed and name != "sdpa")
