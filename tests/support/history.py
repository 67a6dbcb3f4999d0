"""A run's directory as the trainer leaves it, made without training: logs, checkpoints with manifests, pointers."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Manifest


def write_run(
    root: Path,
    *,
    num_steps: int,
    saved: Sequence[int] = (),
    best: int | None = None,
    resumed: Sequence[int] = (),
) -> Path:
    """Steps 1 to *num_steps* with falling losses; each *saved* step validated and complete on disk."""
    root.mkdir(parents=True)
    training, validation = [], []
    for step in range(1, num_steps + 1):
        loss = 2 + 5 * math.exp(-5 * step / num_steps)
        training.append(
            {
                "step": step,
                "epoch": 0,
                "timestamp": 1e9 + step,
                "loss": loss,
                "grad_norm": 1.0 + step % 3,
                "lr": 1e-3 * step / num_steps,
                "tokens": 100,
                "tps": 100.0,
            }
        )
        if step in saved:
            validation.append({"step": step, "epoch": 0, "val_loss": loss + 0.1})
            training.append({"event": "save", "step": step, "stall_seconds": 0.25, "bytes": 1000})
            _save(root, step, loss)
        if step in resumed:
            training.append({"event": "resume", "step": step, "from": f"epoch_0_step_{step}"})
    for name, records in (("training", training), ("validation", validation)):
        (root / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    if saved:
        commit.point(root, "LATEST", f"epoch_0_step_{max(saved)}")
    if best is not None:
        commit.point(root, "LOWEST_VAL", f"epoch_0_step_{best}")
    return root


def _save(root: Path, step: int, loss: float) -> None:
    manifest = Manifest(
        step=step,
        epoch=0,
        created=1e9 + step,
        world_size=1,
        dp_size=1,
        progress={},
        losses={"step": step, "train_loss": loss, "val_loss": loss + 0.1},
        validated=True,
        environment={},
        lineage={},
        state={},
        trees={},
        files={},
    )
    path = root / f"epoch_0_step_{step}"
    path.mkdir()
    (path / "MANIFEST.json").write_bytes(manifest.to_bytes())
