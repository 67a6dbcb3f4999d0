"""TensorFlow: the checkpoints that it writes are read here, without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from automodel_ckpt.checkpoint.tensors.stored import whole
from automodel_ckpt.convert.formats.registry import detect
from tools.interop.environments import Environment
from tools.interop.program import Check, Program, Workplace

_ROOT = Path(__file__).resolve().parents[2]
_MAKER = _ROOT / "tests" / "fixtures" / "tensorflow" / "make.py"


def checks(workplace: Workplace) -> Iterator[Check]:
    """Yield a check for each kind of checkpoint."""
    made = workplace.directory / "made"
    workplace.run_script(_MAKER, made, "large")
    yield Check("tf.train.Checkpoint, with Adam", *_compared(made / "objects"))
    yield Check("Saver, two data files, eight dtypes", *_compared(made / "saver"))
    yield Check("5000 variables", *_compared(made / "large"))


def _compared(directory: Path) -> tuple[str, bool]:
    """Compare all variables of a checkpoint with the values that TensorFlow's own reader returned."""
    known = detect(directory)
    assert known is not None
    stored = known.stored_tensors(directory)
    num_equal = 0
    with np.load(directory / "expected.npz") as expected:
        for name, value in expected.items():
            tensor = stored.tensors.get(name)
            if tensor is None or tensor.shape != value.shape:
                continue
            content = whole(stored.root, tensor).tobytes()
            num_equal += content == value.tobytes()
        num_expected = len(expected.files)
    good = num_equal == num_expected == len(stored.tensors)
    return f"{num_equal} of {num_expected} variables bit-equal ({known.name})", good


PROGRAM = Program(
    name="TensorFlow",
    environment=Environment("tensorflow", first=("tensorflow-cpu==2.21.0",)),
    packages=("tensorflow-cpu",),
    checks=checks,
)
