"""What accelerate and torch save of models that FSDP shards: weights, moments, groups and counters.

The files in tests/fixtures/fsdp were written by accelerate's and torch's own functions (make.py there);
``expected.safetensors`` has the weights and the moments.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from automodel_ckpt.cli import ckpt
from automodel_ckpt.convert.formats.registry import detect, formats_in
from automodel_ckpt.convert.formats.torch.training_state import (
    ModelParameter,
    Parameters,
    TrainingState,
)
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.external_tensors import moments, no_parameters, values

FIXTURES = Path(__file__).parents[3] / "fixtures" / "fsdp"
NAMES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
STEP = 5

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def expected(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return weights, and moments by NAME:ENTRY."""
    found = load_file(FIXTURES / name / "expected.safetensors")
    weights = {key: tensor for key, tensor in found.items() if ":" not in key}
    return weights, {key: tensor for key, tensor in found.items() if ":" in key}


def state_of(path: Path, parameters: Parameters = no_parameters) -> TrainingState:
    known = detect(path)
    assert known is not None
    state = known.training_state(path, parameters)
    assert state is not None
    return state


def listed(name: str) -> Parameters:
    """The model's parameters, as the command lists them, for files of torch.save."""
    weights, _ = expected(name)
    parameters = []
    for fqn, tensor in weights.items():
        if fqn != "lm_head.weight":
            parameters.append(ModelParameter(fqn, tuple(tensor.shape), "norm" not in fqn))
    return lambda: parameters


def copied(name: str, directory: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name, directory / name))


def error_of(path: Path) -> str:
    with pytest.raises(CheckpointUnusable) as raised:
        state_of(path)
    return str(raised.value)


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_moments_are_bit_equal_to_those_of_torch(name: str) -> None:
    weights, adam = expected(name)
    found = values(FIXTURES / name)
    found.setdefault("lm_head.weight", found["model.embed_tokens.weight"])
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    assert found.keys() == weights.keys()
    for key, tensor in weights.items():
        assert torch.equal(found[key], tensor), key
    optimizer = state_of(FIXTURES / name, listed(name)).optimizer
    assert optimizer is not None
    read = moments(optimizer)
    assert read.keys() == adam.keys()
    for key, tensor in adam.items():
        assert torch.equal(read[key], tensor) and tensor.any(), key


@pytest.mark.parametrize("name", NAMES)
def test_groups_steps_and_the_schedule_are_read(name: str) -> None:
    state = state_of(FIXTURES / name, listed(name))
    assert state.step == STEP
    optimizer = state.optimizer
    assert optimizer is not None
    decayed, others = optimizer.groups
    assert decayed.options["weight_decay"] == 0.1 and others.options["weight_decay"] == 0.0
    for group in optimizer.groups:
        assert group.options["lr"] == pytest.approx(0.005)
        assert tuple(group.options["betas"]) == (0.9, 0.999)
        assert group.options["initial_lr"] == 0.01
        assert "params" not in group.options
    assert {"norm" in name for name in others.parameters} == {True}
    assert {"norm" in name for name in decayed.parameters} == {False}
    assert {*decayed.parameters, *others.parameters} == optimizer.tensors.keys()
    assert all(entries == {"step": 5.0} for entries in optimizer.values.values())
    assert state.scheduler is not None
    assert state.scheduler["last_epoch"] == STEP and state.scheduler["base_lrs"] == [0.01, 0.01]


def test_counters_are_read_where_the_program_saves_them() -> None:
    assert state_of(FIXTURES / "torch-nested").epoch == 0
    flattened = state_of(FIXTURES / "torch-flattened")
    assert (flattened.step, flattened.epoch, flattened.omitted) == (STEP, None, ("dataloader",))


def test_the_counters_of_a_trainers_checkpoint_are_used(tmp_path: Path) -> None:
    run = copied("fsdp2-full", tmp_path)
    shutil.move(run / "scheduler.bin", run / "scheduler.pt")
    (run / "trainer_state.json").write_text('{"global_step": 7, "epoch": 1.75}')
    (run / "rng_state_0.pth").touch()
    state = state_of(run, listed("fsdp2-full"))
    assert (state.step, state.epoch) == (7, 1)
    assert state.scheduler is not None and state.omitted == ("rng_state_0.pth",)


@pytest.mark.parametrize("name", ["fsdp2-full", "fsdp2-sharded", "torch-flattened"])
def test_a_directory_is_one_checkpoint_and_its_weights_are_imported(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert formats_in(FIXTURES / name).keys() == {"."}
    run = copied(name, tmp_path)
    assert ckpt.main(["import", "--json", str(run), str(tmp_path / "imported")]) == 0
    document = json.loads(capsys.readouterr().out)
    kind = "PyTorch DCP" if "torch" in name else "accelerate with FSDP"
    assert document["kind"] == kind and document["has_config"]
    assert document["num_tensors"] == len(values(run))


# ---------------------------------------------------------------- damage


def saved(directory: Path, **changes: Any) -> Path:
    """Write a DCP directory with one parameter and its optimizer state."""
    optimizer: dict[str, Any] = {
        "state": {"w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 2)}},
        "param_groups": [{"lr": 0.5, "params": ["w"]}],
    }
    state = {"model": {"w": torch.ones(2, 2)}, "optimizer": optimizer, "step": 3, **changes}
    dcp.save(state, checkpoint_id=directory, no_dist=True)
    return directory


def optimizer_with(entry: dict[str, Any], **group: Any) -> dict[str, Any]:
    return {"state": {"w": entry}, "param_groups": [{"lr": 0.5, "params": ["w"], **group}]}


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('executed')",)


def test_values_may_be_tensors_or_plain(tmp_path: Path) -> None:
    changes = {
        "optimizer": optimizer_with(
            {"step": 3, "exp_avg": torch.ones(2, 2)}, lr=torch.tensor(0.25), betas=[0.5, 0.75]
        ),
        "train_state": {"step": torch.tensor(9), "epoch": torch.tensor(2.5)},
        "step": "three",
    }
    state = state_of(saved(tmp_path / "d", **changes))
    assert (state.step, state.epoch) == (9, None)
    assert state.optimizer is not None
    assert state.optimizer.values == {"w": {"step": 3}}
    (group,) = state.optimizer.groups
    assert group.parameters == ("w",) and group.options == {"lr": 0.25, "betas": [0.5, 0.75]}


def test_objects_in_values_are_left_out_and_not_executed(tmp_path: Path) -> None:
    state = state_of(
        saved(
            tmp_path / "d",
            optimizer=optimizer_with({"exp_avg": torch.ones(2, 2)}, lr=Hostile()),
            lr_scheduler={"last_epoch": 3, "function": Hostile()},
            step=Hostile(),
        )
    )
    assert state.step is None and state.scheduler == {"last_epoch": 3}
    assert state.optimizer is not None and state.optimizer.groups[0].options == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"optimizer": {"state": {0: {"exp_avg": torch.ones(2, 2)}}, "param_groups": []}},
            "numbers its parameters",
        ),
        (
            {"optimizer": {"state": {"v": {"exp_avg": torch.ones(2, 2)}}, "param_groups": []}},
            "that the model does not have",
        ),
        ({"optimizer": optimizer_with({"exp_avg": torch.ones(4)})}, "different shapes"),
        (
            {"optimizer": optimizer_with({"step": torch.tensor(1, dtype=torch.int8)})},
            "stored in another form",
        ),
        ({"optimizer": optimizer_with({"step": "three"})}, "not a number"),
        ({"optimizer": optimizer_with({"step": Hostile()})}, "not a number"),
        ({"optimizer": optimizer_with({"step": 1}, params=[1])}, "does not list the names"),
        ({"optimizer": optimizer_with({"step": 1}, params=Hostile())}, "does not list the names"),
    ],
)
def test_state_that_does_not_belong_to_the_model_is_an_error(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    assert message in error_of(saved(tmp_path / "d", **changes))


def test_a_damaged_value_is_an_error_that_names_it(tmp_path: Path) -> None:
    run = saved(tmp_path / "d")
    file = run / "__0_0.distcp"
    content = file.read_bytes()
    # Every archive's pickle begins so: a truncated instruction follows.
    file.write_bytes(
        content.replace(b"\x80\x02X", b"\x80\x02\xff").replace(b"\x80\x02G", b"\x80\x02\xff")
    )
    assert "cannot be read" in error_of(run)
    file.write_bytes(content[: len(content) // 2])
    assert "__0_0.distcp" in error_of(run)
    file.unlink()
    assert "a file of tensors is missing: each node" in error_of(run)


@pytest.mark.parametrize(
    "file", ["pytorch_model_fsdp_0", "optimizer_0", "optimizer_0/__0_0.distcp", "scheduler.bin"]
)
def test_links_out_of_the_directory_are_an_error(tmp_path: Path, file: str) -> None:
    run = copied("fsdp2-sharded", tmp_path)
    shutil.move(run / file, tmp_path / "elsewhere")
    (run / file).symlink_to(tmp_path / "elsewhere")
    assert "link" in error_of(run)


def test_torch_is_not_imported_for_an_optimizer_with_names(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from automodel_ckpt.cli.ckpt import main\n"
        "code = main(sys.argv[1:])\n"
        "sys.exit(code or 'torch' in sys.modules)\n"
    )
    run = tmp_path / "run"
    command = ["import", str(FIXTURES / "fsdp2-sharded"), str(run), "--training-state"]
    subprocess.run([sys.executable, "-c", script, *command], check=True, capture_output=True)
    (checkpoint,) = run.glob("epoch_*")
    stored = dcp.FileSystemReader(checkpoint / "optim").read_metadata()
    expected_names = {
        f"optimizer.state.model.{name.replace(':', '.')}" for name in expected("fsdp2-sharded")[1]
    }
    assert expected_names <= stored.state_dict_metadata.keys()


def test_what_accelerate_saves_without_fsdp_is_read(tmp_path: Path) -> None:
    """model.safetensors, and an optimizer that numbers the parameters, as Accelerator.save_state writes them."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    for _ in range(3):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        schedule.step()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    torch.save(schedule.state_dict(), tmp_path / "scheduler.bin")
    (tmp_path / "random_states_0.pkl").write_bytes(b"not read")
    known = detect(tmp_path)
    assert known is not None
    assert known.name == "accelerate"
    assert known.open(tmp_path).tensors.keys() == model.state_dict().keys()
    listed = [
        ModelParameter(name, tuple(parameter.shape), True)
        for name, parameter in model.named_parameters()
    ]
    state = state_of(tmp_path, lambda: listed)
    assert (state.step, state.omitted) == (3, ("random_states_0.pkl",))
    assert state.scheduler is not None
    assert state.scheduler["base_lrs"] == [0.1]
    assert state.optimizer is not None
    found = moments(state.optimizer)
    for name, parameter in model.named_parameters():
        for entry in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[f"{name}:{entry}"], optimizer.state[parameter][entry])
    # A second model has a separate optimizer.
    save_file(model.state_dict(), tmp_path / "model_1.safetensors")
    with pytest.raises(CheckpointUnusable, match=r"several models.*\n.*\n.*model_1\.safetensors"):
        known.open(tmp_path)
