"""A device that runs out of memory: what is reported, when, and with which exit code on several ranks."""

import re
from pathlib import Path

import pytest

from automodel_ckpt.errors import EXIT_USAGE, DeviceMemoryError
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.distributed.kinds.test_training import failure
from tests.support.runs.training import RECIPE, VALIDATION, steps_of, with_loop, write_recipe
from tests.support.runs.training_parts import QueuesSteps
from tests.support.servers.command_server import CommandServer

LOSS = "--loss_fn={_target_: tests.support.runs.training_parts.runs_out_of_memory, "


@pytest.mark.parametrize(
    ("options", "doing"),
    [
        ("call: 7, rank: 0}", "in the forward pass, backward pass or update of step 3"),
        ("call: 13, rank: 0}", "in the validation of step 5"),
        ("call: 0, rank: 0, when: build}", "while the model and the optimizer were built"),
    ],
)
def test_the_report_states_when_how_large_and_what_to_change(
    tmp_path: Path, options: str, doing: str
) -> None:
    error = failure(tmp_path, LOSS + options, text=RECIPE + VALIDATION)
    assert isinstance(error, DeviceMemoryError)
    assert error.exit_code == EXIT_USAGE
    text = str(error)
    assert f"the device ran out of memory {doing}" in text
    assert "PyTorch: CUDA out of memory. Tried to allocate 2.00 GiB" in text
    positions = [
        text.index("--step_scheduler.local_batch_size=N"),
        text.index("--model.activation_checkpointing=true"),
        text.index("--distributed.strategy=fsdp2 --distributed.cpu_offload=true"),
    ]
    assert positions == sorted(positions)
    if "build" not in options:
        assert "longest row" in text
        assert "local_batch_size 4" in text


def test_the_step_before_is_logged_although_the_host_was_ahead_of_it(tmp_path: Path) -> None:
    ahead = with_loop(LLMFinetune, QueuesSteps)
    error = failure(tmp_path, LOSS + "call: 9, rank: 0}", recipe_class=ahead)
    assert isinstance(error, DeviceMemoryError)
    assert [step["step"] for step in steps_of(tmp_path / "run")] == [1, 2, 3]


def test_the_rank_without_memory_is_the_root_cause_of_a_run_on_several(
    tmp_path: Path, commands: CommandServer
) -> None:
    done = commands.run(
        "ckpt-train",
        str(write_recipe(tmp_path)),
        "--trust",
        "tests",
        "--nproc-per-node=2",
        f"--checkpoint.checkpoint_dir={tmp_path / 'run'}",
        LOSS + "call: 4, rank: 1}",
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == EXIT_USAGE, done.stderr
    assert re.search(r"\n\d{4}-\d\d-\d\d \d\d:\d\d:\d\d error: the device ran out", done.stderr)
    end = done.stderr[done.stderr.rindex("error: ") :]
    assert end.startswith("error: the device ran out of memory in the forward pass"), done.stderr
    assert "rank 1" in end
