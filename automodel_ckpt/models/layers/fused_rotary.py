"""Rotary position embeddings in one kernel for queries and one for keys, in place of transformers' ten operators.

transformers' layers of attention call a function of their module, ``apply_rotary_pos_emb(q, k, cos, sin)``, which reads
and writes queries and keys many times in each direction. Here, they call a Triton kernel on a GPU, which reads and
writes them once and computes in float32. Elsewhere they call transformers' function.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.models.layers.fused_class import agrees
from automodel_ckpt.models.loss.head_gradients import kernel_for

_FUNCTION = "apply_rotary_pos_emb"
_TOLERANCE = 1e-5
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fuse_rotary_embeddings(model: nn.Module) -> int:
    """Let the layers of attention in *model* rotate queries and keys with fewer kernels; returns their number.

    A layer is recognized by the name of the function that its forward pass calls, and by what this function computes
    from random numbers: each element x[i] of a head forms a pair with x[i + R/2], for R elements of the cosines. The
    function is replaced in the module of its file, for all models of the process until :func:`restore_rotation`.
    """
    return sum(_replace(names) for names in _names_of_callers(model))


def restore_rotation(model: nn.Module) -> None:
    """Undo :func:`fuse_rotary_embeddings` for all models of the process with the classes of *model*.

    A run without fused layers must not depend on earlier runs of the process.
    """
    for names in _names_of_callers(model):
        if isinstance(replaced := names.get(_FUNCTION), _Rotation):
            names[_FUNCTION] = replaced.function


def _names_of_callers(model: nn.Module) -> Iterator[ValueDict]:
    """The names of the Python module of each layer that calls the function."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if isinstance(forward, types.FunctionType) and _FUNCTION in forward.__code__.co_names:
            yield forward.__globals__


def _replace(names: ValueDict) -> bool:
    """Replace the function in the *names* of a module; False if it computes something else than the kernel."""
    function = names.get(_FUNCTION)
    if isinstance(function, _Rotation):
        return True
    rotation = _recognized(function) if isinstance(function, Hashable) else None
    if rotation is None:
        return False
    names[_FUNCTION] = rotation
    return True


@dataclass(frozen=True, eq=False)
class _Rotation:
    """Called like ``apply_rotary_pos_emb``: by the kernel where it can compute the same, else by *function*."""

    function: Callable[..., Any]
    is_partial: bool
    """Whether *function* accepts cosines of fewer elements than a head has, and leaves the others as they are."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # torch.compile fuses these operators itself.
        is_usual = kwargs in ({}, {"unsqueeze_dim": 1}) and not torch.compiler.is_compiling()
        if is_usual and self._fits(*args):
            return _Rotate.apply(*args)  # type: ignore[no-untyped-call]
        return self.function(*args, **kwargs)

    def _fits(self, *tensors: Any) -> bool:
        """Whether the kernel can compute these queries, keys, cosines and sines."""
        # A subclass, such as a DTensor, has no memory that a kernel could read.
        if len(tensors) != 4 or any(type(each) is not Tensor for each in tensors):
            return False
        query, key, cosines, sines = tensors
        if not _can_compute(*tensors) or cosines.requires_grad or sines.requires_grad:
            return False
        if (query.dim(), key.dim(), cosines.dim()) != (4, 4, 3) or cosines.shape != sines.shape:
            return False
        if any(query.shape[dim] != key.shape[dim] for dim in (0, 2, 3)):
            return False
        rows, _, length, width = query.shape
        num_rows, num_tokens, size = cosines.shape
        if num_rows not in (1, rows) or num_tokens != length or size % 2:
            return False
        return size == width or (size < width and self.is_partial)


def _can_compute(*tensors: Tensor) -> bool:
    """Whether the kernel computes tensors of this dtype on their device."""
    if any(not each.is_cuda or each.dtype != tensors[0].dtype for each in tensors):
        return False
    return tensors[0].dtype in _DTYPES and kernel_for("cuda", torch.float32) == "triton"


class _Rotate(torch.autograd.Function):
    """Rotated queries and keys [B, H, T, D]; keeps the cosines and sines [B or 1, T, R]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        cosines: Tensor,
        sines: Tensor,
    ) -> tuple[Tensor, Tensor]:
        from automodel_ckpt.models.layers.rotary_kernels import rotate

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cosines, sines)
        return rotate(query, cosines, sines), rotate(key, cosines, sines)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from automodel_ckpt.models.layers.rotary_kernels import rotate

        cosines, sines = ctx.saved_tensors
        found: list[Tensor | None] = []
        for gradient in gradients:
            if gradient is not None:
                gradient = rotate(gradient, cosines, sines, inverse=True)
            found.append(gradient)
        return *found, None, None


@functools.cache
def _recognized(function: Any) -> _Rotation | None:
    """*function* with the kernel, if it rotates the pairs that the kernel rotates. None when not."""
    if not callable(function) or not _rotates(function, 8):
        return None
    return _Rotation(function, _rotates(function, 4))


def _rotates(function: Callable[..., Any], size: int) -> bool:
    """Whether *function* rotates the first *size* elements of heads of 8, as the kernel does, and copies the others."""
    generator = torch.Generator().manual_seed(0)
    numbers: ValueDict = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    inputs = [torch.randn(2, num_heads, 5, 8, **numbers) for num_heads in (4, 3)]
    cosines, sines = (torch.randn(2, 5, size, **numbers) for _ in range(2))
    try:
        found = function(*inputs, cosines, sines)
    except Exception:
        # It has other arguments, or shapes that do not fit.
        return False
    if not isinstance(found, tuple) or len(found) != 2:
        return False
    expected = [_rotated(each, cosines, sines) for each in inputs]
    return all(agrees(*pair, atol=_TOLERANCE) for pair in zip(found, expected, strict=True))


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """What the kernel computes from *heads* [B, H, T, D] and *cosines* and *sines* [B, T, R], by torch's operators."""
    size = cosines.shape[-1]
    cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)
    turned, rest = heads[..., :size], heads[..., size:]
    one, other = turned.chunk(2, dim=-1)
    turned = turned * cosines + torch.cat((-other, one), dim=-1) * sines
    return torch.cat((turned, rest), dim=-1)
