"""Compare the memory that ``--dry-run`` forecasts for a GPU with the peak of the run, for many kinds of recipes.

    python -m tools.null_cuda.forecasts                 # all cases on the CUDA device without hardware: an hour
    python -m tools.null_cuda.forecasts dpo t5          # some of them
    python -m tools.null_cuda.forecasts --list

Models have about 0.3 billion parameters. Every text is longer than the recipe reads of it, so that all rows are as long
as the forecast assumes. The forecast is compared without CUDA's context and the buffers of NCCL, which are not tensors
of PyTorch, and with the workspace of matrix products, which is one. The exit code is 1 if a forecast is wrong by more
than a tenth, or a run fails.

Not compared: expert parallelism, because the sizes of what ranks exchange are values. The case ``qlora`` needs
bitsandbytes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.gpu.ours import merged
from tools.gpu.parts.vlm import llava
from tools.gpu.shapes import write_base

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.1
WORKSPACE_BYTES = 32 * 2**20
"""What cuBLAS takes of PyTorch's memory on Hopper. The forecast has it in the part ``process``."""
_NOT_FINITE = "no step had a finite gradient norm"
"""How a run ends that did all steps, and changed no weight."""
VOCABULARY = 64_000
SIZES = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
}
# As many keys as queries: without values on the device, packed rows take another way that repeats keys.
GATED = {**SIZES, "intermediate_size": 4096, "num_key_value_heads": 16}
LLAMA = {"model_type": "llama", **GATED, "tie_word_embeddings": False}
BERT = {
    "model_type": "bert",
    **SIZES,
    "intermediate_size": 4096,
    "max_position_embeddings": 512,
}
T5 = {
    "model_type": "t5",
    "d_model": 1024,
    "d_kv": 64,
    "d_ff": 4096,
    "num_layers": 6,
    "num_heads": 16,
    "vocab_size": VOCABULARY,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
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
ONE_ROW = {"step_scheduler": {"global_batch_size": 1, "local_batch_size": 1}}
ROW_BY_ROW = {"step_scheduler": {"global_batch_size": 4, "local_batch_size": 1}}
DEPTHS = _model("qwen3_5_text", head_dim=64, layer_types=["full_attention"] * 8)
JUDGED = _kind("kto", "kto.judged_completions")
JUDGED["dataset"]["label_field"] = "is_good"
LISTS = _kind("reranker", "text_pairs.text_pairs")
LISTS["dataset"]["negative_fields"] = ["negatives"]
IMAGES: dict[str, Any] = {
    "recipe": "vlm_finetune",
    "model": {
        "from_config": {
            "model_type": "llava",
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 6,
                "num_attention_heads": 16,
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

UNFROZEN = {"from_config": IMAGES["model"]["from_config"]}
FILES = {"from_config": None, "from_pretrained": "{DIRECTORY}/base"}


@dataclass(frozen=True)
class Case:
    """A recipe, by its differences from BASE, the number of ranks, and a model that the recipe starts from."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    base: Mapping[str, Any] | None = None
    """The configuration of the model in bfloat16 that ``{DIRECTORY}/base`` gets the files of."""


CASES = {
    "full": Case(),
    "one micro-batch": Case({"step_scheduler": {"global_batch_size": 8}}),
    "float32": Case({"distributed": {"mixed_precision": None}}),
    "bfloat16 weights": Case({"model": {"dtype": "bfloat16"}}),
    "checkpointed": Case({"model": {"activation_checkpointing": True}}),
    "selective": Case({"model": {"activation_checkpointing": "selective"}}),
    "offloaded": Case({"model": {"activation_checkpointing": "offload"}}),
    "sgd": Case({"optimizer": {"_target_": "torch.optim.SGD"}}),
    "ema": Case({"ema": {"decay": 0.99}}),
    "muon": Case(
        {"optimizer": {"groups": [{"params": ["hidden_matrices"], "_target_": "torch.optim.Muon"}]}}
    ),
    "lora": Case(ADAPTERS),
    "dora": Case(merged(ADAPTERS, {"peft": {"use_dora": True}})),
    "lora and head": Case(merged(ADAPTERS, {"peft": {"modules_to_save": ["lm_head"]}})),
    "lora on head": Case(merged(ADAPTERS, {"peft": {"target_modules": ["q_proj", "lm_head"]}})),
    "packed": Case(
        {"packed_sequence": {"size": 4096}, "step_scheduler": {"local_batch_size": 2}},
    ),
    "fsdp2": Case(num_ranks=2),
    "fsdp2 deferred": Case({"distributed": {"defer_gradient_sync": True}}, 2),
    "hsdp": Case({"distributed": {"dp_replicate_size": 2}}, 4),
    "ddp": Case({"distributed": {"strategy": "ddp"}}, 2),
    "pipeline": Case({"distributed": {"pp_size": 2}}, 2),
    "pipeline of 4": Case({"distributed": {"pp_size": 4}}, 4),
    "interleaved": Case(
        {
            "distributed": {
                "pp_size": 2,
                "pp_schedule": "interleaved1f1b",
                "pp_stages_per_rank": 2,
            }
        },
        2,
    ),
    "lora fsdp2": Case(ADAPTERS, 2),
    "gemma2": Case(_model("gemma2", head_dim=64)),
    "gemma3": Case(_model("gemma3_text", head_dim=64)),
    "gpt2": Case(
        {
            "model": {
                "from_config": {
                    "model_type": "gpt2",
                    "n_embd": 1024,
                    "n_layer": 8,
                    "n_head": 16,
                    "vocab_size": VOCABULARY,
                    "n_positions": 2048,
                }
            }
        }
    ),
    "gpt_neox": Case(
        {"model": {"from_config": {"model_type": "gpt_neox", **SIZES, "intermediate_size": 4096}}}
    ),
    "falcon": Case({"model": {"from_config": {"model_type": "falcon", **SIZES}}}),
    "qwen3": Case(_model("qwen3", head_dim=128)),
    "phi3": Case(_model("phi3", pad_token_id=0)),
    "olmo2": Case(_model("olmo2")),
    "qwen3_moe": Case(_model("qwen3_moe", **EXPERTS)),
    "mixtral": Case(_model("mixtral", num_local_experts=4, intermediate_size=2048)),
    "gpt_oss": Case(_model("gpt_oss", head_dim=64, num_local_experts=4, intermediate_size=1024)),
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
    "minicpm3": Case(_model("minicpm3", **LATENT)),
    "dpo": Case(_kind("dpo", "preference.pairs")),
    "dpo lora": Case(merged(_kind("dpo", "preference.pairs"), ADAPTERS)),
    "dpo fsdp2": Case(_kind("dpo", "preference.pairs"), 2),
    "orpo": Case(_kind("orpo", "preference.pairs")),
    "reward_model": Case(_kind("reward_model", "preference.pairs")),
    "distill": Case(
        {
            "recipe": "distill",
            "distill": {"teacher": {"from_pretrained": "{DIRECTORY}/teacher"}},
        }
    ),
    "embedding": Case(PAIRS),
    "embedding bert": Case({**PAIRS, "model": {"from_config": BERT}}),
    "classification": Case(
        _kind(
            "sequence_classification",
            "classification.texts",
            model={"from_config": BERT},
            classification={"labels": ["no", "yes"]},
        )
    ),
    "t5": Case({**SOURCES, "model": {"from_config": T5}}),
    "t5 fsdp2": Case({**SOURCES, "model": {"from_config": T5}}, 2),
    "adam8bit": Case({"optimizer": {"_target_": "automodel_ckpt.optim.adam8bit.AdamW8bit"}}),
    "adam8bit fsdp2": Case(
        {"optimizer": {"_target_": "automodel_ckpt.optim.adam8bit.AdamW8bit"}}, 2
    ),
    "muon fsdp2": Case(
        {
            "optimizer": {
                "groups": [{"params": ["hidden_matrices"], "_target_": "torch.optim.Muon"}]
            }
        },
        2,
    ),
    "compiled": Case({"compile": {"enabled": True}}),
    "compiled lora": Case(merged(ADAPTERS, {"compile": {"enabled": True}})),
    "cpu offload": Case({"distributed": {"cpu_offload": True, "strategy": "fsdp2"}}),
    "cpu offload fsdp2": Case({"distributed": {"cpu_offload": True}}, 2),
    "lora ddp": Case(merged(ADAPTERS, {"distributed": {"strategy": "ddp"}}), 2),
    "lora one micro-batch": Case(merged(ADAPTERS, {"step_scheduler": {"global_batch_size": 8}})),
    "fsdp2 small": Case(SMALL, 2),
    "lora fsdp2 small": Case(merged(ADAPTERS, SMALL), 2),
    "fsdp2 kept": Case({"distributed": {"reshard_after_forward": False}}, 2),
    "tp": Case({"distributed": {"tp_size": 2}}, 2),
    "tp sequence parallel": Case({"distributed": {"tp_size": 2, "sequence_parallel": True}}, 2),
    "tp fsdp2": Case({"distributed": {"tp_size": 2}}, 4),
    "tp lora": Case(merged(ADAPTERS, {"distributed": {"tp_size": 2}}), 2),
    "cp": Case({"distributed": {"cp_size": 2}}, 2),
    "cp fsdp2": Case({"distributed": {"cp_size": 2}}, 4),
    "cp lora": Case(merged(ADAPTERS, {"distributed": {"cp_size": 2}}), 2),
    "tp cp": Case({"distributed": {"cp_size": 2, "tp_size": 2}}, 4),
    "qwen3_moe lora": Case(
        merged(
            {**_model("qwen3_moe", **EXPERTS), **ADAPTERS},
            {"peft": {"target_parameters": "all-experts"}},
        )
    ),
    "qwen3_moe fsdp2": Case(_model("qwen3_moe", **EXPERTS), 2),
    "mtp": Case(merged(DEPTHS, {"model": {"mtp": {"num_depths": 1}}})),
    "kto": Case(JUDGED),
    "kto lora": Case(merged(JUDGED, ADAPTERS)),
    "reranker": Case({**LISTS, "model": {"from_config": BERT}}),
    "reranker llama": Case(LISTS),
    "classification llama": Case(
        _kind(
            "sequence_classification",
            "classification.texts",
            classification={"labels": ["no", "yes"]},
        )
    ),
    "images": Case(IMAGES),
    "images lora": Case({**merged(IMAGES, ADAPTERS), "model": UNFROZEN}),
    "images fsdp2": Case(IMAGES, 2),
    "images frozen": Case(merged(IMAGES, {"model": {"freeze": ["vision_tower"]}})),
    "images frozen in files": Case(
        {**IMAGES, "model": {**FILES, "freeze": ["vision_tower", "projector"]}},
        base=IMAGES["model"]["from_config"],
    ),
    "frozen in files": Case({"model": {**FILES, "freeze": ["*.layers.[0-3].*"]}}, base=LLAMA),
    "frozen in files fsdp2": Case(
        {"model": {**FILES, "freeze": ["*.layers.[0-3].*"]}}, 2, base=LLAMA
    ),
    "distill lora": Case(
        {
            **ADAPTERS,
            "recipe": "distill",
            "distill": {"teacher": {"from_pretrained": "{DIRECTORY}/teacher"}},
        }
    ),
    "distill fsdp2": Case(
        {
            "recipe": "distill",
            "distill": {"teacher": {"from_pretrained": "{DIRECTORY}/teacher"}},
        },
        2,
    ),
    "one row": Case(ONE_ROW),
    "one row tied": Case(merged(ONE_ROW, _model("llama", tie_word_embeddings=True))),
    "one row packed": Case(merged(ONE_ROW, {"packed_sequence": {"size": 2048}})),
    "row by row": Case(ROW_BY_ROW),
    "row by row tied": Case(merged(ROW_BY_ROW, _model("llama", tie_word_embeddings=True))),
    "row by row offloaded": Case(
        merged(ROW_BY_ROW, {"model": {"activation_checkpointing": "offload"}})
    ),
    "row by row bfloat16 weights": Case(merged(ROW_BY_ROW, {"model": {"dtype": "bfloat16"}})),
    "row by row mtp": Case(
        merged(
            merged(ROW_BY_ROW, DEPTHS), {"model": {"mtp": {"num_depths": 3, "repeat_layer": True}}}
        )
    ),
    "row by row ddp": Case(
        merged(
            ROW_BY_ROW,
            {"distributed": {"strategy": "ddp"}, "model": {"dtype": "bfloat16"}},
        ),
        2,
    ),
    "one row ddp": Case(
        merged(
            ROW_BY_ROW,
            {"distributed": {"strategy": "ddp"}, "step_scheduler": {"global_batch_size": 2}},
        ),
        2,
    ),
    "row by row fsdp2": Case(ROW_BY_ROW, 2),
    "row by row tp": Case(merged(ROW_BY_ROW, {"distributed": {"tp_size": 2}}), 2),
    "row by row pipeline": Case(merged(ROW_BY_ROW, {"distributed": {"pp_size": 2}}), 2),
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
    "qlora": Case(merged(ADAPTERS, {"peft": {"quantize_base": "nf4"}})),
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
    if case.base is not None:
        base = dict(case.base)
        auto_class = "AutoModelForCausalLM"
        if "vision_config" in base:
            auto_class = "AutoModelForImageTextToText"
            base = llava(base["vision_config"], base["text_config"])
        list(write_base(base, directory / "base", "cpu", auto_class))
    path = directory / "recipe.yaml"
    path.write_text(json.dumps(recipe).replace("{DIRECTORY}", str(directory)))
    return path


def call(
    *words: str, num_ranks: int = 1, gib: float = 139.8, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``ckpt-train`` on the device, which has *gib* GiB of memory, with environment *variables*."""
    environment = {
        **os.environ,
        "AUTOMODEL_CKPT_TRUST": "tools",
        "NULL_CUDA_COPY": "65536",
        "NULL_CUDA_DEVICES": str(num_ranks),
        **variables,
    }
    command = [sys.executable, "-m", "tools.null_cuda", f"--gib={gib}", "--", "python"]
    command += ["-m", "automodel_ckpt.cli.train", f"--nproc-per-node={num_ranks}", *words]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=900, check=False
    )


def parts_of(report: str) -> dict[str, float]:
    """The bytes of each part of the memory in the *report* of a dry run."""
    units = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
    line = re.search(r"memory: .*? per rank: (.*)", report)
    if line is None:
        return {}
    found = re.findall(r"([a-z ]+) ([\d.]+) (B|kB|MB|GB)", line[1])
    return {name.strip(): float(number) * units[unit] for name, number, unit in found}


def compare(name: str, directory: Path, gib: float) -> tuple[str, bool]:
    """Forecast and train a case. Returns a row of the table, and whether the forecast is close.

    The run has *gib* GiB of memory.
    """
    case = CASES[name]
    path = write_recipe(case, directory)
    dry_run = call(str(path), "--dry-run", num_ranks=case.num_ranks)
    parts = parts_of(dry_run.stdout)
    if not parts:
        return f"| {name} | {_last_lines(dry_run)} |", False
    # The log of a run has the peak of rank 0 only.
    peaks = directory / "peak"
    run = call(str(path), num_ranks=case.num_ranks, gib=gib, NULL_PEAK=str(peaks))
    # Values are arbitrary on this device, also those of gradients that are copied to the host.
    if run.returncode != 0 and _NOT_FINITE not in run.stderr:
        return f"| {name} | {_last_lines(run)} |", False
    del parts["process"]
    forecast = sum(parts.values()) + WORKSPACE_BYTES
    peak = max(peak_in(file) for file in directory.glob(f"{peaks.name}.*"))
    difference = forecast / peak - 1
    is_close = abs(difference) <= TOLERANCE and "unknown" not in dry_run.stdout
    listed = ", ".join(f"{part} {nbytes / 1e9:.2f}" for part, nbytes in parts.items())
    mark = "" if is_close else " **off**"
    return (
        f"| {name} | {forecast / 1e9:.2f} GB | {peak / 1e9:.2f} GB | {difference:+.1%}{mark} | {listed} |",
        is_close,
    )


def peak_in(report: Path) -> float:
    """The bytes at the peak of a process, from its *report* of the memory that was in use then (site/)."""
    found = re.match(r"peak ([\d.]+) MB", report.read_text())
    return float(found[1]) * 1e6 if found is not None else 0.0


def _last_lines(done: subprocess.CompletedProcess[str]) -> str:
    return " / ".join((done.stdout + done.stderr).strip().splitlines()[-6:])


def main() -> int:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(prog="python -m tools.null_cuda.forecasts")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all by default")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument(
        "--gib",
        type=float,
        default=139.8,
        help="memory of the device; below the peak, the file NULL_SNAP shows what holds it",
    )
    options = parser.parse_args()
    if options.list:
        print("\n".join(CASES))
        return 0
    unknown = sorted(set(options.cases) - set(CASES))
    if unknown:
        parser.error(f"unknown cases: {', '.join(unknown)} (--list prints the names)")
    print("| case | forecast | peak | off by | parts of the forecast, GB |")
    print("|---|---:|---:|---:|---|")
    are_close = []
    for name in options.cases or CASES:
        with tempfile.TemporaryDirectory(prefix="forecasts-") as directory:
            row, is_close = compare(name, Path(directory), options.gib)
        print(row, flush=True)
        are_close.append(is_close)
    return 0 if all(are_close) else 1


if __name__ == "__main__":
    sys.exit(main())
