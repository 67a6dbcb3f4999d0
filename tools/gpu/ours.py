"""Training with this program, as ckpt-train trains: a recipe file, run by the command's own function."""

import copy
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.gpu.session import Figures, PartRun
from tools.gpu.shapes import Work

LORA = {"peft": {"r": 16, "alpha": 32}}
"""The section of README's recipe for adapters on all linear layers."""


def recipe_of(work: Work, base: Path, directory: Path) -> dict[str, Any]:
    """A recipe that trains the model in *base* on random tokens, with the defaults of all keys that measure nothing."""
    rows_per_step = work.batch * work.accumulation
    num_steps = work.warm_up + work.steps
    return {
        "recipe": "tools.gpu.timed.TimedLLM",
        "model": {"from_pretrained": str(base)},
        "tokenizer": None,
        "dataset": {
            "_target_": "automodel_ckpt.examples.data.mock.random_tokens",
            "num_samples": rows_per_step * num_steps,
            "seq_length": work.length,
            "vocab_size": work.config["vocab_size"],
        },
        "step_scheduler": {
            "global_batch_size": rows_per_step,
            "local_batch_size": work.batch,
            "max_steps": num_steps,
            "ckpt_every_epochs": None,
        },
        "checkpoint": {"enabled": False, "checkpoint_dir": str(directory)},
        "logging": {"log_every_seconds": 1},
    }


def compiled(device: str) -> dict[str, Any]:
    """The section that compiles layers; without a GPU by a backend that needs no compiler."""
    section: dict[str, Any] = {"enabled": True}
    if device != "cuda":
        section["backend"] = "aot_eager"
    return {"compile": section}


def merged(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of *recipe* with the values of *changes*; sections are combined, and a section of None removes nothing."""
    result = copy.deepcopy(dict(recipe))
    for name, value in changes.items():
        if isinstance(value, Mapping) and isinstance(result.get(name), dict):
            result[name] = merged(result[name], value)
        else:
            result[name] = copy.deepcopy(value)
    return result


def train(recipe: Mapping[str, Any], directory: Path, *flags: str) -> int:
    """Run a recipe in this process as ``ckpt-train`` does; returns its exit code. The file is JSON, which is YAML."""
    from automodel_ckpt.cli.train import main

    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "recipe.yaml"
    path.write_text(json.dumps(recipe, indent=1))
    return main([str(path), "--trust", "tools", *flags])


def forecast_bytes(directory: Path) -> int:
    """The memory that ``--dry-run`` forecasts on this machine for the recipe that :func:`train` wrote."""
    from automodel_ckpt.config.callables.prepare import prepare
    from automodel_ckpt.config.callables.trust import Trust
    from automodel_ckpt.config.load import load_recipe
    from automodel_ckpt.parallel.mesh_sizes import Sizes
    from automodel_ckpt.training.forecast.plan import plan

    loaded = load_recipe(str(directory / "recipe.yaml"), [], problems=[])
    loaded, recipe_class = prepare(loaded, Trust(["tools"]))
    recipe: Any = recipe_class(loaded.config, config_yaml=loaded.to_yaml())
    return plan(recipe, Sizes()).memory.total


def run_case(
    part: PartRun,
    name: str,
    work: Work,
    base: Path,
    changes: Mapping[str, Any],
    flops: float = 0.0,
    *,
    forecasts: bool = False,
    limit: float = 150,
) -> None:
    directory = part.session.scratch / part.name
    recipe = merged(recipe_of(work, base, directory), changes)
    arguments = (name, recipe, directory, work.warm_up, flops, forecasts)
    part.measure(name, measure, *arguments, limit=limit)


def measure(
    name: str,
    recipe: Mapping[str, Any],
    directory: Path,
    warm_up: int,
    flops_per_token: float,
    forecasts: bool = False,
) -> Figures:
    """Train, and yield the speed of the counted steps with the memory's peak and the seconds before the first step.

    With *forecasts*, also how far the forecast of the memory is from what the GPU needed, relative to that.
    """
    from tools.gpu.timed import CLOCK

    CLOCK.start(warm_up)
    started = time.perf_counter()
    code = train(recipe, directory)
    if code != 0:
        raise RuntimeError(f"ckpt-train ended with {code}")
    figures = CLOCK.figures()
    figures["seconds_before_first_step_ended"] = CLOCK.ends[0] - started
    figures = with_rates(figures, flops_per_token)
    yield name, figures
    if forecasts:
        figures["forecast_bytes"] = forecast_bytes(directory)
        if figures["device_bytes"]:
            figures["forecast_difference"] = figures["forecast_bytes"] / figures["device_bytes"] - 1
        yield name, figures


def with_rates(figures: dict[str, Any], flops_per_token: float) -> dict[str, Any]:
    """Figures with the floating-point operations per second."""
    rate = figures["tokens_per_second"] * flops_per_token
    return {**figures, "tflops": rate / 1e12, "flops_per_token": flops_per_token}
