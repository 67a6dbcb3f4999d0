"""Losses of several ranks, each with a GPU, against one process of plain torch on the CPU.

Without GPUs, tests/distributed has the same with gloo. These tests show that the collectives of each strategy work with
NCCL and tensors of a GPU.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_losses import base_of, reference
from tests.support.gpu import ALL_ON_CPU
from tests.support.runs import plain
from tests.support.servers.command_server import CommandServer
from tools.gpu import ours
from tools.support import step_lines


@dataclass(frozen=True)
class Case:
    """Changes of the small recipe, and settings of its model beside those of plain.SMALL."""

    distributed: Mapping[str, Any]
    num_ranks: int = 2
    changes: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


EXPERTS = {"model_type": "mixtral", "num_local_experts": 4}
FOUR_LAYERS = {"num_hidden_layers": 4}
CASES = {
    "ddp": Case({"strategy": "ddp"}),
    "fsdp2": Case({"strategy": "fsdp2"}),
    "fsdp2, four ranks": Case({"strategy": "fsdp2"}, num_ranks=4),
    "fsdp2, reduced per step": Case({"strategy": "fsdp2", "defer_gradient_sync": True}),
    "fsdp2, replicated": Case({"strategy": "fsdp2", "dp_replicate_size": 2}, num_ranks=4),
    "fsdp2, experts": Case({"strategy": "fsdp2"}, settings=EXPERTS),
    "expert parallel": Case({"ep_size": 2}, settings=EXPERTS),
    "tensor parallel": Case({"tp_size": 2}),
    "tensor and sequence parallel": Case({"tp_size": 2, "sequence_parallel": True}),
    "tensor parallel, fsdp2": Case({"tp_size": 2}, num_ranks=4),
    "context parallel": Case({"cp_size": 2}),
    "context parallel, fsdp2": Case({"cp_size": 2}, num_ranks=4),
    "pipeline": Case({"pp_size": 2}),
    "pipeline, fsdp2": Case({"pp_size": 2, "strategy": "fsdp2"}, num_ranks=4),
    "full checkpointing": Case(
        {"strategy": "fsdp2"}, changes={"model": {"activation_checkpointing": "full"}}
    ),
}


def needs(num_ranks: int) -> pytest.MarkDecorator:
    """Skip a test where there are fewer GPUs than ranks."""
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks
    return pytest.mark.skipif(
        not has_gpus and not ALL_ON_CPU, reason=f"this machine has fewer than {num_ranks} GPUs"
    )


def recipe_of(case: Case, base: Path, directory: Path) -> dict[str, Any]:
    """The small recipe in float32 with the changes of *case*; rows have two samples in two micro-batches."""
    recipe = ours.merged(plain.recipe(base, directory), plain.exact())
    changes = {"distributed": dict(case.distributed), "step_scheduler": {"local_batch_size": 1}}
    return ours.merged(ours.merged(recipe, changes), dict(case.changes))


def train(
    commands: CommandServer, recipe: Mapping[str, Any], directory: Path, *words: str
) -> list[float]:
    """Run a recipe; returns the losses of its steps, those of earlier starts included."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    done = commands.run("ckpt-train", str(path), *words, env=dict(os.environ), timeout=280)
    assert done.returncode == 0, done.stderr
    if torch.cuda.is_available():
        assert "/gpu)" in done.stderr
    return plain.logged_losses(directory)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(case.num_ranks)) for name, case in CASES.items()]
)
def test_losses_of_ranks_equal_those_of_one_process(
    bases: Path, tmp_path: Path, commands: CommandServer, name: str
) -> None:
    case = CASES[name]
    base = base_of(bases, json.dumps(dict(case.settings)))
    recipe = recipe_of(case, base, tmp_path / "run")
    found = train(commands, recipe, tmp_path / "run", f"--nproc-per-node={case.num_ranks}")
    assert plain.difference(found, reference(base, packed=False)) < 2e-5


@needs(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_resume_bit_for_bit_also_in_bfloat16(
    bases: Path, tmp_path: Path, commands: CommandServer, strategy: str
) -> None:
    base = base_of(bases, "{}")
    changes = {"distributed": {"strategy": strategy}, "step_scheduler": {"local_batch_size": 1}}
    changes["checkpoint"] = {"is_async": True}
    two = "--nproc-per-node=2"
    for name in ("whole", "resumed"):
        recipe = ours.merged(plain.recipe(base, tmp_path / name), changes)
        if name == "resumed":
            train(commands, recipe, tmp_path / name, two, "--step_scheduler.max_steps=2")
        train(commands, recipe, tmp_path / name, two)
    steps = []
    for name in ("whole", "resumed"):
        lines = step_lines(tmp_path / name / "training.jsonl")
        steps.append([(line["step"], line["loss"], line["grad_norm"]) for line in lines])
    assert steps[0] == steps[1]
    assert [step for step, _, _ in steps[0]] == list(range(1, plain.NUM_STEPS + 1))
