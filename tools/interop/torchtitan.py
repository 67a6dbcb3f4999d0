"""torchtitan: what its CheckpointManager saves is read here, and it loads what is exported here (Llama 3, CPU)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tools.interop.environments import TORCH, Environment
from tools.interop.program import Check, Program, Workplace

_HERE = Path(__file__).resolve().parent
_MAKER = _HERE.parents[1] / "tests" / "fixtures" / "torchtitan" / "make.py"
_SCRIPT = _HERE / "scripts" / "load_torchtitan.py"
_TOLERANCE = 2e-5


def checks(workplace: Workplace) -> Iterator[Check]:
    """Yield the checks of both directions."""
    made = workplace.directory / "made"
    workplace.run_script(_MAKER, made, "--plain")
    run = workplace.directory / "imported"
    workplace.ckpt(
        *("import", made / "checkpoint" / "step-3", run),
        *("--config", made / "config"),
    )
    model = run / "epoch_0_step_3" / "model"
    yield _logits_check(
        "its checkpoint of Llama 3 is imported",
        model,
        json.loads((made / "logits.json").read_text()),
    )
    yield from _loading(workplace, made / "config" / "config.json")


def _loading(workplace: Workplace, config: Path) -> Iterator[Check]:
    arguments: list[str | Path] = []
    models: dict[str, Path] = {}
    for name in ("untied", "tied"):
        source = workplace.directory / name
        _write_model(config, source, tied=name == "tied")
        exported = workplace.directory / f"{name}-dcp"
        workplace.ckpt("export", source, "--to", "dcp", "--names", "torchtitan", "-o", exported)
        arguments += [name, exported]
        models[str(exported)] = source
    report = workplace.directory / "report.json"
    workplace.run_script(_SCRIPT, _MAKER, workplace.directory / "runs", report, *arguments)
    found = json.loads(report.read_text())
    for exported_path, source in models.items():
        what = f"CheckpointManager loads an exported Llama ({source.name} output layer)"
        yield _logits_check(what, source, found[exported_path])


def _write_model(config: Path, directory: Path, *, tied: bool) -> None:
    torch.manual_seed(4)
    content = json.loads(config.read_text()) | {"tie_word_embeddings": tied}
    build: Any = AutoModelForCausalLM.from_config
    model = build(AutoConfig.for_model(**content))
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.8, 0.8)
    model.save_pretrained(directory)


def _logits_check(what: str, directory: Path, expected: dict[str, Any]) -> Check:
    """Compare the logits of transformers' Llama with *expected*, those of torchtitan's."""
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(directory, dtype=torch.float32)
    ids = torch.tensor([expected["ids"]])
    with torch.no_grad():
        logits = model.eval()(ids).logits[0]
    difference = (logits - torch.tensor(expected["logits"])).abs().max().item()
    return Check(what, f"logits differ by {difference:.1e}", difference < _TOLERANCE)


PROGRAM = Program(
    name="torchtitan",
    environment=Environment(
        "torchtitan",
        first=[TORCH],
        loose=["torchtitan==0.3.0", "spmd_types==0.2.3", "triton==3.9.0"],
        then=[
            "torchdata==0.11.0",
            "datasets>=3.6,<4.8",
            "tyro",
            "tokenizers",
            "safetensors",
            "tensorboard",
        ],
    ),
    packages=("torchtitan", "torch"),
    checks=checks,
)
