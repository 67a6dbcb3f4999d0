"""Megatron-Core: its distributed checkpoints are read here, and it loads those that are exported here."""

import json
from collections.abc import Iterator
from typing import Any

import torch

from tools.interop.program import Check, Workplace, build_model, logits_check, logits_of
from tools.support import ROOT

_MAKER = ROOT / "tests" / "fixtures" / "megatron" / "make.py"
_PORT = "29720"
_IDS = list(range(1, 13))
_VOCAB_SIZE = 61
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
# Megatron normalizes the weights of the chosen experts.
_NORMALIZED = {"head_dim": 16, "norm_topk_prob": True}
# Type of model, what is special about it, the multiple of its vocabulary, and Megatron's tensor parallel size.
_MODELS: tuple[tuple[str, dict[str, Any], int, int], ...] = (
    ("llama", {"head_dim": 16}, 64, 2),
    ("mistral", {"tie_word_embeddings": True}, 1, 1),
    ("qwen2", {}, 128, 2),
    ("qwen3", {"head_dim": 16}, 64, 1),
    ("qwen3_moe", {**_EXPERTS, **_NORMALIZED}, 1, 1),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 64, 1),
)
_TOLERANCE = 5e-5


def checks(workplace: Workplace) -> Iterator[Check]:
    made = workplace.made("megatron/make.py")
    for name in ("llama", "qwen3", "mixtral"):
        run, expected = workplace.directory / f"imported-{name}", made / name / "expected"
        workplace.ckpt("import", made / name, run, "--config", expected)
        theirs = json.loads((expected / "logits.json").read_text())
        (checkpoint,) = run.glob("epoch_*")
        found = logits_of(checkpoint / "model", theirs["ids"], "eager")
        what = f"its {name} checkpoint is imported"
        yield logits_check(what, found, theirs["logits"], _TOLERANCE)
    arguments: list[str] = []
    for name, special, multiple, tensor_parallel in _MODELS:
        source, exported = workplace.directory / name, workplace.directory / f"{name}-megatron"
        model = build_model(3, name, **{**_SIZES, **special})
        for parameter_name, parameter in model.named_parameters():
            # Biases are zeros and norms are ones, which any order of them would equal.
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        model.save_pretrained(source)
        padding = ("--vocabulary-multiple", str(multiple))
        workplace.ckpt("export", source, "--to", "megatron", "-o", exported, *padding)
        padded = -(-_VOCAB_SIZE // multiple) * multiple
        arguments += [str(source / "config.json"), str(exported / "release")]
        arguments += [str(padded), str(tensor_parallel)]
    report = workplace.report("load_megatron.py", _MAKER, _PORT, *arguments)
    for name, _, _, tensor_parallel in _MODELS:
        found = report[str(workplace.directory / f"{name}-megatron" / "release")]
        what = f"GPTModel loads an exported {name} ({tensor_parallel} rank(s))"
        ours = logits_of(workplace.directory / name, _IDS, "eager")
        yield logits_check(what, found, ours, _TOLERANCE)
