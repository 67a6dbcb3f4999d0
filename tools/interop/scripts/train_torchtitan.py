"""Train ten steps with torchtitan's parts, and save after five. Runs with torchtitan's interpreter.

Arguments: make.py of the fixtures, and an empty directory. ``checkpoint/step-5`` gets the checkpoint and the
config.json of the model, and ``losses.json`` the losses of all steps. The data are the formula of
tests/fixtures/tiny_training.py, in order; the loss is the mean over the next tokens of the batch.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from torch import nn
from torchtitan.components.optimizer import LRSchedulersContainer

# This script runs in torchtitan's environment, from any directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests" / "fixtures"))
from tiny_training import NUM_STEPS, SAVED_STEP, VOCABULARY, batch_of


def main() -> None:
    maker_path, output = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("make", maker_path)
    maker: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    maker.VOCAB_SIZE = VOCABULARY
    directory = Path(output).resolve()
    folder = directory / "checkpoint"
    parts = maker.Parts(folder)
    # From the peak rate to zero, without warmup.
    schedule = LRSchedulersContainer.Config(warmup_steps=0).build(
        optimizers=parts.optimizers, training_steps=NUM_STEPS
    )
    parts.manager.states["lr_scheduler"] = schedule
    losses: list[float] = []
    for step in range(NUM_STEPS):
        ids = batch_of(step)
        logits = parts.model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        parts.optimizers.zero_grad()
        loss.backward()
        parts.optimizers.step()
        schedule.step()
        losses.append(loss.item())
        parts.train_state.step = step + 1
        if step + 1 == SAVED_STEP:
            parts.manager.save(SAVED_STEP)
    parts.manager.close()
    document = maker.config_json()
    # transformers does not train the embedding of a padding token; torchtitan has none.
    document["pad_token_id"] = None
    config = json.dumps(document, indent=2)
    (folder / f"step-{SAVED_STEP}" / "config.json").write_text(config + "\n")
    (directory / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
