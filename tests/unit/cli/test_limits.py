"""What the system does not allow is named by its limit, and not taken for a defect of the program."""

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from automodel_ckpt.checkpoint.parts.failures import as_failure
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.cli.launch.failures import failure_record
from automodel_ckpt.cli.train import main as train
from automodel_ckpt.errors import SaveFailed, SystemLimit, describe, limit_error
from automodel_ckpt.parallel.ranks.agree import _portable
from tests.support.models.shards import checkpoint_in

TOO_MANY = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/data/x")
RECIPE = Path(__file__).parents[3] / "examples/llm_finetune/tiny_llama_python_docs.yaml"
WITH_WORKERS = """\
model:
  from_config: {model_type: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
    intermediate_size: 16, vocab_size: 64}
dataset: {_target_: automodel_ckpt.examples.data.mock.random_tokens, vocab_size: 64, seq_length: 8, num_samples: 16}
dataloader: {num_workers: 1}
step_scheduler: {global_batch_size: 4, max_steps: 2}
checkpoint: {checkpoint_dir: run, save_consolidated: false}
"""
NO_THREAD = RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("error", "limit"),
    [
        (TOO_MANY, "ulimit -n is "),
        (NO_THREAD, "ulimit -u is "),
        (MemoryError(), "ulimit -v is "),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "ulimit -v is "),
        (OSError(errno.EFBIG, "File too large"), "ulimit -f is "),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            "ulimit -v is ",
        ),
        (
            RuntimeError(
                "unable to open shared memory object </torch_1> in read-write mode: Too many open files (24)"
            ),
            "ulimit -n is ",
        ),
    ],
)
def test_the_limit_is_named_wherever_the_error_passes(error: Exception, limit: str) -> None:
    later = RuntimeError("a loader's worker failed")
    later.__cause__ = error
    for each in (error, later):
        code, message = describe(each)
        assert (
            code == 1
            and message.startswith("error: ")
            and limit in message
            and "internal" not in message
        )
        assert failure_record(each, 0).details == ""
        assert limit in str(_portable(each))
    failure = as_failure(error, "saving step 3", Path("run"))
    assert isinstance(failure, SaveFailed) and limit in str(failure)
    assert "saving step 3 failed" in str(failure) and "defect" not in str(failure)


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        (main, ["ls", "RUN"]),
        (main, ["ls", "RUN", "--json"]),
        (train, ["--help"]),
        (train, ["--print-config", "RECIPE"]),
    ],
)
def test_output_that_cannot_be_written_is_reported_in_one_message(
    tool: Callable[[list[str]], int],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint_in(tmp_path / "run", 1)
    names = {"RUN": str(tmp_path / "run"), "RECIPE": str(RECIPE)}
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert tool([names.get(word, word) for word in words]) == 1
        # What is still buffered does not fail again at exit.
        full.flush()
    assert capsys.readouterr().err.splitlines() == [
        "error: the output could not be written",
        "  where:  standard output",
        "  value:  ENOSPC (No space left on device)",
        "  hint:   write the output to a disk with free space, or to a pipe",
    ]


def test_an_error_has_one_message_where_standard_output_is_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["ls", "nosuch", "--json"]) == 3
        full.flush()
    assert capsys.readouterr().err.startswith("error: checkpoint not found\n  where:  nosuch\n")


def run(limits: str, *command: str) -> subprocess.CompletedProcess[str]:
    line = f'{limits}; exec "$@"'
    return subprocess.run(
        ["bash", "-c", line, "-", *command], capture_output=True, text=True, timeout=60
    )


def test_commands_name_the_limits_that_stop_them(tmp_path: Path) -> None:
    binaries = Path(sys.executable).parent
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {from_config: {model_type: llama}}\n"
        "dataset: {_target_: automodel_ckpt.examples.data.python_docs.language_modeling}\n"
        "step_scheduler: {global_batch_size: 1, local_batch_size: 1}\n"
    )
    done = run("ulimit -n 32", str(binaries / "ckpt-train"), str(recipe))
    assert (
        done.returncode == 1
        and "ulimit -n\n  value:  32\n" in done.stderr
        and "Traceback" not in done.stderr
    )
    directory = str(tmp_path / "run")
    checkpoint_in(tmp_path / "run", 20)
    # A thread's stack takes more address space than there is.
    limits = "ulimit -s 4000000; ulimit -v 3000000"
    command = str(binaries / "ckpt")
    # It computes without threads then.
    assert run(limits, command, "verify", directory).returncode == 0
    # The heartbeat of its lease needs one.
    done = run(limits, command, "prune", "--keep-last=1", directory)
    assert (
        done.returncode == 1
        and "start a thread" in done.stderr
        and "ulimit -v is 3000000" in done.stderr
    )
    assert isinstance(limit_error(NO_THREAD), SystemLimit)


def test_a_checkpoint_without_permission_is_unusable_for_commands_that_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 4 would state that something could not be saved."""

    def denied(path: Path) -> Path:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("automodel_ckpt.cli.common.paths.run_directory", denied)
    assert main(["export", str(tmp_path)]) == 3
    message = capsys.readouterr().err
    assert "cannot be read" in message and "EACCES" in message


def test_a_temporary_directory_that_is_too_long_for_data_workers_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / ("x" * 100)
    directory.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    Path("recipe.yaml").write_text(WITH_WORKERS)
    assert train(["recipe.yaml"]) == 2
    text = capfd.readouterr().err
    assert "TMPDIR" in text and str(directory) in text, text
    assert not Path("run").exists()
