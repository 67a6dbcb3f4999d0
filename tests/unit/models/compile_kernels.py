"""Compile the Triton kernels to machine code for sm_80 and sm_90, without a GPU. A script of the test."""

import itertools
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from automodel_ckpt.models.layers import gate_kernels, rotary_kernels
from automodel_ckpt.models.loss import loss_kernels
from automodel_ckpt.models.loss.head_gradients import block_columns
from automodel_ckpt.optim import adam8bit_kernel, adamw_kernel

NUMBERS = (
    *("scale", "cap", "z_coefficient"),
    *("lr", "beta1", "beta2", "eps", "weight_decay"),
    *("average_part", "square_part", "decay", "size", "correction"),
)
TYPES = {
    "labels": "*i64",
    "errors": "*bf16",
    **dict.fromkeys(NUMBERS, "fp32"),
    **dict.fromkeys(("average_codes", "square_codes"), "*u8"),
    **dict.fromkeys(("weights", "further_bits"), "*i16"),
    **dict.fromkeys(("of_signed", "of_unsigned"), "*i32"),
}
IN_16_BITS = (
    *("gate", "up", "product", "gradient", "of_gate", "of_up"),
    *("heads", "cosines", "sines", "rotated", "scaled"),
)
INTEGERS = (
    *(
        "num_rows",
        "first_row",
        "num_elements",
        "num_columns",
        "first",
        "logits_stride",
        "errors_stride",
    ),
    *("num_heads", "length", "half", "head_dim", "heads_row", "heads_head", "heads_token"),
    *("cosines_row", "cosines_token", "sines_row", "sines_token"),
    *("index", "num_tensors"),
)
OF_LOSSES = {
    "HAS_CAP": True,
    "HAS_Z_LOSS": True,
    "WITH_ERRORS": True,
    "WIDTH": block_columns(128_256, 4096),
    "IS_ALIGNED": True,
}
OF_HEADS = {"INVERSE": True, "HEADS": 16, "HALF": 32, "REST": 64}
OF_ADAMW = {"HAS_DIVISOR": True, "HAS_FLAG": True, "DECAYS": True, "EVICTION": "evict_first"}
OF_8_BITS = {"HAS_BITS": True, "LANES": 32, "ROWS": 4, "PARTS": 2}
OF_8_BITS |= {"KEEPS_AVERAGE": True, "KEEPS_SQUARE": True}
CONSTANTS = {**OF_LOSSES, **OF_HEADS, **OF_ADAMW, **OF_8_BITS}
KERNELS = {
    loss_kernels: (loss_kernels._losses_and_errors, loss_kernels._scale),
    gate_kernels: (gate_kernels._product, gate_kernels._gradients),
    rotary_kernels: (rotary_kernels._rotate,),
    adamw_kernel: (adamw_kernel._update,),
    adam8bit_kernel: (adam8bit_kernel._update,),
}
FURTHER_VARIANTS: dict[Any, tuple[dict[str, Any], ...]] = {
    adam8bit_kernel._update: (
        {"HAS_BITS": False, "weights": "*fp32"},
        {"KEEPS_AVERAGE": False, "KEEPS_SQUARE": False},
    )
}
"""Other constants and types with which a kernel is compiled again."""


def source_of(kernel: Any, block: int, variant: dict[str, Any]) -> ASTSource:
    types: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in CONSTANTS or name == "BLOCK":
            types[name] = "constexpr"
        elif name in IN_16_BITS:
            types[name] = "*bf16"
        elif name in INTEGERS:
            types[name] = "i32"
        else:
            types[name] = variant.get(name, TYPES.get(name, "*fp32"))
    constants: dict[str, Any] = {"BLOCK": block} if "BLOCK" in types else {}
    constants |= {name: variant.get(name, CONSTANTS[name]) for name in CONSTANTS if name in types}
    return ASTSource(fn=kernel, signature=types, constexprs=constants)


def main() -> None:
    num_compiled = 0
    for module, kernels in KERNELS.items():
        for kernel in kernels:
            variants = ({}, *FURTHER_VARIANTS.get(kernel, ()))
            for capability, variant in itertools.product((80, 90), variants):
                compiled = triton.compile(
                    source_of(kernel, module._BLOCK, variant),
                    target=GPUTarget("cuda", capability, 32),
                    options={"num_warps": module._WARPS},
                )
                num_compiled += bool(compiled.asm["cubin"])
    print(num_compiled, "kernels")


main()
