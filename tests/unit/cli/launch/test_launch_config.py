"""The launcher passes only settings to torch's elastic agent that the installed version of torch has."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from automodel_ckpt.cli.launch.elastic_agent import known_fields


@dataclass
class OldLaunchConfig:
    """LaunchConfig of torch 2.10 and 2.11, as far as this test needs it."""

    max_restarts: int = 3


@dataclass
class NewLaunchConfig(OldLaunchConfig):
    shutdown_timeout: int = 30


def test_a_setting_that_this_torch_lacks_is_left_out() -> None:
    settings = {"max_restarts": 1, "shutdown_timeout": 10}
    assert known_fields(OldLaunchConfig, settings) == {"max_restarts": 1}
    assert known_fields(NewLaunchConfig, settings) == settings


ENDED = """
import os, signal, sys, time
from pathlib import Path
from automodel_ckpt.cli.launch.failure_directory import FailureDirectory
from automodel_ckpt.cli.launch.failures import FailureRecord
from automodel_ckpt.cli.launch.signal_forwarder import SignalForwarder
from automodel_ckpt.cli.launch.rendezvous_host import RendezvousHost
from automodel_ckpt.cli.launch.rendezvous_flags import choose_rendezvous
from automodel_ckpt.config.tree.flags import LaunchFlags
failure_dir = FailureDirectory(Path(sys.argv[1]))
codes = [int(code) for code in sys.argv[2:]]
for rank, code in enumerate(codes):
    if (child := os.fork()) == 0:
        failure_dir.register_process(0, rank)
        if code:
            failure_dir.write(0, FailureRecord(1.0, rank, code, f"ended with {code}"))
        if code < 128:
            failure_dir.mark_done(0, rank)
        os._exit(0)
    os.waitpid(child, 0)
with SignalForwarder(failure_dir, RendezvousHost(choose_rendezvous(LaunchFlags(), {}))):
    for pause in (1.1, 0):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(pause)
    print("not reached")
"""


AFTERWARDS = """
import os, signal, sys
from pathlib import Path
from automodel_ckpt.cli.launch.failure_directory import FailureDirectory
from automodel_ckpt.cli.launch.signal_forwarder import SignalForwarder
from automodel_ckpt.cli.launch.rendezvous_host import RendezvousHost
from automodel_ckpt.cli.launch.rendezvous_flags import choose_rendezvous
from automodel_ckpt.config.tree.flags import LaunchFlags
forwarder = SignalForwarder(
    FailureDirectory(Path(sys.argv[1])), RendezvousHost(choose_rendezvous(LaunchFlags(), {}))
)
with forwarder:
    if sys.argv[2] == "stopped":
        os.kill(os.getpid(), signal.SIGUSR1)
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    os.kill(os.getpid(), number)
sys.exit(75)
"""


@pytest.mark.parametrize(("outcome", "code"), [("stopped", 75), ("done", -signal.SIGUSR1)])
def test_signals_to_a_launcher_that_was_stopped_do_not_change_its_exit_code(
    tmp_path: Path, outcome: str, code: int
) -> None:
    command = [sys.executable, "-c", AFTERWARDS, str(tmp_path), outcome]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize(
    ("codes", "code", "text"),
    [
        ((75, 75), 75, "ended with 75\n"),
        ((0, 0), 0, ""),
        ((75, 143), 143, "stopped immediately by a second SIGTERM\n"),
    ],
)
def test_a_second_signal_to_a_launcher_whose_ranks_have_ended_keeps_the_code_of_done_work(
    tmp_path: Path, codes: tuple[int, ...], code: int, text: str
) -> None:
    command = [sys.executable, "-c", ENDED, str(tmp_path), *map(str, codes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", text)
