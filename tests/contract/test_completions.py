"""The section ``generation``: completions at each validation, on any ranks, without a trace in the training."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from automodel_ckpt import load_recipe
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.errors import RecipeError
from tests.support.models.stand_ins import LLAMA_CHAT, write_model
from tests.support.servers.command_server import CommandServer

PROMPTS = ["What is two plus one?", "Hello"]
RECIPE = """\
model: {{from_pretrained: {model}}}
dataset: &data {{_target_: automodel_ckpt.data.chat.messages, path: {data}, seq_length: 128}}
validation_dataset: *data
optimizer: {{lr: 1e-2}}
step_scheduler: {{global_batch_size: 4, local_batch_size: 2, max_steps: 4, ckpt_every_steps: 2, val_every_steps: 2}}
checkpoint: {{save_consolidated: every}}
logging: {{trackers: {{tensorboard: {{}}}}}}
"""
GENERATION = f"generation: {{prompts: {json.dumps(PROMPTS)}, max_new_tokens: 5}}\n"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("completions")
    # Large weights, so that completions depend on every token before them.
    config = {"model_type": "llama", "initializer_range": 0.5}
    write_model(directory / "chat", config, LLAMA_CHAT)
    rows = []
    for number in range(8):
        talk = [("user", f"What is {number} plus one?"), ("assistant", f"It is {number + 1}.")]
        rows.append({"messages": [{"role": role, "content": text} for role, text in talk]})
    data = directory / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = directory / "recipe.yaml"
    path.write_text(RECIPE.format(model=directory / "chat", data=data))
    return path


def trained(commands: CommandServer, recipe: Path, run: Path, *words: str, also: str = "") -> Path:
    copy = run.with_suffix(".yaml")
    copy.write_text(recipe.read_text() + also)
    command = ["ckpt-train", str(copy), "--checkpoint.checkpoint_dir", str(run), *words]
    environment = {**os.environ, "PATH": f"{commands.bin}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return run


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "training.jsonl").read_text().splitlines()]


def completions_of(run: Path) -> dict[int, list[dict[str, Any]]]:
    return {
        line["step"]: line["completions"]
        for line in lines_of(run)
        if line.get("event") == "completions"
    }


def results_of(run: Path) -> list[tuple[Any, ...]]:
    steps = [line for line in lines_of(run) if "event" not in line]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in steps]


@pytest.mark.timeout(300)
def test_completions_are_those_of_the_checkpoint_and_change_nothing(
    recipe: Path, commands: CommandServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The type of the export, whose rounding would change completions.
    dtype = "--model.dtype=bfloat16"
    with_them = trained(commands, recipe, tmp_path / "with", dtype, also=GENERATION)
    without = trained(commands, recipe, tmp_path / "without", dtype)
    assert results_of(with_them) == results_of(without)
    found = completions_of(with_them)
    assert list(found) == [2, 4]
    for step, completions in found.items():
        assert [each["prompt"] for each in completions] == PROMPTS
        for each in completions:
            path = with_them / f"epoch_{step // 2 - 1}_step_{step}" / "model" / "consolidated"
            words = ["generate", str(path), "-p", each["prompt"], "--json"]
            assert main([*words, "--max-new-tokens", "5", "--temperature", "0"]) == 0
            (expected,) = json.loads(capsys.readouterr().out)["completions"]
            assert (each["text"], each["tokens"]) == (expected["text"], expected["tokens"])
    events = EventAccumulator(str(with_them / "tensorboard"))
    events.Reload()
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("completions")]
    assert len(texts) == 2
    assert PROMPTS[0] in texts[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "words",
    [
        ["--distributed.strategy", "fsdp2"],
        ["--distributed.tp_size", "2"],
        pytest.param(
            ["--distributed.strategy", "fsdp2", "--peft.r", "2", "--generation.raw"],
            marks=pytest.mark.further,
        ),
    ],
    ids=["fsdp2", "tensor parallel", "adapters"],
)
def test_ranks_that_share_a_model_generate_together(
    recipe: Path, commands: CommandServer, tmp_path: Path, words: list[str]
) -> None:
    run = trained(
        commands,
        recipe,
        tmp_path / "two",
        *("--nproc-per-node", "2", "--step_scheduler.max_steps", "2", *words),
        also=GENERATION,
    )
    (completions,) = completions_of(run).values()
    assert [each["prompt"] for each in completions] == PROMPTS
    if words == ["--distributed.strategy", "fsdp2"]:
        one_step_run = ("--step_scheduler.max_steps", "2")
        alone = trained(commands, recipe, tmp_path / "one", *one_step_run, also=GENERATION)
        assert completions_of(alone)[2] == completions


@pytest.mark.parametrize(
    ("also", "what"),
    [
        ("generation: {}\n", "generation.prompts is missing"),
        ("generation: {prompts: []}\n", "generation.prompts must be non-empty"),
        ("generation: {prompts: [a], max_new_tokens: 0}\n", "must be 1 or more"),
        ("generation: {prompts: [a], temperature: -1}\n", "must be 0 or more"),
        ("generation: {prompts: [a], raw: true, system: b}\n", "generation.system has no effect"),
        (
            GENERATION + "distributed: {pp_size: 2}\n",
            "generation and pp_size cannot be combined",
        ),
    ],
)
def test_a_wrong_section_is_reported(recipe: Path, tmp_path: Path, also: str, what: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.read_text() + also)
    with pytest.raises(RecipeError, match=what):
        load_recipe(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"prompts": ["Hello", "Bye"]},
        {"system": "Answer in a sentence."},
        {"raw": True},
        {"max_new_tokens": 3},
        {"temperature": 3.0},
    ],
    ids=str,
)
def test_every_key_of_generation_changes_the_completions(
    recipe: Path, commands: CommandServer, tmp_path: Path, changed: dict[str, Any]
) -> None:
    """The keys of the section ``generation``, one by one."""
    short = ("--step_scheduler.max_steps=2", "--checkpoint.save_consolidated=false")
    found = []
    for name, settings in (("before", {}), ("after", changed)):
        section = {"prompts": ["Hello"], "max_new_tokens": 5} | settings
        also = f"generation: {json.dumps(section)}\n"
        run = trained(commands, recipe, tmp_path / name, *short, also=also)
        found.append(completions_of(run)[2])
    before, after = found
    assert after != before
