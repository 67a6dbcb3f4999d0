"""Recipes of many kinds with models of about 0.3 billion parameters, whose memory on a GPU is known.

Every text is longer than the recipe reads of it, so that all rows are as long as a forecast assumes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.models.sizes import model_sizes
from tools.gpu.ours import merged
from tools.gpu.shapes import write_base

VOCABULARY = 64_000
SIZES = model_sizes(hidden=1024, layers=8, heads=16, vocab=VOCABULARY, positions=4096)
# As many keys as queries: without values on the device, packed rows take another way that repeats keys.
GATED = {**SIZES, "intermediate_size": 4096, "num_key_value_heads": 16}
LLAMA = {"model_type": "llama", **GATED, "tie_word_embeddings": False}
T5 = {
    "model_type": "t5",
    "d_model": 1024,
    "d_kv": 64,
    "d_ff": 4096,
    "num_layers": 6,
    "num_heads": 16,
    "vocab_size": VOCABULARY,
}
LATENT = {
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
ADAPTERS = {"peft": {"r": 16, "base_dir": "{DIRECTORY}/base"}}


def _model(model_type: str, **settings: Any) -> dict[str, Any]:
    return {"model": {"from_config": {"model_type": model_type, **GATED, **settings}}}


def _data(builder: str, **arguments: Any) -> dict[str, Any]:
    data = {
        "_target_": f"automodel_ckpt.data.{builder}",
        "path": "{DIRECTORY}/texts.jsonl",
        "seq_length": 512,
        **arguments,
    }
    if builder != "text_pairs.text_pairs":
        # That one always truncates.
        data["truncation"] = "right"
    return data


def _kind(recipe: str, builder: str, **sections: Any) -> dict[str, Any]:
    return {"recipe": recipe, "dataset": _data(builder), **sections}


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
PAIRS = _kind("embedding", "text_pairs.text_pairs")
# Short: on the device, rows of several lengths get no mask, which is as large as the scores of all heads.
SOURCES = {
    "recipe": "seq2seq",
    "dataset": _data("seq2seq.source_target", seq_length=128, target_length=64),
    "step_scheduler": {"global_batch_size": 128, "local_batch_size": 32},
}

SMALL = {
    "dataset": _data("text.prompt_completion", seq_length=128),
    "step_scheduler": {"global_batch_size": 4, "local_batch_size": 1},
}
# So few labels per micro-batch that the output layer keeps the gradients of logits (models/loss/head_gradients.py).
ROW_BY_ROW = {"step_scheduler": {"global_batch_size": 4, "local_batch_size": 1}}
DEPTHS = _model("qwen3_5_text", head_dim=64, layer_types=["full_attention"] * 8)
IMAGES: dict[str, Any] = {
    "recipe": "vlm_finetune",
    "model": {
        "from_config": {
            "model_type": "llava",
            "vision_config": {
                "model_type": "clip_vision_model",
                **model_sizes(hidden=1024, inner=4096, layers=6, heads=16),
                "image_size": 336,
                "patch_size": 14,
            },
            "text_config": LLAMA,
            "vision_feature_layer": -1,
            "image_seq_length": 576,
        },
        "freeze": ["*.post_layernorm.*"],
    },
    "processor": {
        "_target_": "tools.gpu.data.image_processor",
        "image_pixels": 336,
        "patch_pixels": 14,
    },
    "dataset": {
        "_target_": "automodel_ckpt.examples.data.mock_images.mock_images",
        "num_samples": 128,
        "image_size": [336, 336],
        "num_words": 128,
    },
}


@dataclass(frozen=True)
class Case:
    """A recipe, by its differences from BASE, the number of ranks."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 1


CASES = {
    "pipeline": Case({"distributed": {"pp_size": 2}}, 2),
    "deepseek_v3": Case(
        _model(
            "deepseek_v3",
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=512,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            **LATENT,
        )
    ),
    "dpo": Case(_kind("dpo", "preference.pairs")),
    "embedding": Case(PAIRS),
    "t5": Case({**SOURCES, "model": {"from_config": T5}}),
    "compiled": Case({"compile": {"enabled": True}}),
    "lora fsdp2 small": Case(merged(ADAPTERS, SMALL), 2),
    "fsdp2 kept": Case({"distributed": {"reshard_after_forward": False}}, 2),
    "tp lora": Case(merged(ADAPTERS, {"distributed": {"tp_size": 2}}), 2),
    "mtp": Case(merged(DEPTHS, {"model": {"mtp": {"num_depths": 1}}})),
    "images": Case(IMAGES),
    "distill lora": Case(
        {
            **ADAPTERS,
            "recipe": "distill",
            "distill": {"teacher": {"from_pretrained": "{DIRECTORY}/teacher"}},
        }
    ),
    "row by row mtp": Case(
        merged(
            merged(ROW_BY_ROW, DEPTHS), {"model": {"mtp": {"num_depths": 3, "repeat_layer": True}}}
        )
    ),
    "row by row ddp": Case(
        merged(ROW_BY_ROW, {"distributed": {"strategy": "ddp"}, "model": {"dtype": "bfloat16"}}), 2
    ),
    "row by row fsdp2": Case(ROW_BY_ROW, 2),
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
    fields = ("completion", "chosen", "rejected", "query", "positive", "text", "source", "target")
    with path.open("w") as file:
        for number in range(128):
            # Different, because equal texts are hidden from each other as negatives.
            row: dict[str, Any] = {name: f"{number} {name} {text}" for name in fields}
            row |= {"prompt": f"{number}: ", "label": "yes" if number % 2 else "no"}
            row["is_good"] = bool(number % 2)
            row["negatives"] = [f"{number} no {text}"]
            file.write(json.dumps(row) + "\n")


def write_recipe(case: Case, directory: Path) -> Path:
    """Write the recipe of *case* and its data to *directory*; returns the path of the recipe."""
    write_texts(directory / "texts.jsonl")
    recipe = merged(BASE, case.changes)
    for section in ("model", "dataset"):
        # These are replaced: a model has no settings of another one.
        changes = case.changes.get(section)
        if changes is not None:
            recipe[section] = {**BASE[section], **changes}
        if changes is not None and "_target_" in changes:
            recipe[section] = changes
    if "processor" in recipe:
        del recipe["tokenizer"]
    if "distill" in recipe:
        list(write_base(LLAMA, directory / "teacher", "cpu"))
    path = directory / "recipe.yaml"
    path.write_text(json.dumps(recipe).replace("{DIRECTORY}", str(directory)))
    return path
