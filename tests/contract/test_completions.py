"""The section ``generation``: completions at each validation, on any ranks, without a trace in the training."""

import json
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
    done = commands.run("ckpt-train", str(copy), f"--checkpoint.checkpoint_dir={run}", *words)
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


ADAPTED = ["--distributed.strategy", "fsdp2", "--peft.r", "2", "--generation.raw"]


@pytest.mark.parametrize(
    "words",
    [
        ["--distributed.strategy", "fsdp2"],
        pytest.param(["--distributed.tp_size", "2"], marks=pytest.mark.further),
        pytest.param(ADAPTED, marks=pytest.mark.further),
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
        ("generation: {prompts: [a], max_new_tokens: 0}\n", "must be 1 or more"),
        ("generation: {prompts: [a], raw: true, system: b}\n", "generation.system has no effect"),
        (GENERATION + "distributed: {pp_size: 2}\n", "generation and pp_size cannot be combined"),
    ],
)
def test_a_wrong_section_is_reported(recipe: Path, tmp_path: Path, also: str, what: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.read_text() + also)
    with pytest.raises(RecipeError, match=what):
        load_recipe(path)


def completions_with(
    settings: dict[str, Any], recipe: Path, commands: CommandServer, directory: Path
) -> list[dict[str, Any]]:
    """The completions after a step."""
    section = {"prompts": ["Hello"], "max_new_tokens": 5} | settings
    also = f"generation: {json.dumps(section)}\n"
    short = ("--step_scheduler.max_steps=1", "--step_scheduler.val_every_steps=1")
    unsaved = "--checkpoint.save_consolidated=false"
    run = trained(commands, recipe, directory / "run", *short, unsaved, also=also)
    return completions_of(run)[1]


@pytest.fixture(scope="module")
def unchanged(
    recipe: Path, commands: CommandServer, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return completions_with({}, recipe, commands, tmp_path_factory.mktemp("unchanged"))


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
    recipe: Path, commands: CommandServer, tmp_path: Path, unchanged: Any, changed: dict[str, Any]
) -> None:
    """The keys of the section ``generation``, one by one."""
    assert completions_with(changed, recipe, commands, tmp_path) != unchanged
