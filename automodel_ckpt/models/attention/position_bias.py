"""Position biases (T5) in the memory layout that PyTorch's fused attention reads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_NAME = "relative_attention_bias"


def lay_out_position_biases(model: nn.Module) -> int:
    """Let *model* compute its position biases so that fused attention accepts them; returns the number of layers.

    transformers gets the biases of all heads [1, H, Tq, Tk] by transposing what an embedding returns, [Tq, Tk, H]. A
    row of such a view has gaps, and memory-efficient attention needs rows without gaps: PyTorch would compute plain
    products, and keep the scores of all pairs in float32. Values and gradients are the same.
    """
    num_layers = 0
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == _NAME and isinstance(module, nn.Embedding):
            module.register_forward_hook(_with_heads_first_in_memory)
            num_layers += 1
    return num_layers


def _with_heads_first_in_memory(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """The biases [Tq, Tk, H] of an embedding, stored so that their transposition [H, Tq, Tk] is contiguous."""
    if not isinstance(output, Tensor) or output.dim() != 3:
        return output
    return output.permute(2, 0, 1).contiguous().permute(1, 2, 0)
