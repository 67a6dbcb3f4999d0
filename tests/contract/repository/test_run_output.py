"""What a run prints: few lines in a pipe, and on a terminal the progress of the upload that it waits for."""

import contextlib
import os
import pty
import re
import threading
import time
from pathlib import Path

import pytest
from werkzeug.wrappers import Request

from tests.support.servers.command_server import CommandServer
from tests.support.servers.object_store import object_store

RECIPE = Path(__file__).parents[3] / "examples" / "llm_finetune" / "tiny_llama_lora.yaml"
SHORT = ("--validation_dataset.max_samples=4", "--dataset.max_samples=100")


@pytest.mark.timeout(180)
def test_a_run_with_seven_saves_prints_thirty_lines_in_a_pipe(
    tmp_path: Path, commands: CommandServer
) -> None:
    words = ("--step_scheduler.ckpt_every_steps=9", "--step_scheduler.num_epochs=6", *SHORT)
    done = commands.run(
        "ckpt-train", str(RECIPE), *words, "--step_scheduler.ckpt_every_epochs=5", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    printed = (done.stdout + done.stderr).splitlines()
    # Another test may be preparing the same data.
    printed = [line for line in printed if " waiting until another process " not in line]
    assert len(printed) <= 30, done.stderr
    text = "\n".join(printed)
    steps = [int(number) for number in re.findall(r" step +(\d+)/60  epoch", text)]
    assert steps == [*range(3, 61, 3)]
    saves = re.findall(
        r" step +(\d+)/60 .*  validation loss [\d.]+.*  saved epoch_\d_step_\1: ", text
    )
    assert [int(step) for step in saves] == [*range(9, 60, 9), 60]
    assert re.search(r"step  6/60 .*  ends (... \d\d )?\d\d:\d\d\n", text)
    # At the start, what is trained on what, and where it is saved.
    start = text[: text.index(" step ")].splitlines()
    assert len(start) <= 7
    for words_of_line in ("100 samples", "of them trained; 1 rank", "are saved in checkpoints"):
        assert any(words_of_line in line for line in start)
    # log.txt has what -v shows.
    log = (tmp_path / "checkpoints" / "log.txt").read_text()
    assert log.count("training waited") == 7 and "parameter group 0" in log
    assert "parameter group 0" not in text


def uploading_processes(directory: Path) -> dict[int, int]:
    """The processes that upload the run in *directory*, with their nice values."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (process / "cmdline").read_bytes()
            if b"remote.uploader" in line and os.fsencode(directory) in line:
                found[int(process.name)] = os.getpriority(os.PRIO_PROCESS, int(process.name))
    return found


@pytest.mark.timeout(180)
def test_the_upload_at_the_end_has_the_priority_of_the_run_and_shows_its_progress(
    tmp_path: Path, commands: CommandServer
) -> None:
    words = ("--step_scheduler.max_steps=2", "--checkpoint.remote.url=s3://bucket/run", *SHORT)
    with object_store() as store:

        def slow(request: Request) -> None:
            if request.method == "PUT":
                time.sleep(1)

        store.fault = slow
        environment = {**os.environ, "COLUMNS": "200"}
        del environment["AUTOMODEL_CKPT_UPLOAD_NICENESS"]
        terminal, end = pty.openpty()
        run = commands.popen(
            *("ckpt-train", str(RECIPE), *words),
            cwd=tmp_path,
            env=environment,
            stdout=end,
            stderr=end,
        )
        screen = bytearray()

        def read() -> None:
            with contextlib.suppress(OSError):
                while block := os.read(terminal, 1 << 16):
                    screen.extend(block)

        threading.Thread(target=read, daemon=True).start()
        nice: dict[int, int] = {}
        while run.poll() is None:
            nice |= uploading_processes(tmp_path)
            time.sleep(0.05)
        text = screen.decode()
        assert run.returncode == 0, text
        for descriptor in (end, terminal):
            os.close(descriptor)
        assert "uploaded epoch_0_step_2 to s3://bucket/run" in text
        own = os.getpriority(os.PRIO_PROCESS, 0)
        # A process has the priority of the trainer until its job has arrived.
        assert [*nice.values()] == [19, own], text
        assert re.search(r"uploading epoch_0_step_2: [\d.]+ kB of [\d.]+ [kM]B, [\d.]+ k?B/s", text)
