"""Training from Python does what the command line does, and returns the model."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import automodel_ckpt
from automodel_ckpt import Checkpointer, CheckpointOptions, TrainingResult, load_recipe, train
from automodel_ckpt.errors import RecipeError
from tests.support.models.stand_ins import LLAMA_CHAT, write_model
from tests.support.servers.command_server import CommandServer

RECIPE = Path(__file__).parents[2] / "examples/llm_finetune/tiny_llama_python_docs.yaml"


def changes(run: Path, **more: Any) -> dict[str, Any]:
    base = {"step_scheduler.max_steps": 4, "step_scheduler.ckpt_every_steps": 2}
    return {**base, "checkpoint.checkpoint_dir": str(run), **more}


def losses(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "training.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "event" not in line]


def test_a_run_of_a_file_or_a_mapping_returns_its_model_and_the_next_call_resumes(
    tmp_path: Path,
) -> None:
    result = train(RECIPE, changes(tmp_path / "run"))
    assert isinstance(result, TrainingResult)
    assert (result.step, result.is_stopped) == (4, False)
    assert result.checkpoint == tmp_path / "run/epoch_0_step_4"
    assert result.loss == losses(tmp_path / "run")[-1][1]
    exported = AutoModelForCausalLM.from_pretrained(result.export)
    for name, parameter in result.model.named_parameters():
        assert torch.equal(parameter, exported.get_parameter(name)), name
    train(yaml.safe_load(RECIPE.read_text()), changes(tmp_path / "mapping"))
    assert losses(tmp_path / "mapping") == losses(tmp_path / "run")
    again = train(RECIPE, changes(tmp_path / "run"))
    assert (again.step, again.loss, again.export) == (4, None, result.export)
    longer = train(RECIPE, changes(tmp_path / "run") | {"step_scheduler.max_steps": 5})
    assert longer.step == 5
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_an_interrupt_saves_and_ends_after_the_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        log = run / "training.jsonl"
        while not log.exists() or not log.read_bytes().strip():
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    result = train(RECIPE, changes(run) | {"step_scheduler.max_steps": 110})
    thread.join()
    assert result.is_stopped
    assert 0 < result.step < 110
    assert result.checkpoint is not None
    assert result.checkpoint.name == f"epoch_0_step_{result.step}"
    assert signal.getsignal(signal.SIGINT) is before
    # The request was that of the first run only.
    more = train(RECIPE, changes(run) | {"step_scheduler.max_steps": result.step + 1})
    assert (more.step, more.is_stopped) == (result.step + 1, False)


@pytest.mark.parametrize(
    ("recipe", "overrides", "what"),
    [
        (RECIPE, {"optimizer.lrr": 1}, "did you mean optimizer.lr?"),
        (RECIPE, {"optimizer.lr": "high"}, "optimizer.lr must be a number"),
        ({"model": {"from_pretrained": "x"}}, {}, "dataset is missing"),
        ("none.yaml", {}, "recipe file not found"),
    ],
)
def test_mistakes_are_errors_that_name_their_place(
    recipe: Any, overrides: dict[str, Any], what: str
) -> None:
    with pytest.raises(RecipeError) as failure:
        load_recipe(recipe, overrides)
    assert what in str(failure.value)
    for key in overrides:
        assert f"overrides['{key}']" in str(failure.value)


@pytest.mark.parametrize(
    ("recipe", "overrides", "text"),
    [
        (None, None, "neither the path of a recipe nor a mapping"),
        (3, None, "neither the path of a recipe nor a mapping"),
        ("model:\n  from_pretrained: x\n", None, "yaml.safe_load"),
        (b"nowhere.yaml", None, "recipe file not found"),
        ({}, ["optimizer.lr=1"], "overrides must be a mapping"),
        ({}, "optimizer.lr=1", "overrides must be a mapping"),
        ({}, {1: 2}, "overrides must be a mapping"),
    ],
)
def test_arguments_of_other_kinds_are_errors(recipe: Any, overrides: Any, text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        load_recipe(recipe, overrides)


def test_a_loaded_recipe_takes_no_further_overrides(tmp_path: Path) -> None:
    loaded = load_recipe(RECIPE, changes(tmp_path))
    with pytest.raises(RecipeError, match="a loaded recipe takes no overrides"):
        train(loaded, {"seed": 3})


def test_code_of_the_user_needs_trust(tmp_path: Path) -> None:
    target = {"dataset": {"_target_": "os.system", "command": "true"}}
    with pytest.raises(RecipeError, match="trust"):
        train({**yaml.safe_load(RECIPE.read_text()), **target}, changes(tmp_path / "run"))


def test_importing_the_package_and_loading_a_recipe_import_no_torch() -> None:
    code = (
        "import sys, automodel_ckpt; "
        f"automodel_ckpt.load_recipe({str(RECIPE)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_names_of_the_package_are_those_that_it_lists() -> None:
    for name in automodel_ckpt.__all__:
        assert getattr(automodel_ckpt, name) is not None
    assert {Checkpointer.__name__, CheckpointOptions.__name__} <= set(automodel_ckpt.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = automodel_ckpt.Trainer


def test_a_run_from_hugging_face_files_imports_no_reader_of_other_programs(
    tmp_path: Path, commands: CommandServer
) -> None:
    write_model(tmp_path / "base", {"model_type": "llama"}, LLAMA_CHAT)
    recipe = {
        "model": {"from_pretrained": str(tmp_path / "base")},
        "dataset": {"_target_": "automodel_ckpt.examples.data.python_docs.language_modeling"},
        "step_scheduler": {"global_batch_size": 1, "local_batch_size": 1, "max_steps": 1},
        "checkpoint": {"checkpoint_dir": str(tmp_path / "run")},
    }
    (tmp_path / "script.py").write_text(
        f"import automodel_ckpt, sys\nautomodel_ckpt.train({recipe!r})\n"
        "print(*(name for name in sys.modules if name.startswith('automodel_ckpt.convert')))\n"
    )
    found = commands.run("plain", str(tmp_path / "script.py"), cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    readers = found.stdout.splitlines()[-1].replace("automodel_ckpt.convert.", "").split()
    assert "formats.hugging_face" in readers
    kinds = {name.split(".")[1] for name in readers if name.startswith("formats.")}
    assert kinds == {"files", "format", "registry", "hugging_face", "nested_state"}
    assert not any(name.startswith(("names", "targets", "merging")) for name in readers)
