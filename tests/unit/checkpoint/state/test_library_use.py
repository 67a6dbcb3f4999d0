"""A program that uses Checkpointer without a recipe: wrong calls are one clear error, in terms of the program."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from automodel_ckpt import Checkpointer, CheckpointOptions
from automodel_ckpt.checkpoint.options import RemoteStorage
from automodel_ckpt.config.keys.checkpoint import CheckpointConfig
from automodel_ckpt.errors import AutomodelError, LeaseLost, RecipeError

MODEL = torch.nn.Linear(2, 2)
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())
STATE = {"model": MODEL, "optimizer": OPTIMIZER}


class Holding:
    """An object with any state."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def save(run: Path, state: Any = STATE, **arguments: Any) -> None:
    checkpointer = Checkpointer(run)
    try:
        checkpointer.save(state, **{"step": 1, "epoch": 0, **arguments})
    finally:
        checkpointer.close()


def load(run: Path, state: Any, **options: Any) -> None:
    checkpointer = Checkpointer(run, options=CheckpointOptions(**options))
    try:
        checkpointer.load(state)
    finally:
        checkpointer.close()


def saved_and_loaded(run: Path, state: Any) -> None:
    save(run)
    load(run, state)


def file(run: Path) -> Path:
    run.write_text("")
    return run


ANY: Any = None
ANYTHING: Any = 1
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no path": (lambda run: Checkpointer(ANY), "not the path of a directory"),
    "empty path": (lambda run: Checkpointer(""), "not the path of a directory"),
    "null": (lambda run: Checkpointer("a\0b"), "not the path of a directory"),
    "file": (lambda run: Checkpointer(file(run)), "not the path of a directory"),
    "options by position": (lambda run: Checkpointer(run, CheckpointOptions()), "arguments by name"),  # type: ignore[arg-type]
    "a mapping of options": (
        lambda run: Checkpointer(run, options={"keep_last": 1}),
        "options=CheckpointOptions(",
    ),
    "assets": (lambda run: Checkpointer(run, assets={"model": 1}), "HFAssets.from_model"),  # type: ignore[dict-item]
    "one of the assets": (lambda run: Checkpointer(run, assets=ANYTHING), "HFAssets.from_model"),
    "assets of no module": (
        lambda run: save_once(Checkpointer(run, assets={"net": SimpleNamespace(nbytes=0)}), STATE),  # type: ignore[dict-item]
        "assets are of a module that is not part",
    ),
    "one name": (lambda run: load(run, STATE, allow_missing_state="optimizer"), "a list of names"),
    "a step": (lambda run: load(run, STATE, keep_steps=5), "a list of whole numbers"),
    "restore_from": (lambda run: load(run, STATE, restore_from=3), "use a name or a path"),
    "no such": (lambda run: load(run, STATE, restore_from=run / "x"), "checkpoint.restore"),
    "number as name": (lambda run: save(run, {1: MODEL}), "a name in the state is not text"),
    "slash": (lambda run: save(run, {"a/b": MODEL}), "a name in the state cannot be used"),
    "list": (lambda run: save(run, {"m": [MODEL]}), "under its own name"),
    "mapping": (lambda run: save(run, {"m": {"a": MODEL}}), "under its own name"),
    "state dict": (lambda run: save(run, {"m": MODEL.state_dict()}), "each object itself"),
    "no module": (lambda run: save(run, {"o": OPTIMIZER}), "a module that is not part of the saved state"),
    "no optimizer": (
        lambda run: save(
            run, {"m": MODEL, "s": torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)}
        ),
        "add it to the state",
    ),
    "step": (lambda run: save(run, step=10**30), "a whole number from 0 to"),
    "config": (lambda run: save(run, config_yaml={"a": 1}), "yaml.safe_dump(settings)"),
    "no state": (lambda run: save(run, {}), "a mapping from names to objects"),
    "losses": (lambda run: save(run, losses=0.5), "losses must be a mapping"),
    "a loss": (lambda run: save(run, losses={"a": object()}), "cannot be written as JSON"),
    "code": (
        lambda run: save(run, {"x": Holding(KeyError("mine"))}),
        "failed in user code",
    ),
    "array": (lambda run: save(run, {"x": Holding(np.array(["ab"]))}), "numpy.ndarray of the type <U2"),
    "subclass": (
        lambda run: save(run, {"m": _with_buffer(torch.ones(2).as_subclass(_Subclass))}),
        "attribute 'm', key 'part'",
    ),
    "other names": (
        lambda run: saved_and_loaded(run, {"net": MODEL}),
        "allow_missing_state '[model, net, optimizer]'",
    ),
    "other shapes": (
        lambda run: saved_and_loaded(run, {"model": torch.nn.Linear(3, 3), "optimizer": OPTIMIZER}),
        "start a new run from its weights",
    ),
}  # fmt: skip


class _Subclass(torch.Tensor):
    pass


def _with_buffer(value: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("part", value)
    return module


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_an_error(tmp_path: Path, name: str) -> None:
    call, expected = WRONG[name]
    with pytest.raises(AutomodelError) as raised:
        call(tmp_path / "run")
    text = str(raised.value).replace(str(tmp_path), "").replace(__name__, "")
    assert expected in text
    assert "defect" not in text


def test_paths_of_each_kind_name_one_directory_wherever_the_program_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpointer = Checkpointer("run")
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    checkpointer.save(STATE, step=1, epoch=0)
    checkpointer.close()
    assert not list(Path().iterdir())
    paths: list[Any] = ["~/run", os.fsencode(tmp_path / "run"), tmp_path / "run"]
    for step, path in enumerate(paths, start=2):
        save(path, step=step)
    assert sorted(each.name for each in tmp_path.glob("run/epoch_*")) == [
        f"epoch_0_step_{step}" for step in range(1, 5)
    ]


def test_a_lost_checkpointer_does_not_hold_the_directory(tmp_path: Path) -> None:
    """A cell of a notebook that creates the checkpointer runs twice."""
    checkpointer = Checkpointer(tmp_path / "run")
    checkpointer.save(STATE, step=1, epoch=0)
    with pytest.raises(RecipeError, match="this process uses this directory already"):
        Checkpointer(tmp_path / "run").open()
    del checkpointer
    second = Checkpointer(tmp_path / "run")
    assert second.load(STATE) is not None
    second.close()


def test_a_forked_process_does_not_save_in_the_directory_of_its_parent(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "run")
    checkpointer.save(STATE, step=1, epoch=0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            checkpointer.save(STATE, step=2, epoch=0)
        except LeaseLost:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    checkpointer.save(STATE, step=3, epoch=0)
    checkpointer.close()
    assert not (tmp_path / "run" / "epoch_0_step_2").exists()


def test_numbers_of_torch_and_numpy_are_saved_as_numbers(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "run")
    checkpointer.save(
        {"model": MODEL},
        step=np.int64(3),
        epoch=torch.tensor(0),
        losses={"val_loss": torch.tensor(0.5)},
        progress={"tokens": np.int64(7)},
        validated=True,
    )
    checkpointer.close()
    assert '"val_loss": 0.5' in (tmp_path / "run/epoch_0_step_3/losses.json").read_text()


@pytest.mark.parametrize(
    "option",
    [
        {"keep_last": 0},
        {"keep_last": "3"},
        {"keep_best": -1},
        {"verify": "all"},
        {"best_mode": "lowest"},
        {"model_save_format": "pickle"},
    ],
)
def test_options_have_the_values_of_a_recipe(tmp_path: Path, option: Any) -> None:
    with pytest.raises(RecipeError, match=rf"option {next(iter(option))} has no such value"):
        Checkpointer(tmp_path / "run", options=CheckpointOptions(**option))


def test_options_have_the_defaults_of_a_recipes_section() -> None:
    section = CheckpointConfig()
    for option in dataclasses.fields(CheckpointOptions):
        default, expected = option.default, getattr(section, option.name)
        if isinstance(default, tuple):
            expected = tuple(expected)
        assert default == expected, option.name


def save_once(checkpointer: Checkpointer, state: dict[str, object]) -> Path:
    return checkpointer.save(state, step=1, epoch=0).path


def test_a_recipes_section_is_accepted_as_options(tmp_path: Path) -> None:
    section = CheckpointConfig(model_save_format="torch_save", save_optimizer=False)
    with contextlib.closing(Checkpointer(tmp_path, options=section)) as checkpointer:
        path = save_once(checkpointer, {"model": torch.nn.Linear(2, 2)})
    assert (path / "model" / ".metadata").is_file()


def test_a_url_as_directory_takes_the_other_options_of_remote(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    options = CheckpointOptions(
        remote=RemoteStorage(url, required=True), scratch_dir=str(tmp_path / "local")
    )
    with contextlib.closing(Checkpointer(url, options=options)) as checkpointer:
        path = save_once(checkpointer, {"model": torch.nn.Linear(2, 2)})
    assert path.is_relative_to(tmp_path / "local")


def test_hugging_face_layouts_reject_the_format_torch_save(tmp_path: Path) -> None:
    options = CheckpointOptions(model_layout="hf", model_save_format="torch_save")
    with pytest.raises(RecipeError, match="always written as safetensors"):
        Checkpointer(tmp_path, options=options)
