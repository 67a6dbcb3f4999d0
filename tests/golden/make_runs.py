"""What the recipes in tests/golden/runs name, and how these runs are continued.

The version of commit 7d0b4d4 (2026-11-22) trained and stopped them. They are never made again with a newer version:
they show that old checkpoints load. ``expected.json`` in each has the losses of an uninterrupted run of that version.
"""

import random

RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "shards": (2, ()),
    "dcp": (2, ("--checkpoint.model_save_format=torch_save",)),
    "hf": (1, ("--checkpoint.model_layout=hf",)),
    "adapter": (1, ()),
    "adapter_shards": (2, ("--checkpoint.model_layout=shards",)),
}
"""Name -> ranks, overrides."""
KEPT_STEP = "epoch_0_step_3"


def samples() -> list[dict[str, list[int]]]:
    """Return twelve samples of eight tokens; two epochs of them are six steps."""
    draw = random.Random(5)
    rows = [[draw.randrange(3, 64) for _ in range(8)] for _ in range(12)]
    return [{"input_ids": row, "labels": row} for row in rows]
