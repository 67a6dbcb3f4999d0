"""Compare the estimates of `ckpt-train --dry-run` with training: memory of a rank, bytes of a checkpoint.

    python -m tools.bench.forecast               # all cases, about ten minutes on two cores
    python -m tools.bench.forecast vlm lora      # some of them

Prints a table in Markdown. The exit code is 1 if an estimate of memory is wrong by more than a quarter, or one of a
checkpoint by more than a tenth.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT, ADAPTERS, IMAGES, SUMMARIES = (
    str(ROOT / "examples" / name)
    for name in (
        "llm_finetune/tiny_llama_python_docs.yaml",
        "llm_finetune/tiny_llama_lora.yaml",
        "vlm_finetune/tiny_digits.yaml",
        "seq2seq/tiny_summaries.yaml",
    )
)
_TEXT_SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}
_IMAGE_SIZES = {
    "text_config.hidden_size": 384,
    "text_config.intermediate_size": 1024,
    "text_config.num_hidden_layers": 6,
    "vision_config.hidden_size": 256,
    "vision_config.num_hidden_layers": 4,
}
_BART = (
    "{model_type: bart, d_model: 512, encoder_layers: 4, decoder_layers: 4, encoder_attention_heads: 8,"
    " decoder_attention_heads: 8, encoder_ffn_dim: 2048, decoder_ffn_dim: 2048, max_position_embeddings: 256}"
)
_T5 = "{model_type: t5, d_model: 512, d_kv: 64, d_ff: 2048, num_layers: 4, num_heads: 8}"
LARGER = [
    *(f"--model.from_config.{k}={v}" for k, v in _TEXT_SIZES.items()),
    "--tokenizer.vocab_size=4096",
]
LARGER_IMAGES = [
    *(f"--model.from_config.{k}={v}" for k, v in _IMAGE_SIZES.items()),
    "--step_scheduler.local_batch_size=8",
]
# Most texts are longer, so that rows are full.
LARGER_SUMMARIES = [
    "--tokenizer.vocab_size=4096",
    "--dataset.seq_length=24",
    "--dataset.target_length=12",
    "--step_scheduler.local_batch_size=64",
    "--step_scheduler.global_batch_size=128",
]
TWO = ["--nproc-per-node=2"]
SHORT = [
    "--step_scheduler.max_steps=3",
    "--validation_dataset=null",
    "--checkpoint.save_consolidated=false",
]
CASES = {
    "tiny": [TEXT],
    "full": [TEXT, *LARGER],
    "sgd": [
        TEXT,
        *LARGER,
        "--optimizer._target_=torch.optim.SGD",
        "--optimizer.lr=0.01",
        "--optimizer.weight_decay=0",
    ],
    "bf16": [TEXT, *LARGER, "--model.dtype=bfloat16"],
    "checkpointed": [TEXT, *LARGER, "--model.activation_checkpointing=true"],
    "fsdp2": [*TWO, TEXT, *LARGER],
    "ddp": [*TWO, TEXT, *LARGER, "--distributed.strategy=ddp"],
    "tp": [*TWO, TEXT, *LARGER, "--distributed.tp_size=2"],
    "lora": [ADAPTERS, *LARGER],
    "vlm": [IMAGES, *LARGER_IMAGES],
    "bart": [SUMMARIES, f"--model.from_config={_BART}", *LARGER_SUMMARIES],
    "t5": [SUMMARIES, f"--model.from_config={_T5}", *LARGER_SUMMARIES],
    "vlm-fsdp2": [*TWO, IMAGES, *LARGER_IMAGES],
}
UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def measure(words: Sequence[str]) -> tuple[list[float], list[float]]:
    """(foretold, measured) bytes, each of a rank's memory and of a checkpoint."""
    with tempfile.TemporaryDirectory(prefix="bench-forecast-") as place:
        extra = [f"--peft.base_dir={place}/base"] if ADAPTERS in words else []
        command = [*words, *SHORT, *extra, f"--checkpoint.checkpoint_dir={place}/run"]
        report = train(*command, "--dry-run")
        train(*command)
        lines = [
            json.loads(line)
            for line in Path(place, "run", "training.jsonl").read_text().splitlines()
        ]
    foretold = [
        foretold_bytes(pattern, report)
        for pattern in (r"about SIZE per rank", r"checkpoints: +SIZE each")
    ]
    saved = [line["bytes"] for line in lines if line.get("event") == "save"]
    return foretold, [max(line.get("mem", 0) for line in lines), saved[-1]]


def foretold_bytes(pattern: str, report: str) -> float:
    found = re.search(pattern.replace("SIZE", r"([\d.]+) (\w+)"), report)
    if found is None:
        sys.exit(f"the dry run does not say {pattern}:\n{report}")
    return float(found[1]) * UNITS[found[2]]


def train(*words: str) -> str:
    command = [sys.executable, "-m", "automodel_ckpt.cli.train", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def main(names: Sequence[str]) -> int:
    """Print a row for each case."""
    print(
        "| | memory of a rank, foretold | measured | off by | checkpoint, foretold | written | off by |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    is_off = False
    for name in names or CASES:
        foretold, measured = measure(CASES[name])
        errors = [a / b - 1 for a, b in zip(foretold, measured, strict=True)]
        is_off |= abs(errors[0]) > 0.25 or abs(errors[1]) > 0.1
        memory, size = (
            [f"{b / 1e6:.0f} MB" for b in pair] for pair in zip(foretold, measured, strict=True)
        )
        cells = [name, *memory, f"{errors[0]:+.0%}", *size, f"{errors[1]:+.1%}"]
        print("| " + " | ".join(cells) + " |", flush=True)
    return int(is_off)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
