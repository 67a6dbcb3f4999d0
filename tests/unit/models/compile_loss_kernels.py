"""Compile the kernels of the loss head to machine code for sm_80 and sm_90, without a GPU. A script of the test."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from automodel_ckpt.models import loss_kernels

TYPES = {
    "labels": "*i64",
    "errors": "*bf16",
    "scale": "fp32",
    "cap": "fp32",
    "z_coefficient": "fp32",
}
INTEGERS = ("num_rows", "num_columns", "first", "logits_stride", "errors_stride")
CONSTANTS = {
    "HAS_CAP": True,
    "HAS_Z_LOSS": True,
    "WITH_ERRORS": True,
    "BLOCK": loss_kernels._BLOCK,
}


def source_of(kernel: Any) -> ASTSource:
    types: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in CONSTANTS:
            types[name] = "constexpr"
        elif name in INTEGERS:
            types[name] = "i32"
        else:
            types[name] = TYPES.get(name, "*fp32")
    constants = {name: value for name, value in CONSTANTS.items() if name in types}
    return ASTSource(fn=kernel, signature=types, constexprs=constants)


def main() -> None:
    num_compiled = 0
    for kernel in (loss_kernels._losses_and_errors, loss_kernels._statistics, loss_kernels._errors):
        for capability in (80, 90):
            compiled = triton.compile(
                source_of(kernel),
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": loss_kernels._WARPS},
            )
            num_compiled += bool(compiled.asm["cubin"])
    print(num_compiled, "kernels")


main()
