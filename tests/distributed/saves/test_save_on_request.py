"""``ckpt save`` and SIGUSR2: a running job saves at its next step and goes on."""

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.servers.command_server import CommandServer

RECIPE = """
model:
  from_config: {model_type: llama, vocab_size: 64, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1,
    num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 32}
tokenizer: null
distributed: {backend: gloo}
dataset: {_target_: automodel_ckpt.examples.data.mock.random_tokens, vocab_size: model, seq_length: 16,
  num_samples: 64}
checkpoint: {on_save_failure: continue}
step_scheduler: {global_batch_size: 8, local_batch_size: 2, max_steps: 1000000, num_epochs: null,
  ckpt_every_epochs: null, ckpt_every_steps: null}
"""
PATIENCE = 60
Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path, commands: CommandServer) -> Iterator[Run]:
    """Start a job in *tmp_path*, and wait for its third step."""
    jobs = []
    (tmp_path / "recipe.yaml").write_text(RECIPE)

    def start(*words: str) -> subprocess.Popen[str]:
        before = num_lines(tmp_path)
        with (tmp_path / "job.log").open("a") as log:
            job = commands.popen(
                "ckpt-train", "recipe.yaml", *words, cwd=tmp_path, stdout=log, stderr=log
            )
        jobs.append(job)
        wait_until(lambda: num_lines(tmp_path) > before + 2)
        return job

    yield start
    for job in jobs:
        job.kill()
        job.wait()


def num_lines(place: Path) -> int:
    log = place / "checkpoints/training.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def saved(place: Path) -> set[str]:
    return {path.parent.name for path in place.glob("checkpoints/epoch_*/MANIFEST.json")}


def test_a_job_saves_on_request_and_goes_on(
    tmp_path: Path, commands: CommandServer, start: Run
) -> None:
    def save(*words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return commands.popen("ckpt", "save", *words, cwd=tmp_path, stdout=pipe, stderr=pipe)

    request = tmp_path / "checkpoints/.save-request"
    job = start()
    out, err = save().communicate()
    first = saved(tmp_path)
    assert [out] == [f"checkpoints/{name}\n" for name in first], err
    assert err.startswith(f"waiting for the next step of process {job.pid} on ")
    assert commands.run("ckpt", "verify", out.strip(), cwd=tmp_path).returncode == 0

    job.send_signal(signal.SIGUSR2)
    wait_until(lambda: len(saved(tmp_path)) == 2)

    # Two requests at the same time are one save.
    job.send_signal(signal.SIGSTOP)
    both = [save("checkpoints"), save("checkpoints", "--json")]
    for command in both:
        assert command.stderr is not None and command.stderr.readline().startswith("waiting")
    job.send_signal(signal.SIGCONT)
    plain, as_json = (command.communicate()[0] for command in both)
    assert json.loads(as_json) == {"checkpoint": plain.strip()}
    assert len(saved(tmp_path)) == 3 and not request.exists()

    # A save that fails.
    resource.prlimit(job.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    failed = save("checkpoints")
    assert "value:  saving epoch_" in failed.communicate()[1]
    assert failed.returncode == 4
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(job.pid, resource.RLIMIT_FSIZE, unlimited)

    # A job that ends first.
    job.send_signal(signal.SIGSTOP)
    late = save("checkpoints")
    assert late.stderr is not None and late.stderr.readline()
    job.kill()
    assert "value:  the run ended before it saved" in late.communicate()[1]
    assert late.returncode == 4 and request.exists()

    none = save("checkpoints")
    assert none.communicate()[1].startswith("error: no run uses this directory\n")
    assert none.returncode == 2

    # The next start saves for none of them.
    job = start()
    assert not request.exists() and len(saved(tmp_path)) == 3
    job.terminate()
    assert job.wait(PATIENCE) == 75


@pytest.mark.parametrize("is_async", ["true", pytest.param("false", marks=pytest.mark.further)])
def test_ranks_save_on_a_request_of_any_of_them(
    tmp_path: Path, commands: CommandServer, start: Run, is_async: str
) -> None:
    job = start("--nproc-per-node=2", "--checkpoint.is_async", is_async)
    done = commands.run("ckpt", "save", "checkpoints", cwd=tmp_path)
    assert [done.stdout] == [f"checkpoints/{name}\n" for name in saved(tmp_path)], done.stderr
    ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    for number, pid in enumerate([job.pid, max(map(int, ranks))], 2):
        os.kill(pid, signal.SIGUSR2)
        wait_until(lambda: len(saved(tmp_path)) == number)  # noqa: B023 - called here
    job.terminate()
    assert job.wait(PATIENCE) == 75, (tmp_path / "job.log").read_text()


def test_a_store_is_no_running_job(commands: CommandServer) -> None:
    done = commands.run("ckpt", "save", "s3://bucket/run")
    assert done.returncode == 2 and "specify the local checkpoint_dir" in done.stderr
