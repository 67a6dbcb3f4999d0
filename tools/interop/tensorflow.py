"""TensorFlow: the checkpoints that it writes are read here, without it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from automodel_ckpt.checkpoint.tensors.box_reader import whole
from automodel_ckpt.convert.formats.registry import detect
from tools.interop.program import Check, Workplace


def checks(workplace: Workplace) -> Iterator[Check]:
    made = workplace.made("tensorflow/make.py", "large")
    yield _compared("tf.train.Checkpoint, with Adam", made / "objects")
    yield _compared("Saver, two data files, eight dtypes", made / "saver")
    yield _compared("5000 variables", made / "large")


def _compared(what: str, directory: Path) -> Check:
    """Compare all variables of a checkpoint with the values that TensorFlow's own reader returned."""
    known = detect(directory)
    assert known is not None
    stored = known.stored_tensors(directory)
    num_equal = 0
    with np.load(directory / "expected.npz") as expected:
        for name, value in expected.items():
            tensor = stored.tensors.get(name)
            if tensor is not None and tensor.shape == value.shape:
                num_equal += whole(stored.root, tensor).tobytes() == value.tobytes()
        num_expected = len(expected.files)
    good = num_equal == num_expected == len(stored.tensors)
    return Check(what, f"{num_equal} of {num_expected} variables bit-equal ({known.name})", good)
