"""torch.compile, layer by layer and in place: no name of a parameter changes, so checkpoints are the same with it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from automodel_ckpt.base.units import counted
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)

_AUTO_WIDTHS = 8


def compile_layers(
    layers: Sequence[nn.Module],
    *,
    backend: str = "inductor",
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    device: torch.device | None = None,
    num_widths: int | None = None,
) -> None:
    """Have each layer compiled at its first forward pass; before they are sharded or wrapped.

    The layers of a model share their code, and so what was compiled of the first. Arguments as for ``torch.compile``.
    *num_widths* is how many lengths the rows can have; None: any number.
    Raises :class:`RecipeError` for no layers, and for a backend or mode that is not there or cannot work on *device*.
    """
    if not layers:
        raise _unusable("this model has no repeated layers to compile", type(layers).__name__)
    if mode is not None and backend != "inductor":
        raise _unusable("only inductor has modes", mode)
    if backend == "inductor" and (device is None or device.type == "cpu"):
        _check_compiler()
    if num_widths is not None or dynamic is not False:
        # Above this limit, torch runs a function uncompiled. Each width, and the width of samples without padding, is
        # compiled for evaluation, for training, and for the training of a layer with inputs that need no gradient: the
        # first one if the embedding is frozen. Rows have a mask or none. Without a number, few lengths are compiled
        # before torch makes them dynamic.
        config = torch._dynamo.config
        most = 6 * ((num_widths or _AUTO_WIDTHS) + 1)
        config.recompile_limit = max(config.recompile_limit, most)
    for layer in layers:
        # Not torch.compile(layer): its wrapper adds _orig_mod to the names of parameters.
        try:
            layer.compile(backend=backend, mode=mode, fullgraph=fullgraph, dynamic=dynamic)
        except (RuntimeError, ValueError, TypeError) as error:
            raise _unusable("torch.compile does not accept these settings", error) from error
    num_layers = counted(len(layers), "layer")
    log.info("compiling %s with %s: the first steps take longer", num_layers, backend)


def uses_cuda_graphs(mode: str | None, device_type: str) -> bool:
    """Whether layers that inductor compiles in this mode run as CUDA graphs, which overwrite their earlier outputs."""
    if mode is None or device_type != "cuda":
        return False
    known = torch._inductor.list_mode_options()
    return bool(known.get(mode, {}).get("triton.cudagraphs", False))


def num_row_widths(
    given: Literal["auto"] | int | None, dynamic: bool | None, device_type: str
) -> int | None:
    """The number of widths that ``compile.row_widths`` and ``compile.dynamic`` mean; None: rows are not rounded.

    On a CPU, dynamic shapes cost less than padding.
    """
    if given != "auto":
        return given
    return _AUTO_WIDTHS if device_type == "cuda" or dynamic is False else None


def _check_compiler() -> None:
    """Raise :class:`RecipeError` without a C++ compiler, which inductor looks for in the first forward pass only."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError) as error:
        raise _unusable("inductor cannot find a C++ compiler for the CPU", error) from error


def _unusable(what: str, value: object) -> RecipeError:
    hint = "correct or remove the section compile; backend aot_eager needs no compiler"
    return RecipeError(what, where="compile", value=value, hint=hint)
