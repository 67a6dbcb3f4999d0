"""Makes tests/golden/v2_*: checkpoints of format version 2 that every later version has to read.

python -m tests.golden.make_golden tests/golden        # only ever for a new format version; old ones stay as they are
"""

import sys
from pathlib import Path
from types import SimpleNamespace

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.jobs import jobs
from automodel_ckpt.checkpoint.parts.manifest import FORMAT_VERSION, environment
from automodel_ckpt.checkpoint.saving import publisher
from tests.support import ranks
from tests.support.models import tiny

FORMATS = ("safetensors", "torch_save")


def golden_state(seed: int = 5) -> SimpleNamespace:
    """What the golden checkpoints hold: seed 5, two optimizer steps."""
    made = tiny.recipe(seed, tracker=tiny.Counter({"best": 1.5, "seen": [1, 2]}))
    tiny.train(made)
    return made


def save_golden(root: Path, model_save_format: str) -> None:
    """Save on two ranks."""
    tiny.save(
        root,
        golden_state(),
        model_save_format=model_save_format,
        losses={"step": 20, "val_loss": 0.5},
        validated=True,
    )


def main(directory: Path) -> None:
    # The fixtures do not name the machine that made them.
    publisher.environment = lambda: {"packages": environment()["packages"]}  # type: ignore[assignment]
    # A checkpoint that is so small has version 1 otherwise.
    jobs.MIN_TABLE_ROWS = 0
    for model_save_format in FORMATS:
        root = directory / f"v{FORMAT_VERSION}_{model_save_format}"
        ranks.run(save_golden, 2, root, model_save_format)
        for pointer in layout.POINTERS:
            (
                root / pointer
            ).unlink()  # the next start makes LATEST again, and git need not keep links


if __name__ == "__main__":
    main(Path(sys.argv[1]))
