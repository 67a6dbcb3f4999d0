"""What a program passes to the checkpointer by mistake is refused before anything is written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from automodel_ckpt import Checkpointer, CheckpointOptions
from automodel_ckpt.errors import RecipeError

MODEL = torch.nn.Linear(2, 2)


def test_numbers_of_torch_and_numpy_are_saved_as_numbers(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "run")
    checkpointer.save(
        {"model": MODEL},
        step=np.int64(3),
        epoch=torch.tensor(0),
        losses={"val_loss": torch.tensor(0.5)},
        progress={"tokens": np.int64(7)},
        validated=True,
    )
    checkpointer.close()
    assert '"val_loss": 0.5' in (tmp_path / "run/epoch_0_step_3/losses.json").read_text()


@pytest.mark.parametrize(
    "option",
    [
        {"keep_last": 0},
        {"keep_last": "3"},
        {"keep_best": -1},
        {"verify": "all"},
        {"best_mode": "lowest"},
        {"model_save_format": "pickle"},
    ],
)
def test_options_have_the_values_of_a_recipe(tmp_path: Path, option: Any) -> None:
    with pytest.raises(RecipeError, match=rf"option {next(iter(option))} has no such value"):
        Checkpointer(tmp_path / "run", options=CheckpointOptions(**option))
