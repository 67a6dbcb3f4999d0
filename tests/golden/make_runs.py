"""Make tests/golden/runs: small runs of ``ckpt-train`` that were stopped, for every later version to continue.

    python tests/golden/make_runs.py /path/to/python tests/golden/runs

The first argument is the interpreter whose ``automodel_ckpt`` makes the runs. The committed ones were made by the
version of commit 7d0b4d4 (2026-11-22). Never make them again with a newer version: they show that old checkpoints load.
For each run, ``expected.json`` has the losses of an uninterrupted run of the same version.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

RECIPE = """\
seed: 3
model:
  from_config: {model_type: llama, vocab_size: 64, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1,
    num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 16, initializer_range: 0.3,
    bos_token_id: 1, eos_token_id: 2}
dataset:
  _target_: tests.golden.make_runs.samples
optimizer:
  lr: 1e-2
  weight_decay: 0.1
lr_scheduler:
  name: cosine
  warmup_steps: 2
step_scheduler:
  global_batch_size: 4
  local_batch_size: 2
  num_epochs: 2
  ckpt_every_steps: 3
"""
PEFT = """\
peft:
  r: 2
  base_dir: base
"""
RUNS = {
    "shards": (2, RECIPE, ()),
    "dcp": (2, RECIPE, ("--checkpoint.model_save_format=torch_save",)),
    "hf": (1, RECIPE, ("--checkpoint.model_layout=hf",)),
    "adapter": (1, RECIPE + PEFT, ()),
    "adapter_shards": (2, RECIPE + PEFT, ("--checkpoint.model_layout=shards",)),
}
"""Name -> ranks, recipe, overrides."""
KEPT_STEP = "epoch_0_step_3"


def samples() -> list[dict[str, list[int]]]:
    """Return twelve samples of eight tokens; two epochs of them are six steps."""
    draw = random.Random(5)
    rows = [[draw.randrange(3, 64) for _ in range(8)] for _ in range(12)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main(python: str, target: Path) -> None:
    """Make every run of ``RUNS`` as *target*/NAME.tar.xz: a recipe, its run directory, and the expected losses."""
    for name, (num_ranks, recipe, overrides) in RUNS.items():
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch)
            (directory / "recipe.yaml").write_text(recipe)
            _train(python, directory, num_ranks, *overrides)
            _stop_after_kept_step(directory)
            with tarfile.open(target / f"{name}.tar.xz", "w:xz", preset=9) as archive:
                archive.add(directory, arcname="", filter=_anonymous)


def _train(python: str, directory: Path, num_ranks: int, *overrides: str) -> None:
    words = [
        f"--nproc-per-node={num_ranks}",
        "recipe.yaml",
        "--checkpoint.checkpoint_dir=run",
        *overrides,
    ]
    command = [
        python,
        "-m",
        "automodel_ckpt.cli.train",
        *words,
        "--checkpoint.save_consolidated=false",
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "AUTOMODEL_CKPT_TRUST": "tests",
    }
    subprocess.run(command, cwd=directory, env=environment, check=True)


def _stop_after_kept_step(directory: Path) -> None:
    """Leave the run as a kill after its last step would have left it, before the last checkpoint was saved."""
    lines = (directory / "run" / "training.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if "event" not in record]
    expected = {record["step"]: record["loss"] for record in steps}
    (directory / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    shutil.rmtree(directory / "run" / "epoch_1_step_6")
    (directory / "run" / "LATEST").unlink()
    (directory / "run" / "LATEST").symlink_to(KEPT_STEP)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
