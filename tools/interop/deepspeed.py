"""DeepSpeed: checkpoints of ZeRO 1, 2 and 3 and universal ones are read here, as its own conversion reads them."""

import os
from collections.abc import Iterator

from safetensors.torch import load_file

from tests.support.external_tensors import values
from tools.interop.program import Check, Workplace, tensors_check


def checks(workplace: Workplace) -> Iterator[Check]:
    """Yield the checks. The first run compiles DeepSpeed's helper for the CPU, which takes a minute."""
    # DeepSpeed starts ninja by its name.
    workplace.variables["PATH"] = f"{workplace.python.parent}:{os.environ['PATH']}"
    for directory in sorted(workplace.made("deepspeed/make.py").iterdir()):
        expected = load_file(directory / "expected.safetensors")
        what = f"weights of {directory.name}"
        yield tensors_check(what, values(directory), expected, any_dtype=True)
