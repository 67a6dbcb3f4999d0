"""What a run does when a save fails: through the command, on a file system that is really full."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from automodel_ckpt.checkpoint import Manifest
from tests.support.checkpoints import is_intact, stored_bytes, stored_names
from tests.support.servers.command_server import CommandServer
from tools.support import log_lines

RECIPE = Path(__file__).parents[3] / "examples/llm_finetune/tiny_llama_python_docs.yaml"


@pytest.fixture
def small_disk(tmp_path: Path) -> object:
    """A file system of 8 MB: two checkpoints of 3 MB fit, with the logs, a third does not."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", mount], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


class Train(Protocol):
    def __call__(self, directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def train(commands: CommandServer) -> Train:
    """Eight steps in a directory, with a save after every second one."""

    def run(directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
        keys = ["--step_scheduler.max_steps=8", "--step_scheduler.ckpt_every_steps=2"]
        keys += ["--validation_dataset=null", "--checkpoint.save_consolidated=false"]
        words = ("ckpt-train", str(RECIPE), f"--checkpoint.checkpoint_dir={directory}", *keys)
        return commands.run(*words, *overrides, env={**os.environ, "NO_COLOR": "1"})

    return run


@pytest.mark.parametrize("ranks", ["2", pytest.param("1", marks=pytest.mark.further)])
def test_a_full_disk_ends_the_run_with_code_4_and_leaves_the_checkpoints_before(
    small_disk: Path, train: Train, ranks: str
) -> None:
    ended = train(small_disk, "--nproc-per-node", ranks)
    assert ended.returncode == 4, ended.stderr
    assert ended.stderr.count("does not fit on the disk") == 1 and "are free" in ended.stderr
    left = sorted(path.name for path in small_disk.iterdir() if path.name.startswith("epoch"))
    assert left == ["epoch_0_step_2", "epoch_0_step_4"]
    assert os.readlink(small_disk / "LATEST") == "epoch_0_step_4"
    hidden = {path.name for path in small_disk.iterdir() if path.name.startswith(".")}
    # The record of the run's time, which the next start adds to timeline.jsonl.
    assert hidden <= {".timeline.json"}
    assert all(is_intact(small_disk / name) for name in left)


def test_with_continue_training_goes_on_and_the_exit_code_tells(
    small_disk: Path, train: Train
) -> None:
    ended = train(small_disk, "--checkpoint.on_save_failure", "continue")
    assert ended.returncode == 4, ended.stderr
    assert "training continues" in ended.stderr
    assert max(line["step"] for line in log_lines(small_disk / "training.jsonl")) == 8


def test_with_continue_a_later_save_that_succeeds_clears_the_code(
    small_disk: Path, train: Train
) -> None:
    ended = train(
        small_disk, "--checkpoint.on_save_failure", "continue", "--checkpoint.keep_last", "1"
    )
    assert ended.returncode == 0, ended.stderr
    assert os.readlink(small_disk / "LATEST") == "epoch_0_step_8"


def test_export_best_exports_what_lowest_val_points_to_and_a_killed_final_export_is_made_up_for(
    tmp_path: Path, train: Train
) -> None:
    run = tmp_path / "run"
    few = "{_target_: automodel_ckpt.examples.data.python_docs.language_modeling, max_samples: 4}"
    worst = ["--checkpoint.best_metric_key", "train_loss", "--checkpoint.best_mode", "max"]
    ended = train(run, "--checkpoint.export_best", "--validation_dataset", few, *worst)
    assert ended.returncode == 0, ended.stderr
    (lowest,) = run.glob("epoch*/model/consolidated/config.json")
    assert lowest.parents[2].name == os.readlink(run / "LOWEST_VAL") != os.readlink(run / "LATEST")
    again = train(
        run, "--checkpoint.save_consolidated", "final", "--validation_dataset", few, *worst
    )
    assert again.returncode == 0 and "already complete at step 8" in again.stderr
    assert (run / "LATEST/model/consolidated/config.json").is_file()


def test_average_last_averages_the_newest_checkpoints_and_a_finished_run_makes_up_for_it(
    tmp_path: Path, train: Train
) -> None:
    run = tmp_path / "run"
    words = ["--nproc-per-node", "2", "--checkpoint.average_last", "3"]
    ended = train(run, *words)
    assert ended.returncode == 0, ended.stderr
    average = run / "averaged" / "epoch_0_step_8"
    for name in stored_names(average, "model"):
        found, *sources = (
            np.frombuffer(stored_bytes(checkpoint, "model", name), np.float32)
            for checkpoint in (average, *(run / f"epoch_0_step_{step}" for step in (4, 6, 8)))
        )
        expected = np.mean([values.astype(np.float64) for values in sources], axis=0)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    assert os.readlink(run / "LATEST") == "epoch_0_step_8"
    # Other programs load it.
    AutoModelForCausalLM.from_pretrained(average / "model")
    # An average that a kill prevented is made by the next start.
    shutil.rmtree(run / "averaged")
    ended = train(run, "--checkpoint.average_last", "2")
    assert ended.returncode == 0 and len(Manifest.read(average).lineage["averaged_from"]) == 2


def test_a_directory_that_cannot_be_written_ends_the_run_before_the_model_is_built(
    train: Train,
) -> None:
    ended = train(Path("/dev/null/x"), "--nproc-per-node", "2")
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("opening checkpoint.checkpoint_dir failed") == 1
    assert "parameters" not in ended.stderr
