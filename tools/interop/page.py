"""docs/clients.md: one row for each program that reads our files, or writes files that are read here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.interop.program import Check

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
_COLUMNS = "| program | versions | date | compared | passed |\n|---|---|---|---|---|\n"
_COMPARED = {
    "DeepSpeed": "weights of stages 1, 2 and 3 and of universal checkpoints, bit-equal",
    "llama.cpp": "10 architectures and 4 pre-tokenizers in F32, three architectures in five quantizations: "
    "tokenization, log probabilities, greedy tokens",
    "Megatron-Core": "logits of imported and exported models of six architectures, differences below 2e-5",
    "NeMo": "tensors of `.nemo` archives and directories, bit-equal; `restore_from` reads exports",
    "NeMo AutoModel": "weights and moments, bit-equal; its run continues here on 1 and 2 ranks to the same losses; it "
    "reads and consolidates our shards",
    "NVIDIA ModelOpt": "its checkpoints of 1, 2 and 4 ranks are read, and written equally",
    "onnxruntime": "logits of five architectures in three shapes, differences below 3e-4",
    "PyTorch Lightning": "runs continue in both directions; our callback resumes after kill -9 to equal losses",
    "TensorFlow": "variables of three checkpoints, bit-equal",
    "torch (FSDP)": "weights and moments, bit-equal; runs continue here on 1 and 2 ranks to the same losses",
    "torchtitan": "logits of imported and exported models, differences below 2e-6",
    "transformers Trainer": "full and LoRA runs continue here with DDP and FSDP2, and there, to the same losses",
    "vLLM": "log probabilities of exports in bfloat16, FP8_DYNAMIC, W8A8 and W4A16",
}


def replace_row(program: str, version: str, date: str, checks: Sequence[Check]) -> None:
    """Replace the row of *program* in the table of the page; other rows stay."""
    text, _, table = PAGE.read_text().partition(_COLUMNS)
    rows = [line for line in table.splitlines() if not line.startswith(f"| {program} |")]
    passed = f"{sum(check.good for check in checks)} of {len(checks)}"
    failed = "".join(f"; **failed: {one.what}: {one.found}**" for one in checks if not one.good)
    cells = [program, version, date, _COMPARED.get(program, ""), passed + failed]
    rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    rows.sort(key=lambda row: row.split(" | ")[0].lower())
    PAGE.write_text(text + _COLUMNS + "\n".join(rows) + "\n")
