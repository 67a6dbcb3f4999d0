"""NeMo: its .nemo files are read and unpacked here, and it restores those that are exported and packed here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from automodel_ckpt.checkpoint.tensors.difference import StoredTensors, compare
from automodel_ckpt.convert.open import open_source
from automodel_ckpt.examples.data.python_docs import train_tokenizer
from tools.interop.environments import TORCH, Environment
from tools.interop.program import Check, Program, Workplace

_HERE = Path(__file__).resolve().parent
_MAKER = _HERE.parents[1] / "tests" / "fixtures" / "nemo" / "make.py"
_PREFIX = "llm."


def checks(workplace: Workplace) -> Iterator[Check]:
    """Yield the checks of both directions."""
    yield from _reading(workplace)
    yield from _writing(workplace)


def _reading(workplace: Workplace) -> Iterator[Check]:
    made = workplace.directory / "made"
    made.mkdir()
    workplace.run_script(_MAKER, made)
    state = made / "state.safetensors"
    for name in ("model.nemo", "unpacked"):
        yield Check(f"its {name} is read", *_compared(made / name, state))
    yield Check("its gzip archive is read", *_compared(made / "gzip.nemo", state))
    unpacked = made / "from_gzip"
    workplace.ckpt("unpack", made / "gzip.nemo", unpacked)
    yield Check("its gzip archive is unpacked", *_compared(unpacked, state))


def _writing(workplace: Workplace) -> Iterator[Check]:
    source = workplace.directory / "llama"
    logits = _write_llama(source)
    expected = workplace.directory / "expected.safetensors"
    save_file(load_file(source / "model.safetensors"), expected)
    exported = workplace.directory / "exported.nemo"
    workplace.ckpt("export", source, "--to", "nemo", "-o", exported, "--prefix", _PREFIX)
    yield from _restored(workplace, exported, expected, logits, "an exported Llama")
    # NeMo saves the model that it restored. That file is unpacked, edited and packed here.
    again = workplace.directory / "exported.nemo.again.nemo"
    directory = workplace.directory / "edited"
    workplace.ckpt("unpack", again, directory)
    config = directory / "model_config.yaml"
    # NeMo adds the class of this script, which it cannot import: restore_from then uses its own class.
    lines = [line for line in config.read_text().splitlines() if not line.startswith("target:")]
    config.write_text("\n".join([*lines, "edited: true"]) + "\n")
    packed = workplace.directory / "edited.nemo"
    workplace.ckpt("pack", directory, packed)
    yield from _restored(workplace, packed, expected, logits, "its own file, edited and packed")


def _restored(
    workplace: Workplace, path: Path, expected: Path, logits: torch.Tensor, what: str
) -> Iterator[Check]:
    report = workplace.directory / "report.json"
    report.unlink(missing_ok=True)
    workplace.run_script(_HERE / "scripts" / "restore_nemo.py", path, _PREFIX, expected, report)
    found: dict[str, Any] = json.loads(report.read_text())
    found_logits = torch.tensor(found["logits"])
    difference = (found_logits - logits.flatten()).abs().max().item()
    are_equal, num_artifacts = found["equal"], found["artifacts"]
    weights = "bit-equal" if are_equal else "different"
    text = f"weights {weights}, logits differ by {difference:.1e}, {num_artifacts} artifacts"
    is_good = are_equal and difference < 1e-5 and num_artifacts >= 2
    yield Check(f"restore_from reads {what}", text, is_good)


def _write_llama(directory: Path) -> torch.Tensor:
    """Write a tiny Llama with a tokenizer; return its logits for eight tokens, of shape [1, 8, vocabulary]."""
    tokenizer = train_tokenizer(300)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(8).unsqueeze(0)).logits
    return logits


def _compared(path: Path, expected: Path) -> tuple[str, bool]:
    found, wanted = open_source(path), open_source(expected)
    difference = compare(
        StoredTensors(found.root, found.tensors), StoredTensors(wanted.root, wanted.tensors)
    )
    num_equal = difference.num_equal
    good = num_equal == len(found.tensors) == len(wanted.tensors)
    return f"{num_equal} of {len(wanted.tensors)} tensors bit-equal", good


PROGRAM = Program(
    name="NeMo",
    environment=Environment(
        "nemo",
        first=(TORCH, "numpy", "safetensors", "pyyaml", "transformers>=5.17,<6"),
        loose=("nemo-toolkit==3.0.0",),
        then=(
            TORCH,
            "hydra-core",
            "lightning==2.4.0",
            "omegaconf==2.3.0",
            "wrapt",
            "huggingface_hub",
            "text-unidecode",
            "ruamel.yaml",
            "smart-open",
            "fsspec",
            "webdataset",
            "onnx",
            "nv-one-logger-core",
            "nv-one-logger-training-telemetry",
            "nv-one-logger-pytorch-lightning-integration",
        ),
    ),
    packages=("nemo-toolkit", "torch"),
    checks=checks,
)
