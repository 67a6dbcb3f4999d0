"""The choice of the kernel that computes attention within the documents of a row.

The kernels leave out the pairs of tokens of different documents. The rows of a micro-batch are prepared once per
forward pass (:meth:`~automodel_ckpt.models.attention.kernel_request.Kernel.prepare`), outside of the layers, and the
layers only
pass the result on. Preparing needs no information from the device.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection
from typing import Any

from automodel_ckpt.models.attention.flex_kernel import FlexKernel
from automodel_ckpt.models.attention.kernel_request import Kernel
from automodel_ckpt.models.attention.length_kernels import FlashKernel, VarlenKernel
from automodel_ckpt.models.attention.sdpa_kernel import SdpaKernel

log = logging.getLogger(__name__)

KERNELS = ("varlen", "flash", "flex", "sdpa")
"""The names of all kernels, the best of a device first."""


def installed_kernels(device_type: str) -> dict[str, Kernel]:
    """The kernels for a type of device that are installed, by name, the preferred one first."""
    kernels: dict[str, Kernel] = {"sdpa": SdpaKernel()}
    if device_type == "cuda":
        kernels["flex"] = FlexKernel()
        varlen = _imported("torch.nn.attention.varlen", "varlen_attn")
        if varlen is not None:
            kernels["varlen"] = VarlenKernel(varlen)
        flash = _imported("flash_attn", "flash_attn_varlen_func")
        if flash is not None:
            kernels["flash"] = FlashKernel(flash)
    names = preferred_kernels(device_type, kernels, is_compiled=False)
    return {name: kernels[name] for name in names}


def _imported(module: str, function: str) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module(module), function, None)
    # A package that was built for another version of torch fails with one of these.
    except (ImportError, OSError, RuntimeError) as error:
        log.debug("%s cannot be imported: %r", module, error)
        return None


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
