"""Real trainings with a rank that sleeps in a step, and later is suspended: it is named, and all nodes restart."""

import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import goodput_of
from tests.support.runs.training import RECIPE
from tests.support.servers.command_server import CommandServer
from tests.support.servers.networks import NoNamespacesError, nodes_at
from tools.support import ROOT, environment

CODE = """
import os, signal, time
from pathlib import Path
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.loop import TrainingLoop

def sleep_long():
    time.sleep(1000)

class Loop(TrainingLoop):
    def train_step(self, batch, control):
        step = self.step_scheduler.step
        if self.layout.rank == self.layout.world_size - 1:
            if step == 11 and not Path("slept").exists():
                Path("slept").touch()
                sleep_long()
            if step == 20 and not Path("suspended").exists():
                Path("suspended").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
        return super().train_step(batch, control)

class Hanging(LLMFinetune):
    loop_class = Loop
"""
WORDS = (
    "recipe.yaml",
    "--trust=hanging.py",
    "--max-restarts=2",
    "--hangs.min_seconds=2",
    "--step_scheduler.local_batch_size=2",
    "--step_scheduler.num_epochs=4",
    "--step_scheduler.ckpt_every_steps=10",
    "--checkpoint.checkpoint_dir=run",
)
SCRIPT = """
from automodel_ckpt import api

overrides = {
    "hangs.min_seconds": 2,
    "step_scheduler.local_batch_size": 2,
    "step_scheduler.num_epochs": 4,
    "checkpoint.checkpoint_dir": "run",
}
api.train("recipe.yaml", overrides, trust=["hanging.py"])
"""
ADDRESSES = ("10.77.43.1", "10.77.43.2")


@dataclass(frozen=True)
class Nodes:
    """The words that start a command on each of two nodes (*starts*), and the address of the first one (*host*).

    *disks* are the ends of the directories that the nodes see at one path; empty if they see the same directory.
    """

    starts: Sequence[Sequence[str]]
    host: str
    disks: Sequence[str]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    train = ["-m", "tests.support.servers.node_train"]
    with ExitStack() as stack:
        try:
            names = stack.enter_context(nodes_at(ADDRESSES))
        except NoNamespacesError:
            # Two launchers on this machine.
            yield Nodes([["ckpt-train"], ["ckpt-train"]], "127.0.0.1", ("", ""))
            return
        starts = [["python", *train, name] for name in names]
        yield Nodes(starts, ADDRESSES[0], [f"-{name}" for name in names])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "hanging.py").write_text(CODE)
    (tmp_path / "recipe.yaml").write_text(f"recipe: hanging.py:Hanging\n{RECIPE}")
    return tmp_path


@pytest.mark.further
def test_the_rank_that_does_not_arrive_is_named_and_all_nodes_restart(
    directory: Path, commands: CommandServer, nodes: Nodes
) -> None:
    """They share no storage, and exchange what they find out.

    No node can look up its own host name, as in some containers: it is not in /etc/hosts.
    """
    host, disk, url = nodes.host, directory / "disk", f"file://{directory}/store"
    flags = ["--nnodes=2", f"--rdzv-endpoint={host}:29481", "--rdzv-id=hangs"]
    stored = [f"--checkpoint.checkpoint_dir={url}", f"--checkpoint.scratch_dir={disk}"]
    # No other rank of its node can examine the one that is suspended.
    ranks = ["--nproc-per-node=1", "--step_scheduler.global_batch_size=4"]
    # The step after the last hang, and another one.
    ranks += ["--step_scheduler.max_steps=22"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    options["env"] = environment(PYTHONPATH=str(ROOT), NODE_DISK=str(disk))
    commands_of_nodes = [
        commands.popen(*words, *WORDS, *flags, *ranks, *stored, cwd=directory, **options)
        for words in nodes.starts
    ]
    try:
        logs = [command.communicate(timeout=120)[0] for command in commands_of_nodes]
    finally:
        for command in commands_of_nodes:
            command.kill()
            command.wait()
    assert [command.returncode for command in commands_of_nodes] == [0, 0], logs
    found = dict(
        re.findall(r"step (\d+) hangs: it takes \d+ s, and the median is .*\n(.*)\n", "".join(logs))
    )
    assert sorted(found) == ["12", "21"], logs
    if host == ADDRESSES[0]:
        assert all(text.startswith("  rank 1 (node ckpt-") for text in found.values())
    texts = [re.sub(r" \(node [^)]*\)", "", found[step]) for step in ("12", "21")]
    assert texts[0] == "  rank 1 did not arrive: in a step: sleep_long (hanging.py:8)"
    assert texts[1].startswith("  rank 1 does not respond: its node or process may be lost")
    for log in logs:
        # Which launcher finds it first depends on the time.
        assert len(re.findall("restart . of 2|all ranks start again", log)) == 2, log
    runs = [next(Path(f"{disk}{suffix}").iterdir()) for suffix in nodes.disks]
    for run in runs:
        hangs = run / "hangs"
        assert "in sleep_long" in (hangs / "step_12/rank_1.txt").read_text()
        for step in (12, 21):
            assert "distributed_c10d.py" in (hangs / f"step_{step}/rank_0.txt").read_text()
    starts_of_run = goodput_of(runs[0])["starts"]
    assert [start["first_step"] for start in starts_of_run] == [0, 10, 20]
    assert [start["outcome"] for start in starts_of_run] == ["killed", "killed", "done"]
    # torch's agent would wait half a minute for a rank that ends for no signal.
    for start, following in pairwise(starts_of_run):
        assert following["began"] - start["began"] - sum(start["seconds"].values()) < 25


SLEEPS, SUSPENDED = "12", "21"
"""The steps in which a rank sleeps, or is suspended."""


@pytest.mark.parametrize(
    ("program", "hangs"),
    [
        ("ckpt-train", [SLEEPS, SUSPENDED]),
        pytest.param("torchrun ckpt-train", [SUSPENDED], marks=pytest.mark.further),
        pytest.param("torchrun train()", [SLEEPS], marks=pytest.mark.further),
    ],
)
def test_the_ranks_of_one_node_restart(
    directory: Path, commands: CommandServer, program: str, hangs: list[str]
) -> None:
    (directory / "script.py").write_text(SCRIPT)
    for step, past in ((SLEEPS, "slept"), (SUSPENDED, "suspended")):
        if step not in hangs:
            (directory / past).touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torchrun = ["torchrun", "--nproc-per-node=2", "--max-restarts=2", f"--master-port={port}"]
    flags = [word for word in WORDS if "restarts" not in word]
    words = {
        "ckpt-train": ["ckpt-train", "--nproc-per-node=2", *WORDS],
        "torchrun ckpt-train": [*torchrun, "-m", "automodel_ckpt.cli.train", *flags],
        "torchrun train()": [*torchrun, "script.py"],
    }
    variables = environment(PYTHONPATH=str(ROOT), **commands.on_path())
    done = commands.run(*words[program], cwd=directory, env=variables, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"error: step (\d+) hangs: it takes .*\n(.*)\n", done.stderr))
    assert list(found) == hangs
    reports = directory / "run/hangs"
    if SLEEPS in hangs:
        assert found[SLEEPS] == "  rank 1 did not arrive: in a step: sleep_long (hanging.py:8)"
        assert "in sleep_long" in (reports / "step_12/rank_1.txt").read_text()
        assert "distributed_c10d.py" in (reports / "step_12/rank_0.txt").read_text()
    if SUSPENDED in hangs:
        assert re.fullmatch(r"  rank 1 is suspended \(process \d+\)", found[SUSPENDED])
    starts = goodput_of(directory / "run")["starts"]
    assert [start["outcome"] for start in starts] == [*["killed"] * len(hangs), "done"]
    # torchrun kills a rank that ends for no signal after half a minute.
    most = 25 if program == "ckpt-train" else 50
    for start, following in pairwise(starts):
        assert following["began"] - start["began"] - sum(start["seconds"].values()) < most
