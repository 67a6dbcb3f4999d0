"""The training state in checkpoints of DeepSpeed: moments bit-equal to those that DeepSpeed gathers itself.

``moments.safetensors`` in tests/fixtures/deepspeed has the moments of each parameter (make.py there).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from automodel_ckpt.convert.formats.deepspeed.deepspeed import DeepSpeed
from automodel_ckpt.convert.formats.torch.training_state import OptimizerState, TrainingState
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.external_tensors import moments, no_parameters
from tests.unit.convert.formats.test_deepspeed import FIXTURES, NAMES, TAG, copied, write_zero
from tests.unit.convert.formats.test_numbered_optimizer import (
    Model,
    assert_same,
    parameters_of,
    trained,
    two_groups,
)

DECAYED = {"embed.weight", "inner.weight", "conv.weight"}
OTHERS = {"scale", "conv.bias", "norm.weight", "norm.bias"}


def state_of(path: Path) -> TrainingState:
    state = DeepSpeed().training_state(path, no_parameters)
    assert state is not None
    return state


def optimizer_of(path: Path) -> OptimizerState:
    optimizer = state_of(path).optimizer
    assert optimizer is not None
    return optimizer


@pytest.mark.parametrize("name", NAMES)
def test_moments_are_bit_equal_to_those_that_deepspeed_gathers(name: str) -> None:
    optimizer = optimizer_of(FIXTURES / name)
    expected = load_file(FIXTURES / name / "moments.safetensors")
    found = moments(optimizer)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
        assert value.any(), key


@pytest.mark.parametrize("name", NAMES)
def test_steps_groups_counters_and_schedule_are_read(name: str) -> None:
    state = state_of(FIXTURES / name)
    num_ranks = 3 if "round-robin" in name else 2
    assert (state.step, state.epoch, state.consumed_samples) == (3, None, 3 * num_ranks)
    optimizer = state.optimizer
    assert optimizer is not None
    assert optimizer.values == {fqn: {"step": 3.0} for fqn in DECAYED | OTHERS}
    decayed, others = optimizer.groups
    assert set(decayed.parameters) == DECAYED and set(others.parameters) == OTHERS
    assert decayed.options["weight_decay"] == 0.1 and others.options["weight_decay"] == 0.0
    for group in optimizer.groups:
        assert group.options["lr"] == 0.0125 and group.options["betas"] == (0.9, 0.999)
        assert group.options["initial_lr"] == 0.05
        assert "params" not in group.options and "step" not in group.options
    assert state.scheduler is not None
    assert state.scheduler["last_epoch"] == 3 and state.scheduler["base_lrs"] == [0.05, 0.05]
    assert "loss scale" in state.omitted and any("note" in text for text in state.omitted)
    assert not any("lr_scheduler" in text or "global_steps" in text for text in state.omitted)


def test_a_save_without_optimizer_files_has_counters_only(tmp_path: Path) -> None:
    run = copied("stage2-bfloat16", tmp_path)
    for file in (run / TAG).glob("*_optim_states.pt"):
        file.unlink()
    state = state_of(run)
    assert state.optimizer is None and state.step == 3
    assert state.omitted[0].startswith("optimizer state")


def test_the_optimizer_of_a_run_without_zero_is_read(tmp_path: Path) -> None:
    """DeepSpeed then stores the state dict of the script's optimizer, which numbers the parameters."""
    model = Model()
    optimizer = trained(model, two_groups(model))
    tag = tmp_path / "global_step4"
    tag.mkdir()
    counters = {"global_steps": 4, "global_samples": 32, "skipped_steps": 0}
    content = {"module": model.state_dict(), "optimizer": optimizer.state_dict(), **counters}
    torch.save({**content, "buffer_names": []}, tag / "mp_rank_00_model_states.pt")
    state = DeepSpeed().training_state(tag, parameters_of(model))
    assert state is not None and state.optimizer is not None
    assert (state.step, state.consumed_samples) == (4, 32)
    assert_same(state.optimizer, optimizer, model)
    assert not any("optimizer" in text or "loss scale" in text for text in state.omitted)


# ---------------------------------------------------------------- files of the same structure


def replace_state(tag: Path, rank: int, change: Any) -> None:
    """Change the optimizer's state dict in a rank's file."""
    file = tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    content = torch.load(file, weights_only=False)
    change(content["optimizer_state_dict"])
    torch.save(content, file)


def with_state(
    tmp_path: Path, entries: list[dict[str, Any]], groups: list[dict[str, Any]] | None
) -> Path:
    """Write one rank's checkpoint of stage 1 with two parameters, each in a group."""
    tag = write_zero(
        tmp_path / "tag", [{"a": torch.ones(4)}, {"b": torch.ones(2)}], stage=1, num_ranks=1
    )

    def change(state: dict[str, Any]) -> None:
        if groups is None:
            state["base_optimizer_state"] = entries
            state["base_optimizer_state_step"] = 9
        else:
            numbered = dict(enumerate(entries))
            state["base_optimizer_state"] = {"state": numbered, "param_groups": groups}

    replace_state(tag, 0, change)
    return tag


ENTRIES: list[dict[str, Any]] = [
    {"exp_avg": torch.arange(4.0)},
    {"exp_avg": torch.arange(4.0, 8.0)},
]
GROUPS: list[dict[str, Any]] = [{"params": [0], "lr": 1.0, "step": 7}, {"params": [1], "step": 7}]


def test_a_step_that_the_group_counts_is_the_step_of_its_parameters(tmp_path: Path) -> None:
    optimizer = optimizer_of(with_state(tmp_path, ENTRIES, GROUPS))
    assert optimizer.values == {"a": {"step": 7}, "b": {"step": 7}}
    assert optimizer.groups[0].options == {"lr": 1.0}
    found = moments(optimizer)
    assert torch.equal(found["a:exp_avg"], torch.arange(4.0))
    assert torch.equal(found["b:exp_avg"], torch.arange(4.0, 6.0))  # without the padding


def test_the_state_of_elastic_checkpoints_is_read(tmp_path: Path) -> None:
    optimizer = optimizer_of(with_state(tmp_path, ENTRIES, None))
    assert optimizer.values == {"a": {"step": 9}, "b": {"step": 9}}
    assert [group.parameters for group in optimizer.groups] == [("a",), ("b",)]
    assert torch.equal(moments(optimizer)["b:exp_avg"], torch.arange(4.0, 6.0))


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('executed')",)


@pytest.mark.parametrize(
    ("entries", "groups", "message"),
    [
        (ENTRIES[:1], GROUPS, "another number of flat vectors"),
        ([*ENTRIES, {}], GROUPS, "another number of flat vectors"),
        ([{"exp_avg": torch.ones(3)}, ENTRIES[1]], GROUPS, "has not the size of the weights"),
        ([{"exp_avg": torch.ones(2, 2)}, ENTRIES[1]], GROUPS, "not a flat tensor"),
        ([{"exp_avg": torch.arange(8.0)[::2]}, ENTRIES[1]], GROUPS, "not a flat tensor"),
        ([ENTRIES[0], {}], GROUPS, "exp_avg of flat vector 1 is not a tensor"),
        ([{"exp_avg": Hostile()}, {"exp_avg": torch.ones(2)}], GROUPS, "is not a tensor"),
        ([{"step": torch.tensor(True)}, {}], GROUPS, "step is not a number"),
        (ENTRIES, [{"params": [0]}], "do not have each flat vector once"),
        (ENTRIES, [{"params": [0, 0]}, {"params": [1]}], "do not have each flat vector once"),
        (ENTRIES, [{"params": [0]}, {"params": [5]}], "that does not exist"),
        (ENTRIES, [{"params": [0]}, {"params": [-1]}], "that does not exist"),
        (ENTRIES, [{"params": ["a"]}], "does not list them"),
        (ENTRIES, [{"lr": 1.0}], "does not list them"),
        (ENTRIES, [Hostile()], "has no groups"),
    ],
)
def test_damaged_state_is_an_error(
    tmp_path: Path, entries: list[dict[str, Any]], groups: list[dict[str, Any]], message: str
) -> None:
    tag = with_state(tmp_path, entries, groups)
    with pytest.raises(CheckpointUnusable, match=message):
        state_of(tag)


def test_objects_and_cycles_in_options_and_schedules_are_left_out_or_an_error(
    tmp_path: Path,
) -> None:
    groups = [{"params": [0], "lr": Hostile()}, {"params": [1], "betas": (0.9, Hostile())}]
    tag = with_state(tmp_path, ENTRIES, groups)
    file = tag / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    content["lr_scheduler"] = {"last_epoch": 3, "lambda": Hostile(), "list": [1, Hostile()]}
    torch.save(content, file)
    state = state_of(tag)
    assert state.scheduler == {"last_epoch": 3, "list": [1, None]}
    assert state.optimizer is not None
    assert [group.options for group in state.optimizer.groups] == [{}, {"betas": (0.9, None)}]
    wide: list[Any] = [1] * 100
    for _ in range(5):
        wide = [wide] * 100
    cycle: list[Any] = []
    cycle.append(cycle)
    for value, message in ((wide, "more than"), (cycle, "nested")):
        content["lr_scheduler"] = {"x": value}
        torch.save(content, file)
        with pytest.raises(CheckpointUnusable, match=message):
            state_of(tag)


@pytest.mark.parametrize("entry", ["exp_avg.pt", "step.pt"])
def test_a_moment_of_a_universal_checkpoint_with_another_shape_is_an_error(
    tmp_path: Path, entry: str
) -> None:
    run = copied("universal-stage1-bfloat16", tmp_path)
    zero = run / f"{TAG}_universal/zero"
    torch.save(torch.ones(7), zero / "conv.bias" / entry)
    with pytest.raises(CheckpointUnusable, match="does not have its shape"):
        state_of(run)
    (zero / "conv.bias" / entry).unlink()
    (zero / "conv.bias" / entry).symlink_to("../scale/exp_avg.pt")
    with pytest.raises(CheckpointUnusable):
        state_of(run)
    shutil.rmtree(zero / "conv.bias")
    with pytest.raises(CheckpointUnusable, match="is missing"):
        state_of(run)
