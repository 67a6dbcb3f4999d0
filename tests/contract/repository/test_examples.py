"""Every recipe that comes with the package does what it says; those of the Hub on small models of the same family."""

import json
import math
import re
import shlex
import subprocess
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from automodel_ckpt.cli.ckpt import main as run_ckpt
from automodel_ckpt.cli.train import main
from tests.support import ranks
from tests.support.models.stand_ins import (
    write_stand_ins,
    write_trainer_checkpoint,
)
from tests.support.runs.training import EXPORT, train
from tools.support import step_lines

DIRECTORY = Path(__file__).parents[3] / "examples"
SHIPPED = {
    path.relative_to(DIRECTORY).with_suffix("").as_posix(): path
    for path in sorted(DIRECTORY.rglob("*.yaml"))
    if path.parts[-2] not in ("kubernetes", "skypilot", "slurm")
}
HUB = {
    name: path
    for name, path in SHIPPED.items()
    if re.search(r"from_pretrained: (?!output/)[\w-]+/\w", path.read_text())
}
TP = "llm_finetune/qwen3/qwen3_8b_chat_fsdp2_tp"
EP = "llm_finetune/olmoe/olmoe_1b_7b_chat_ep"
VLM = "vlm_finetune/qwen2_5_vl/qwen2_5_vl_3b_packed_peft"
FIRST = [VLM]
"""The others are trained by `make test-all`."""
SMALLER = {  # what a few steps on two cores ask to be changed
    "llm_finetune/smollm2/smollm2_360m_stories_packed": [
        "--packed_sequence.size=160",
        "--step_scheduler.global_batch_size=8",
        "--step_scheduler.local_batch_size=4",
    ],
    TP: ["--step_scheduler.global_batch_size=4"],
    "preference/qwen3_0_6b_dpo_peft": ["--step_scheduler.global_batch_size=4"],
    EP: ["--distributed.ep_size=2", "--step_scheduler.global_batch_size=4"],
    "llm_finetune/qwen3/qwen3_8b_chat_qlora_peft": [
        "--step_scheduler.global_batch_size=8",
    ],
    "llm_finetune/qwen3/qwen3_4b_chat_peft": ["--step_scheduler.global_batch_size=4"],
    "llm_finetune/qwen3/qwen3_4b_function_calls_peft": ["--step_scheduler.global_batch_size=4"],
    "llm_finetune/qwen3/qwen3_4b_long_packed": [
        "--dataset.seq_length=160",
        "--validation_dataset.seq_length=160",
        "--packed_sequence.size=160",
        "--step_scheduler.global_batch_size=4",
    ],
    VLM: [
        "--packed_sequence.size=160",
        "--step_scheduler.global_batch_size=4",
        "--processor.kwargs={max_pixels: 1024}",
        "--dataloader.num_workers=1",
    ],
}
TRAINER = "llm_finetune/qwen3/qwen3_0_6b_continue_trainer"
RANKS = {TP: 2, EP: 2}
FAMILIES = {
    "llama3_2": "llama",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
    "olmoe": "olmoe",
    "smollm2": "llama",
    "qwen2_5_vl": "qwen2_5_vl",
}


def family_of(name: str) -> str:
    """The model type of the model in a recipe of the Hub, by the beginning of the file's name."""
    [family] = [FAMILIES[known] for known in FAMILIES if HUB[name].stem.startswith(known)]
    return family


@pytest.mark.parametrize("name", SHIPPED)
def test_each_command_line_that_an_example_shows_is_understood(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(SHIPPED[name].parents[len(Path(name).parts)].resolve())
    head = SHIPPED[name].read_text().split("\n\n")[0]
    commands = [
        line.split("ckpt-train ")[1] for line in head.splitlines() if "  ckpt-train " in line
    ]
    shown = [
        re.split(r" {2,}", line[4:])[0] for line in head.splitlines() if line.startswith("#   --")
    ]
    assert len(commands) == 1
    assert len(shown) >= 2
    for words in ["", *shown]:
        assert main([*shlex.split(f"{commands[0]} {words}"), "--print-config"]) == 0, (
            capsys.readouterr().err
        )


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.further) for name in HUB]
)
def test_a_recipe_for_a_model_of_the_hub_trains_one_of_its_family(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, *_ = write_stand_ins(tmp_path, HUB[name].read_text())
    overrides = (
        "--step_scheduler.max_steps=2",
        "--checkpoint.checkpoint_dir=run",
        EXPORT,
        *SMALLER.get(name, ()),
    )
    [recipe_name] = re.findall(r"^recipe: (\w+)$", HUB[name].read_text(), re.MULTILINE)
    ranks.run(partial(train, HUB[name], *overrides), RANKS.get(name, 1), init=False)
    losses = [record["loss"] for record in step_lines(Path("run/training.jsonl"))]
    assert len(losses) == 2
    assert all(0 < loss < 2 * math.log(300) for loss in losses)
    assert json.loads(Path("run/LATEST/losses.json").read_text())["val_loss"] > 0
    export = Path("run/LATEST/model" if "peft" in name else "run/LATEST/model/consolidated")
    loader = AutoModelForImageTextToText if recipe_name == "vlm_finetune" else AutoModelForCausalLM
    trained = loader.from_pretrained(export)
    assert trained.config.model_type == family_of(name)
    assert (
        AutoTokenizer.from_pretrained(export).chat_template
        == AutoTokenizer.from_pretrained(model).chat_template
    )


def test_the_recipe_that_resumes_a_run_of_the_trainer_continues_after_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = SHIPPED[TRAINER]
    write_stand_ins(tmp_path, recipe.read_text())
    write_trainer_checkpoint(Path("output/checkpoint-500"), 500)
    (command,) = re.findall(r"^#   ckpt (import .*)$", recipe.read_text(), re.MULTILINE)
    assert run_ckpt(shlex.split(command)) == 0, capsys.readouterr().err
    overrides = ("--step_scheduler.max_steps=502", "--step_scheduler.num_epochs=1000")
    smaller = ("--step_scheduler.global_batch_size=4", EXPORT)
    ranks.run(partial(train, recipe, *overrides, *smaller), 1, init=False)
    run = Path("checkpoints/qwen3_0_6b_continue_trainer")
    assert [record["step"] for record in step_lines(run / "training.jsonl")] == [501, 502]
    AutoModelForCausalLM.from_pretrained(run / "LATEST/model/consolidated")


# Slurm


def run_batch_script(directory: Path, code: int, *words: str) -> tuple[int, list[str]]:
    """The batch script beside an `srun` that ends with *code*; its exit code, and what it called."""
    for name, ends in (("srun", code), ("scontrol", 0)):
        command = directory / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(
            f'#!/bin/bash\nprintf "%s\\n" "{name} $*" >> {directory}/calls\nexit {ends}\n'
        )
        command.chmod(0o755)
    script = next(iter(SHIPPED.values())).parents[1] / "slurm" / "train.sbatch"
    environment = {"PATH": f"{directory}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "7", "VENV": "/my env"}
    done = subprocess.run(
        ["bash", script, *words], env=environment, capture_output=True, text=True, check=False
    )
    calls = directory / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize("code", [0, 4, 75])
def test_the_batch_script_ends_with_the_runs_code_and_after_a_signal_goes_back_into_the_queue(
    tmp_path: Path, code: int
) -> None:
    calls = ["srun --kill-on-bad-exit=0 /my env/bin/ckpt-train my recipe.yaml --seed=1"]
    calls += ["scontrol requeue 7"] * (code == 75)
    assert run_batch_script(tmp_path, code, "my recipe.yaml", "--seed=1") == (code, calls)


def test_the_batch_script_starts_the_ranks_and_goes_back_into_the_queue_after_a_signal(
    tmp_path: Path,
) -> None:
    assert run_batch_script(tmp_path, 75, "my recipe.yaml", "--seed=1") == (
        75,
        [
            "srun --kill-on-bad-exit=0 /my env/bin/ckpt-train my recipe.yaml --seed=1",
            "scontrol requeue 7",
        ],
    )
