"""Megatron-Core: its distributed checkpoints are read here, and it loads those that are exported here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tools.interop.environments import TORCH, Environment
from tools.interop.program import Check, Program, Workplace

_HERE = Path(__file__).resolve().parent
_MAKER = _HERE.parents[1] / "tests" / "fixtures" / "megatron" / "make.py"
_SCRIPT = _HERE / "scripts" / "load_megatron.py"
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
# Type of model, what is special about it, the multiple of its vocabulary, and Megatron's tensor parallel size.
_MODELS: tuple[tuple[str, Mapping[str, Any], int, int], ...] = (
    ("llama", {"head_dim": 16}, 64, 2),
    ("mistral", {"tie_word_embeddings": True}, 1, 1),
    ("qwen2", {}, 128, 2),
    ("qwen3", {"head_dim": 16}, 64, 1),
    (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            # Megatron normalizes the weights of the chosen experts.
            "norm_topk_prob": True,
        },
        1,
        1,
    ),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 64, 1),
)
_NAMES = ("llama", "qwen3", "mixtral")


def checks(workplace: Workplace) -> Iterator[Check]:
    """Yield the checks of both directions."""
    yield from _reading(workplace)
    yield from _writing(workplace)


def _reading(workplace: Workplace) -> Iterator[Check]:
    made = workplace.directory / "made"
    made.mkdir()
    workplace.run_script(_MAKER, made)
    for name in _NAMES:
        run = workplace.directory / f"imported-{name}"
        workplace.ckpt("import", made / name, run, "--config", made / name / "expected")
        expected = json.loads((made / name / "expected" / "logits.json").read_text())
        (checkpoint,) = run.glob("epoch_*")
        logits = _logits(checkpoint / "model", expected["ids"])
        difference = (logits - torch.tensor(expected["logits"])).abs().max().item()
        text = f"logits differ by {difference:.1e}"
        yield Check(f"its {name} checkpoint is imported", text, difference < 5e-5)


def _writing(workplace: Workplace) -> Iterator[Check]:
    arguments: list[str | Path] = []
    for name, special, multiple, tensor_parallel in _MODELS:
        source = workplace.directory / name
        _write_model(name, special, source)
        exported = workplace.directory / f"{name}-megatron"
        workplace.ckpt(
            *("export", source, "--to", "megatron", "-o", exported),
            *("--vocabulary-multiple", str(multiple)),
        )
        padded = -(-_VOCAB_SIZE // multiple) * multiple
        arguments += [source / "config.json", exported / "release", str(padded)]
        arguments.append(str(tensor_parallel))
    report = workplace.directory / "report.json"
    workplace.run_script(_SCRIPT, _MAKER, _PORT, report, *arguments)
    found: dict[str, Any] = {}
    for ranks in (1, 2):
        found |= json.loads(Path(f"{report}.{ranks}").read_text())
    for name, _, _, tensor_parallel in _MODELS:
        logits = torch.tensor(found[str(workplace.directory / f"{name}-megatron" / "release")])
        expected = _logits(workplace.directory / name, _IDS)
        difference = (logits - expected).abs().max().item()
        ranks_text = "1 rank" if tensor_parallel == 1 else f"{tensor_parallel} ranks"
        text = f"logits differ by {difference:.1e}"
        yield Check(f"GPTModel loads an exported {name} ({ranks_text})", text, difference < 5e-5)


def _write_model(name: str, special: Mapping[str, Any], directory: Path) -> None:
    torch.manual_seed(3)
    config = AutoConfig.for_model(name, **{**_SIZES, **special})
    build: Any = AutoModelForCausalLM.from_config
    model = build(config)
    for parameter_name, parameter in model.named_parameters():
        # Biases are zeros and norms are ones, which any order of them would equal.
        if parameter_name.endswith("bias") or "norm" in parameter_name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(directory)


def _logits(directory: Path, ids: list[int]) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(torch.tensor([ids])).logits[0]
    return logits


PROGRAM = Program(
    name="Megatron-Core",
    environment=Environment(
        "megatron",
        first=(TORCH, "megatron-core==0.16.0", "transformers>=5.17,<6", "psutil", "packaging"),
    ),
    packages=("megatron-core", "torch"),
    checks=checks,
)
