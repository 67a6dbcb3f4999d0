"""Real ranks through the real launcher: how they start, how they fail, and what the user reads last."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from tests.support.ranks import free_port, without_gloo_greetings
from tests.support.servers.command_server import CommandServer

ROOT = Path(__file__).parents[3]
FAKE = "tests.support.runs.fake_train"
DISK_FULL = "cannot write\n  where:  shard\n  value:  ENOSPC\n  hint:   make room"


STOPPED = "stopped by SIGUSR1\n  hint:   run it again\n"
Popen = Callable[..., subprocess.Popen[str]]


def fresh(name: str, *words: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *words], text=True, **options)


WAIT_SECONDS = 240
"""How long a command may take on a busy machine. Ranks that must be ended by others do nothing for longer."""


class Command:
    def __init__(
        self, popen: Popen, notes: Path, words: list[str], variables: dict[str, str]
    ) -> None:
        self.notes = notes
        environment = {**os.environ, **variables}
        if "OMP_NUM_THREADS" not in variables:
            environment.pop("OMP_NUM_THREADS", None)
        words = ["python", *words, "--notes", str(notes)]
        options: dict[str, Any] = {"env": environment, "start_new_session": True}
        pipe = subprocess.PIPE
        self.process = popen(*words, cwd=ROOT, stdout=pipe, stderr=pipe, **options)
        self.code: int | None = None
        self.out = self.err = ""

    def wait(self) -> Self:
        out, self.err = self.process.communicate(timeout=WAIT_SECONDS)
        self.out = without_gloo_greetings(out)
        self.code = self.process.returncode
        return self

    def note(self, name: str) -> list[str]:
        path = self.notes / name
        return path.read_text().splitlines() if path.exists() else []

    def pids(self) -> list[int]:
        """Process ids of the ranks of the newest attempt."""
        return [int(self.note(f"started_{rank}")[-1].split()[0]) for rank in (0, 1)]

    def wait_for(self, *notes: str, seconds: float = 90) -> Self:
        wait_until(lambda: all((self.notes / name).exists() for name in notes), seconds)
        return self


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "took too long"
        time.sleep(0.05)


def stop_immediately(command: Command, pid: int, number: int) -> None:
    """Send a signal to a process of *command* again and again until the command has ended.

    Two signals that arrive within a second count as one, and a busy machine may deliver the first one late.
    """
    end = time.monotonic() + WAIT_SECONDS
    while command.process.poll() is None:
        assert time.monotonic() < end, "took too long"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.process.wait(1.5)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Start:
    """Starts commands whose ranks write their notes into one directory."""

    def __init__(self, notes: Path, server: CommandServer) -> None:
        self.notes = notes
        self.server, self.popen = server, server.popen
        self.commands: list[Command] = []

    def __call__(self, case: str, *flags: str, ranks: int = 2, **variables: str) -> Command:
        number = ["--nproc-per-node", str(ranks)] if ranks else []
        return self._begin(self.popen, ["-m", FAKE, case, *flags, *number], variables)

    def fresh(self, case: str) -> Command:
        """Two ranks, in a process that has yet to import what they need."""
        return self._begin(fresh, ["-m", FAKE, case, "--nproc-per-node", "2"], {})

    def torchrun(self, case: str) -> Command:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
        words += [FAKE, case]
        return self._begin(self.popen, words, {"OMP_NUM_THREADS": "1", **self.server.on_path()})

    def srun(self, case: str, *flags: str, come: Sequence[int] = (0, 1)) -> list[Command]:
        """What srun would start for two tasks on one node, those of which that *come*."""
        step = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_ID": "0"}
        step |= {"SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
        tasks = [{"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in come]
        return [self(case, *flags, ranks=0, **step, **task) for task in tasks]

    def _begin(self, popen: Popen, words: list[str], variables: dict[str, str]) -> Command:
        self.commands.append(Command(popen, self.notes, words, variables))
        return self.commands[-1]


@pytest.fixture
def start(tmp_path: Path, commands: CommandServer) -> Iterator[Start]:
    start = Start(tmp_path, commands)
    yield start
    for command in start.commands:
        if command.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.process.pid, signal.SIGKILL)
            command.process.communicate()


def test_two_ranks_that_finish_say_nothing_but_their_own_words(start: Start) -> None:
    done = start.fresh("ok").wait()
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out.split("rank")) == ["", " 0 trained\n", " 1 trained\n"]
    assert done.note("closed_0") == done.note("closed_1") == [""]


@pytest.mark.parametrize(
    ("case", "num_starts", "code", "message"),
    [
        (
            "wrong_everywhere",
            0,
            2,
            "error: the data set is empty\n  where:  dataset\n  value:  0 samples\n",
        ),
        ("save_fails_on_all", 1, 4, f"error: rank 1: {DISK_FULL}\n"),
        ("save_fails_on_one", 1, 4, f"error: {DISK_FULL}\n  rank:   1\n"),
    ],
)
def test_the_first_failing_ranks_code_and_message_are_the_commands_without_a_restart_in_vain(
    start: Start, case: str, num_starts: int, code: int, message: str
) -> None:
    done = start(case, "--max-restarts", "3").wait()
    assert done.code == code
    assert len(done.note("started_0")) == num_starts
    assert done.err.startswith(message)
    assert done.err.count("error:") == 1
    assert "restart" not in done.err and "Traceback" not in done.err
    assert len(done.err.splitlines()) <= 6, "nothing but the message"


def test_a_rank_that_ends_as_if_it_were_done_is_reported(start: Start) -> None:
    done = start("leaves_as_if_done").wait()
    assert (done.code, done.err) == (
        1,
        "error: rank 1 ended with exit code 0 before the run was done, without an error message\n",
    )


def test_a_segfault_is_told_last_after_the_interpreters_own_dump(start: Start) -> None:
    done = start("segfault").wait()
    assert done.code == 1
    assert done.err.startswith("Fatal Python error: Segmentation fault")
    assert done.err.endswith("\nerror: rank 1 was killed by SIGSEGV\n")


def test_an_internal_error_shows_its_traceback_and_then_the_message_last(start: Start) -> None:
    done = start("loses_its_own_connection").wait()
    assert done.code == 1
    assert done.err.startswith("Traceback")
    text = "RuntimeError: tracking server: Connection reset by peer"
    assert done.err.endswith(f"\ninternal error: {text}\n  rank:   1\n")
    assert done.err.count(text) == 2, "the traceback's last line and the message"


def test_a_rank_that_notices_nothing_is_ended_with_the_failing_one(start: Start) -> None:
    done = start("value_error_on_one_of_the_busy").wait()
    assert done.code == 1
    assert done.err.endswith("internal error: ValueError: boom\n  rank:   1\n")
    assert not any(is_alive(pid) for pid in done.pids())


def test_no_orphans_are_left_when_the_launcher_is_killed(start: Start) -> None:
    command = start("train_until_stopped").wait_for("training_0", "training_1")
    command.process.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in command.pids()), 60)


@pytest.mark.parametrize("case", ["killed_beside_a_busy_rank", "fails_at_the_end"])
def test_a_restart_does_not_wait_for_a_rank_that_has_nothing_to_do(start: Start, case: str) -> None:
    command = start(case, "--max-restarts", "1").wait()
    assert command.code == 0 and len(command.note("started_0")) == 2, command.err
    assert command.err.count("restart 1 of 1") == 1
    assert sorted(command.out.splitlines()[-2:]) == ["rank 0 trained", "rank 1 trained"]


def test_a_restart_does_not_wait_for_ranks_of_other_machines(start: Start) -> None:
    rendezvous = f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{free_port()} --rdzv-id x".split()
    commands = [start("killed_once", *rendezvous, "--max-restarts=1", ranks=1) for _ in range(2)]
    assert [command.wait().code for command in commands] == [0, 0]
    assert [len(commands[0].note(f"started_{rank}")) for rank in (0, 1)] == [2, 2]


def test_restarts_end_and_then_the_last_failure_counts(start: Start) -> None:
    done = start("killed", "--max-restarts", "1").wait()
    assert done.code == 1
    assert len(done.note("started_0")) == 2
    assert done.err.splitlines() == [
        "error: rank 1 was killed by SIGKILL (out of memory?)",
        "restart 1 of 1",
        "error: rank 1 was killed by SIGKILL (out of memory?)",
    ]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_the_launcher_stops_all_ranks_in_order(
    start: Start, number: signal.Signals
) -> None:
    command = start("train_until_stopped").wait_for("training_0", "training_1")
    command.process.send_signal(number)
    done = command.wait()
    assert done.code == 75
    assert done.err == f"stopped by {number.name}\n  hint:   run it again\n"
    assert done.note("closed_0") == done.note("closed_1") == [""]


def test_a_signal_that_the_recipe_does_not_list_ends_the_run(start: Start) -> None:
    command = start("train_until_stopped", "--stop-signals", "SIGUSR2", "SIGHUP")
    command.wait_for("training_0", "training_1").process.send_signal(signal.SIGUSR1)
    assert command.wait().code == -signal.SIGUSR1
    wait_until(lambda: not any(is_alive(pid) for pid in command.pids()), 60)


def test_a_signal_ends_a_rank_whose_peers_never_come(start: Start) -> None:
    (alone,) = start.srun("ok", come=[0])
    alone.wait_for("joining_0")
    alone.process.terminate()
    assert (alone.wait().code, alone.err) == (75, "stopped by SIGTERM before training began\n")


def test_a_terminal_that_is_gone_or_a_full_disk_behind_the_output_fails_nothing(
    start: Start,
) -> None:
    words = ["-m", FAKE, "wrong_everywhere", "--notes", str(start.notes)]
    with open("/dev/full", "w") as full:
        process = start.popen("python", *words, cwd=ROOT, stdout=full, stderr=full)
        assert process.wait(WAIT_SECONDS) == 2


def test_a_signal_to_one_rank_stops_all(start: Start) -> None:
    command = start("train_until_stopped").wait_for("training_0", "training_1")
    os.kill(command.pids()[1], signal.SIGTERM)
    done = command.wait()
    assert (done.code, done.err.count("stopped by SIGTERM")) == (75, 1)


def test_a_second_signal_stops_at_once_even_in_a_collective(start: Start) -> None:
    command = start("deaf_until_stopped", "--max-restarts=2").wait_for("training_0", "training_1")
    stop_immediately(command, command.process.pid, signal.SIGTERM)
    done = command.wait()
    assert done.code == 128 + signal.SIGTERM
    end = "the last complete checkpoint is unchanged"
    assert done.err == f"stopped immediately by a second SIGTERM; {end}\n"
    assert not any(is_alive(pid) for pid in command.pids())


def test_a_single_process_takes_signals_itself(start: Start) -> None:
    command = start("train_until_stopped", ranks=1).wait_for("training_0")
    command.process.send_signal(signal.SIGUSR1)
    done = command.wait()
    assert (done.code, done.err) == (75, STOPPED)


def test_a_machine_that_is_done_waits_for_no_machine_whose_rank_was_killed(start: Start) -> None:
    """torch's agent would wait 300 seconds."""
    rendezvous = f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{free_port()} --rdzv-id end".split()
    words = ("killed_at_the_end", *rendezvous, "--max-restarts=1")
    commands = [start(*words, ranks=1) for _ in range(2)]
    assert [command.wait().code for command in commands] == [0, 0], commands[0].err
    assert [len(commands[0].note(f"started_{rank}")) for rank in (0, 1)] == [2, 2]


def test_all_machines_end_with_the_code_of_the_one_that_fails_and_none_is_restarted_in_vain(
    start: Start,
) -> None:
    rendezvous = (
        f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{free_port()} --rdzv-id x --max-restarts 2".split()
    )
    commands = [start("save_fails_on_one", *rendezvous, ranks=1) for _ in range(2)]
    texts = sorted(command.wait().err for command in commands)
    assert [command.code for command in commands] == [4, 4], texts
    assert texts[0] == f"error: {DISK_FULL}\n  rank:   1\n"
    assert texts[1].startswith("error: ranks of node ") and "exit code 4" in texts[1]


def test_a_machine_that_is_gone_is_told_without_a_traceback(start: Start) -> None:
    rendezvous = (
        f"--nnodes 2 --master-addr 127.0.0.1 --master-port {free_port()} --node-rank".split()
    )
    commands = [start("train_until_stopped", *rendezvous, str(node), ranks=1) for node in (0, 1)]
    commands[0].wait_for("training_0", "training_1")
    commands[1].process.kill()
    done = commands[0].wait()
    assert done.code == 1
    # Where a peer resets the connection while it is read, gloo's text has no address.
    assert done.err.replace(" on node 127.0.0.1", "").startswith(
        "error: the connection to another rank broke\n  where:  rank 0\n"
    )
    assert "Traceback" not in done.err


@pytest.mark.further
@pytest.mark.slow
def test_a_machine_that_joins_or_goes_restarts_the_others(start: Start) -> None:
    # torch would take 15 seconds to miss a machine that is gone.
    seconds = "--last-call 3 --heartbeat 2"
    rendezvous = (
        f"--nnodes 1:2 --rdzv-endpoint 127.0.0.1:{free_port()} --rdzv-id x {seconds}".split()
    )
    first = start("train_until_stopped", *rendezvous, ranks=1).wait_for("training_0")
    second = start("train_until_stopped", *rendezvous, ranks=1).wait_for("training_1")
    # The rank of the other node can begin before this one's.
    wait_until(lambda: len(first.note("training_0")) == 2, 60)
    second.process.kill()
    wait_until(lambda: len(first.note("training_0")) > 2, 60)
    first.process.terminate()
    done = first.wait()
    assert done.code == 75
    said = done.err.splitlines()
    assert said[0] == "other nodes wait to join: all ranks start again"
    assert said[-3:] == ["restart 1 of 3", "stopped by SIGTERM", "  hint:   run it again"]


def test_under_torchrun_a_failure_is_printed_before_torchruns_own_table(start: Start) -> None:
    done = start.torchrun("save_fails_on_one").wait()
    assert done.code == 1
    assert done.err.startswith("error: ")


def test_under_torchrun_a_rank_that_saved_for_a_signal_succeeds(start: Start) -> None:
    command = start.torchrun("train_until_stopped").wait_for("training_0", "training_1")
    for pid in command.pids():
        os.kill(pid, signal.SIGUSR1)
    done = command.wait()
    assert done.code == 0
    assert done.err.count("stopped by SIGUSR1") == 1


def test_under_srun_ranks_that_have_saved_end_without_waiting_and_keep_their_code(
    start: Start,
) -> None:
    """Where Slurm's KillOnBadExit is set, srun sends SIGTERM to all tasks when the first one has ended with 75."""
    commands = start.srun("closes_slowly")
    commands[0].wait_for("training_0", "training_1")
    for command in commands:
        command.process.send_signal(signal.SIGUSR1)
    commands[0].wait_for("closing_0", "closing_1")
    time.sleep(1.1)  # a signal that comes sooner counts as the first one
    for command in commands:
        command.process.terminate()
    commands[0].wait_for("closed_0", "closed_1")
    ended = [command.wait() for command in commands]
    assert [command.code for command in ended] == [75, 75]
    assert "".join(command.err for command in ended) == STOPPED


def test_a_launcher_whose_ranks_have_saved_keeps_their_code(start: Start) -> None:
    command = start("closes_slowly").wait_for("training_0", "training_1")
    command.process.send_signal(signal.SIGUSR1)
    command.wait_for("closing_0", "closing_1")
    time.sleep(1.1)
    command.process.terminate()
    done = command.wait()
    assert (done.code, done.err) == (75, STOPPED)


def test_under_srun_a_failure_has_its_own_code_and_is_said_once(start: Start) -> None:
    commands = [command.wait() for command in start.srun("save_fails_on_all")]
    assert [command.code for command in commands] == [4, 4]
    assert "".join(command.err for command in commands) == f"error: rank 1: {DISK_FULL}\n"
