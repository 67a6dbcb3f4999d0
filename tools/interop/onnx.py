"""onnxruntime: models that are exported here give the logits of transformers, for any batch and length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tools.interop.environments import TORCH, Environment
from tools.interop.gguf_models import MODELS
from tools.interop.program import Check, Program, Workplace

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = Path(__file__).resolve().parent / "scripts" / "onnx_logits.py"
_NAMES = ("Llama 2", "Mistral", "Qwen 2, tied", "Qwen 3", "Gemma 3")
_MAX_ERROR = 1e-3


def checks(place: Workplace) -> Iterator[Check]:
    """Export in the environment, which has torch's exporter, and compare there."""
    for name in _NAMES:
        (model,) = [model for model in MODELS if model.name == name]
        directory = place.directory / name.replace(",", "").replace(" ", "-").lower()
        source = model.save(directory)
        output = directory.with_name(f"{directory.name}-onnx")
        export = ("-m", "automodel_ckpt.cli.ckpt", "export", source, "--to", "onnx", "-o", output)
        place.run([place.python, *export])
        result = directory.with_name(f"{directory.name}.json")
        place.run_script(_SCRIPT, source, output, result)
        for shape, error in json.loads(result.read_text()):
            what = f"{name}: largest error of logits, batch and length {tuple(shape)}"
            yield Check(what, f"{error:.1e}", error < _MAX_ERROR)
    source = place.directory / "qwen-3"
    result = place.directory / "external.json"
    place.run_script(_SCRIPT, source, place.directory / "external", result, "--external-data")
    (found,) = json.loads(result.read_text())
    yield Check(
        "Qwen 3, weights in model.onnx.data: largest error", f"{found:.1e}", found < _MAX_ERROR
    )


PROGRAM = Program(
    name="onnxruntime",
    environment=Environment(
        "onnx",
        first=[TORCH],
        then=[
            "transformers==5.23.0",
            "onnx==1.23.2",
            "onnxscript==0.7.2",
            "onnxruntime==1.32.0",
            "xxhash",
            "omegaconf",
            "safetensors",
            "jinja2",
        ],
    ),
    packages=("onnxruntime", "onnxscript", "torch"),
    checks=checks,
    variables={"PYTHONPATH": str(_ROOT)},
)
