"""Small runs whose checkpoints tests upload to a store, and their names there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.models import tiny

URL = "s3://bucket/runs/a"
FIRST, SECOND = "epoch_0_step_10", "epoch_0_step_20"


def write_run(root: Path, seed: int = 0, **options: Any) -> SimpleNamespace:
    """Save the checkpoints :data:`FIRST` and :data:`SECOND` in *root*; return the state."""
    made = tiny.recipe(seed)
    for step in (10, 20):
        tiny.train(made)
        tiny.save(root, made, step, **options)
    return made
