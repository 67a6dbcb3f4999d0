"""A Slurm cluster of one node in a temporary directory, with its own configuration, munge key and ports.

Needs munged, slurmctld and slurmd (Debian: slurm-wlm and munge) and runs as root, since slurmd starts jobs of any user.
Nothing of a Slurm that is installed on this machine is read or changed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel")
NODE = "node0"
NUM_CPUS = 8  # more than there are: the ranks of these small jobs share cores
CREDENTIAL_SECONDS = 5
"""Slurm holds a requeued job back until its old credential has expired: 120 seconds unless this is set."""

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.socket,cred_expire={credential_seconds}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
JobRequeue=1
KillOnBadExit=1
KillWait=30
MessageTimeout=60
SchedulerParameters=sched_interval=2,batch_sched_delay=1
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 CPUs={num_cpus} State=UNKNOWN
PartitionName=main Nodes={node} Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """The programs of Slurm and munge that are not installed here."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


def wait_until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    """Poll until *condition* is true. Raises TimeoutError that names *what* was waited for."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:.0f} seconds")
        time.sleep(0.2)


class Cluster:
    """Daemons of one cluster; a context manager that starts them and ends them with all jobs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin",
            "SLURM_CONF": str(directory / "slurm.conf"),
            "VENV": sys.prefix,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def __enter__(self) -> Cluster:
        try:
            self._configure()
            self._start("munged", *self._munge_arguments())
            wait_until((self.directory / "munge.socket").exists, "munged's socket", 30)
            self._start("slurmctld", "-D")
            self.start_node()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if "slurmctld" in self._daemons:
            with contextlib.suppress(subprocess.SubprocessError):
                self.run("scancel", "--state=RUNNING")
        for process in self._step_daemons():
            _kill_group(process)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()

    def run(self, *command: str) -> str:
        """Run a Slurm command and return what it prints. Raises CalledProcessError with its error text."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=90, check=False
        )
        if done.returncode != 0:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """Fields of ``scontrol show job``: JobState, Restarts, ExitCode and others."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def fail_node(self) -> None:
        """Kill slurmd and all processes of jobs, as a node does that loses power, and report the node as down."""
        for process in self._step_daemons():
            _kill_group(process)
        slurmd = self._daemons.pop("slurmd")
        slurmd.kill()
        slurmd.wait()
        self.run("scontrol", "update", f"NodeName={NODE}", "State=DOWN", "Reason=failed")

    def start_node(self) -> None:
        """Start slurmd and wait until jobs can run on the node."""
        self._start("slurmd", "-D", "-N", NODE) if self._has_multiple_nodes() else self._start(
            "slurmd", "-D"
        )
        wait_until(self._node_is_up, "the node", 60)

    def _node_is_up(self) -> bool:
        try:
            state = self.run("sinfo", "--noheader", "--format=%T").strip()
        except subprocess.CalledProcessError:
            return False  # slurmctld does not answer yet
        if state.startswith("down"):
            with contextlib.suppress(subprocess.CalledProcessError):
                self.run("scontrol", "update", f"NodeName={NODE}", "State=RESUME")
        return state in ("idle", "mixed", "allocated")

    def _has_multiple_nodes(self) -> bool:
        """Whether slurmd takes the name of its node: a build option, which Debian sets."""
        done = subprocess.run(
            ["slurmd", "-h"], env=self.environment, capture_output=True, text=True, check=False
        )
        return "-N" in done.stdout + done.stderr

    def _configure(self) -> None:
        self.directory.chmod(0o755)
        (self.directory / "state").mkdir()
        (self.directory / "spool").mkdir()
        key = self.directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        text = CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            directory=self.directory,
            controller_port=free_port(),
            node_port=free_port(),
            node=NODE,
            num_cpus=NUM_CPUS,
            credential_seconds=CREDENTIAL_SECONDS,
        )
        (self.directory / "slurm.conf").write_text(text)

    def _munge_arguments(self) -> list[str]:
        names = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        files = [f"--{option}={self.directory}/munge.{suffix}" for option, suffix in names.items()]
        # --force: munged refuses a socket below a directory that others may write to, such as /tmp.
        return ["--foreground", "--force", *files]

    def _start(self, program: str, *arguments: str) -> None:
        output = (self.directory / f"{program}.out").open("ab")
        with output:
            self._daemons[program] = subprocess.Popen(
                [program, *arguments],
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _step_daemons(self) -> list[int]:
        """Process ids of slurmstepd and of what it started: their environment names this cluster's configuration."""
        mark = f"SLURM_CONF={self.directory / 'slurm.conf'}".encode()
        daemons = {daemon.pid for daemon in self._daemons.values()} | {os.getpid()}
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in daemons:
                continue
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found


def _kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def free_port() -> int:
    """A TCP port that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
