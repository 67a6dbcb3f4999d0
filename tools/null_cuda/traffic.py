"""Count the bytes that the operators of a training step read and write: a prediction of speed where there is no GPU.

    NULL_CUDA_COPY=65536 python -m tools.null_cuda -- python -m tools.null_cuda.traffic

The step is that of the part ``lora`` of ``make gpu``: adapters of rank 16 on all linear layers of a Llama with the
shapes of 8B, two micro-batches of 2 x 4,096 tokens, here with few decoder layers. Three programs are counted: peft in a
bare loop, this program with the layers of transformers and peft, and this program. Differences between two numbers of
layers are the bytes of a layer.

Each tensor counts once per operator that reads or writes it. Matrix products and attention are counted separately:
their time depends on operations, not on bytes. Not counted: the kernels of the loss head, and what caches save.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tools.gpu import bare, ours
from tools.gpu.shapes import LLAMA_8B, Work, write_base
from tools.gpu.timed import CLOCK

PROGRAMS: dict[str, Mapping[str, Any] | None] = {
    "bare loop with peft": None,
    "layers of transformers and peft": {"model": {"fused_layers": False}},
    "defaults": {},
}
"""Changes of the recipe; None: the loop without this program."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "attention")
"""Words in the names of operators whose time depends on operations."""
NO_BYTES = ("empty", "view", "reshape", "alias", "detach", "transpose", "as_strided")
"""Words in the names of operators that move nothing; those that return views are known to torch."""
COUNTED_STEP = 3
BATCH, LENGTH, ACCUMULATION = 2, 4096, 2
TOKENS = BATCH * LENGTH * ACCUMULATION
"""Tokens of a step."""


def is_product(name: str) -> bool:
    """Whether the operator is a matrix product or attention."""
    return any(word in name for word in PRODUCTS)


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the CUDA tensors that each operator takes and returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: Counter[str] = Counter()
        self.is_counting = False

    def note(self, name: str, tensors: Any) -> None:
        """Count all CUDA tensors in *tensors* for an operator."""
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                self.nbytes[name] += leaf.numel() * leaf.element_size()

    def count_calls(self, module: Any, *names: str) -> None:
        """Count the tensors of functions of *module* that call kernels of Triton, which torch does not know."""
        for name in names:
            function = getattr(module, name)

            def call(*args: Any, function: Any = function, name: str = name, **options: Any) -> Any:
                output = function(*args, **options)
                if self.is_counting:
                    self.note(f"triton {name}", (args, output))
                return output

            setattr(module, name, call)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or any(word in name for word in NO_BYTES):
            return output
        self.note(name, (args, kwargs, output))
        return output


def counted(program: str, num_layers: int) -> dict[str, int]:
    """Bytes of a step by operator. Runs a few steps in this process."""
    from automodel_ckpt.models.layers import gate_kernels, rotary_kernels

    mode = Traffic()
    mode.count_calls(gate_kernels, "product", "gradients")
    mode.count_calls(rotary_kernels, "rotate")

    def on_step() -> None:
        done = len(CLOCK.ends)
        if done == COUNTED_STEP - 1:
            mode.is_counting = True
            mode.__enter__()  # type: ignore[no-untyped-call]
        if done == COUNTED_STEP:
            mode.is_counting = False
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    CLOCK.on_step = on_step
    note = CLOCK.note

    def note_and_count(num_tokens: int, *, is_last: bool = False) -> None:
        note(num_tokens, is_last=is_last)
        on_step()

    config = {**LLAMA_8B, "num_hidden_layers": num_layers}
    sizes = {"batch": BATCH, "length": LENGTH, "accumulation": ACCUMULATION}
    work = Work(config, **sizes, warm_up=1, steps=COUNTED_STEP)
    changes = PROGRAMS[program]
    with tempfile.TemporaryDirectory(prefix="traffic-") as name:
        base, directory = Path(name) / "base", Path(name) / "run"
        for _ in write_base(config, base, "cuda"):
            pass
        if changes is None:
            # The loop without this program calls nothing else at the end of a step.
            vars(CLOCK)["note"] = note_and_count
            figures = bare.lora(program, base, work, "cuda", 1.0)
        else:
            recipe = ours.merged(ours.recipe_of(work, base, directory), ours.LORA)
            figures = ours.measure(program, ours.merged(recipe, changes), directory, 1, 1.0)
        for _ in figures:
            pass
    return dict(mode.nbytes)


def layer_of(program: str, few: int, more: int) -> dict[str, float]:
    """Kilobytes of a decoder layer per token by operator, from steps of models with *few* and *more* layers."""
    steps: list[dict[str, int]] = []
    for num_layers in (few, more):
        # A process runs a single recipe.
        command = [sys.executable, "-m", __spec__.name, "--count", program, str(num_layers)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
        steps.append(json.loads(done.stdout.splitlines()[-1]))
    layer = {}
    for name, nbytes in steps[1].items():
        of_layer = (nbytes - steps[0].get(name, 0)) / (more - few)
        layer[name] = of_layer / TOKENS / 1e3
    return layer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs=2, default=[1, 3], metavar=("FEW", "MORE"))
    parser.add_argument("--operators", action="store_true", help="a line for each operator")
    parser.add_argument("--count", nargs=2, metavar=("PROGRAM", "LAYERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count is not None:
        program, num_layers = options.count
        print(json.dumps(counted(program, int(num_layers))))
        return
    print("kilobytes of a decoder layer per token, forward and backward:")
    for program in PROGRAMS:
        layer = layer_of(program, *options.layers)
        products = sum(size for name, size in layer.items() if is_product(name))
        others = sum(layer.values()) - products
        print(
            f"  {program:34} {others:6,.0f} beside products and attention, {products:6,.0f} in these"
        )
        if options.operators:
            for name, size in sorted(layer.items(), key=lambda item: -item[1]):
                if size < 1:
                    break
                print(f"      {name:42} {size:7,.1f}")


if __name__ == "__main__":
    main()
