"""Recipes of a few kinds with models of about 0.3 billion parameters, whose memory on a GPU is known.

Every text is longer than the recipe reads of it, so that all rows are as long as a forecast assumes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.models.sizes import model_sizes
from tools.gpu.ours import merged

VOCABULARY = 64_000
SIZES = model_sizes(hidden=1024, layers=8, heads=16, vocab=VOCABULARY, positions=4096)
# As many keys as queries: without values on the device, packed rows take another way that repeats keys.
GATED = {**SIZES, "intermediate_size": 4096, "num_key_value_heads": 16}
LLAMA = {"model_type": "llama", **GATED, "tie_word_embeddings": False}
ADAPTERS = {"peft": {"r": 16, "base_dir": "{DIRECTORY}/base"}}


def _data(builder: str, **arguments: Any) -> dict[str, Any]:
    return {
        "_target_": f"automodel_ckpt.data.{builder}",
        "path": "{DIRECTORY}/texts.jsonl",
        "seq_length": 512,
        "truncation": "right",
        **arguments,
    }


BASE: dict[str, Any] = {
    "recipe": "llm_finetune",
    "model": {"from_config": LLAMA},
    "tokenizer": {
        "_target_": "automodel_ckpt.examples.data.python_docs.train_tokenizer",
        "vocab_size": 1024,
    },
    "dataset": _data("text.prompt_completion", seq_length=1024),
    "optimizer": {"lr": 1e-4},
    "step_scheduler": {
        "global_batch_size": 32,
        "local_batch_size": 8,
        "max_steps": 3,
        "ckpt_every_epochs": None,
    },
    "checkpoint": {"checkpoint_dir": "{DIRECTORY}/run", "save_consolidated": False},
    "logging": {"log_every_seconds": 0},
}
# So few labels per micro-batch that the output layer keeps the gradients of logits (models/loss/head_gradients.py).
ROW_BY_ROW = {"step_scheduler": {"global_batch_size": 4, "local_batch_size": 1}}


@dataclass(frozen=True)
class Case:
    """A recipe, by its differences from BASE, the number of ranks."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 1


CASES = {
    "dpo": Case({"recipe": "dpo", "dataset": _data("preference.pairs")}),
    "tp lora": Case(merged(ADAPTERS, {"distributed": {"tp_size": 2}}), 2),
    "row by row gpipe": Case(
        merged(
            ROW_BY_ROW,
            {
                "step_scheduler": {"global_batch_size": 8},
                "distributed": {"pp_size": 2, "pp_schedule": "gpipe"},
            },
        ),
        2,
    ),
}


def write_texts(path: Path) -> None:
    """Write rows that all builders read, with texts of 300 words, more than 1,024 tokens."""
    text = " ".join(f"word{number % 97}" for number in range(300))
    fields = ("completion", "chosen", "rejected")
    with path.open("w") as file:
        for number in range(128):
            row: dict[str, Any] = {name: f"{number} {name} {text}" for name in fields}
            row["prompt"] = f"{number}: "
            file.write(json.dumps(row) + "\n")


def write_recipe(case: Case, directory: Path) -> Path:
    """Write the recipe of *case* and its data to *directory*; returns the path of the recipe."""
    write_texts(directory / "texts.jsonl")
    recipe = merged(BASE, case.changes)
    # It is replaced: a data set has no settings of another one.
    recipe["dataset"] = case.changes.get("dataset", BASE["dataset"])
    path = directory / "recipe.yaml"
    path.write_text(json.dumps(recipe).replace("{DIRECTORY}", str(directory)))
    return path
