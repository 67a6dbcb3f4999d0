"""Machines whose own name leads nowhere useful: network namespaces, where 127.0.0.1 is not that of another."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import free_port, without_gloo_greetings
from tests.support.servers.command_server import CommandServer
from tests.support.servers.networks import NoNamespacesError, nodes_at

ROOT = Path(__file__).parents[3]
FAKE = "tests.support.runs.fake_train"
FIRST, SECOND = "10.77.41.1", "10.77.41.2"


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    try:
        with nodes_at((FIRST, SECOND)) as names:
            yield names
    except NoNamespacesError as error:
        pytest.skip(f"no network namespaces here: {error}")


@pytest.mark.parametrize(
    "meet",
    [
        ["--nnodes=2", f"--rdzv-endpoint={FIRST}:29471", "--rdzv-id=x"],
        ["--nnodes=2", f"--master-addr={FIRST}", "--master-port=29472", "--node-rank={node}"],
    ],
    ids=["rendezvous", "master"],
)
def test_machines_that_know_themselves_as_localhost_train_together(
    hosts: list[str], commands: CommandServer, tmp_path: Path, meet: list[str]
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    machines = []
    for node, host in enumerate(hosts):
        flags = ["--notes", str(tmp_path), "--network", host]
        flags += [flag.format(node=node) for flag in meet]
        words = ("python", "-m", FAKE, "ok", *flags)
        pipe = subprocess.PIPE
        machines.append(commands.popen(*words, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe))
    ended = [machine.communicate(timeout=90) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], ended
    lines = [line for out, _ in ended for line in without_gloo_greetings(out).splitlines()]
    assert sorted(lines) == ["rank 0 trained", "rank 1 trained"]


SMALL = """\
model:
  from_config: {model_type: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
    intermediate_size: 16, vocab_size: 64}
dataset: {_target_: automodel_ckpt.examples.data.mock.random_tokens, vocab_size: 64, seq_length: 8, num_samples: 64}
distributed: {backend: gloo}
step_scheduler: {global_batch_size: 8, local_batch_size: 2, max_steps: 8, ckpt_every_steps: 4}
checkpoint: {checkpoint_dir: run, is_async: true, save_consolidated: false, memory: {every_steps: 1, directory: memory}}
"""


def listening(session: int) -> set[str]:
    """The addresses (source: proc(5), in hexadecimal) at which processes of *session* wait for connections."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                sockets[f"socket:[{fields[9]}]"] = fields[1].partition(":")[0]
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(process.name)) == session:
                found |= {os.readlink(entry) for entry in (process / "fd").iterdir()}
    return {sockets[each] for each in found & sockets.keys()}


@pytest.mark.parametrize(
    "start",
    [
        pytest.param((["--nproc-per-node=2"], {}), id="ranks"),
        pytest.param(
            (["--nproc-per-node=2", "--rdzv-endpoint=0.0.0.0:29871"], {}),
            id="endpoint",
            marks=pytest.mark.further,
        ),
        pytest.param(([], {}), id="one rank", marks=pytest.mark.further),
        pytest.param(
            ([], {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}),
            id="env",
            marks=pytest.mark.further,
        ),
    ],
)
def test_on_one_node_no_other_node_can_connect(
    start: tuple[list[str], dict[str, str]], tmp_path: Path, commands: CommandServer
) -> None:
    (tmp_path / "recipe.yaml").write_text(SMALL)
    (tmp_path / "memory").mkdir()
    words, variables = start
    process = commands.popen(
        *("ckpt-train", "recipe.yaml", *words),
        cwd=tmp_path,
        env=os.environ | variables,
        start_new_session=True,
    )
    found: set[str] = set()
    while process.poll() is None:
        found |= listening(process.pid)
        time.sleep(0.1)
    assert process.returncode == 0
    assert found <= {"0100007F", "0000000000000000FFFF00000100007F"}
    assert found or not words, "no socket was seen"


SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "1"}


@pytest.mark.parametrize(
    ("variables", "missing", "alone"),
    [
        ({**SRUN, "SLURM_PROCID": "0"}, "ranks 1, 2, 3 of 4", "unset SLURM_PROCID"),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2"}, "rank 0 of 2", "unset RANK", marks=pytest.mark.further
        ),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            "the launcher's store at 127.0.0.1:{MASTER_PORT}",
            "unset RANK",
            marks=pytest.mark.further,
        ),
    ],
)
def test_missing_ranks_are_reported_and_a_signal_or_the_timeout_ends_the_wait(
    variables: dict[str, str], missing: str, alone: str, tmp_path: Path, commands: CommandServer
) -> None:
    (tmp_path / "recipe.yaml").write_text(SMALL)
    (tmp_path / "memory").mkdir()
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    missing = missing.format(**there)

    def start(minutes: str) -> subprocess.Popen[str]:
        return commands.popen(
            *("ckpt-train", "recipe.yaml", f"--distributed.timeout_minutes={minutes}"),
            cwd=tmp_path,
            env=os.environ | there | variables,
            stderr=subprocess.PIPE,
        )

    waiting = start("30")
    assert waiting.stderr is not None
    line = waiting.stderr.readline()
    assert f"waiting for {missing}, not started yet" in line and alone in line
    waiting.terminate()
    _, text = waiting.communicate()
    assert (waiting.returncode, text) == (75, "stopped by SIGTERM before training began\n")
    ended = start("0.1")
    _, text = ended.communicate()
    assert ended.returncode == 1
    assert "not all ranks of the run have started" in text and f"missing: {missing}" in text
    assert alone in text and "Traceback" not in text and "internal" not in text
