"""Machines whose own name leads nowhere useful: network namespaces, where 127.0.0.1 is not that of another."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed import DistNetworkError, HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from automodel_ckpt.cli.launch.elastic_agent import is_of_ending_run, rendezvous_failure
from automodel_ckpt.cli.launch.failure_directory import FailureDirectory
from automodel_ckpt.cli.launch.failures import FailureRecord, unreachable_node_record
from automodel_ckpt.cli.launch.rendezvous_flags import Rendezvous
from automodel_ckpt.cli.launch.rendezvous_host import RendezvousHost, RendezvousInterrupted
from automodel_ckpt.parallel.ranks import keepalive
from automodel_ckpt.parallel.ranks.network import (
    address_towards,
    bound_silence,
    interface_of,
    is_loopback,
    is_own_address,
    let_gloo_be_found,
)
from automodel_ckpt.parallel.ranks.rendezvous import HostedRendezvous
from tests.distributed.faults.test_launch import wait_until
from tests.support.ranks import free_port, without_gloo_greetings
from tests.support.servers.command_server import CommandServer
from tests.support.servers.networks import LINK, NoNamespacesError, ip, nodes_at

ROOT = Path(__file__).parents[3]
FAKE = "tests.support.runs.fake_train"
FIRST, SECOND, THIRD = "10.77.41.1", "10.77.41.2", "10.77.41.3"


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """The names of three network namespaces that reach each other."""
    try:
        with nodes_at((FIRST, SECOND, THIRD)) as names:
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
    machines = [
        commands.popen(
            "python",
            "-m",
            FAKE,
            "ok",
            "--notes",
            str(tmp_path),
            "--network",
            host,
            *(flag.format(node=node) for flag in meet),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for node, host in enumerate(hosts[:2])
    ]
    ended = [machine.communicate(timeout=90) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], ended
    lines = [line for out, _ in ended for line in without_gloo_greetings(out).splitlines()]
    assert sorted(lines) == ["rank 0 trained", "rank 1 trained"]


def test_when_the_cable_of_a_machine_is_cut_all_machines_name_who_is_lost(
    hosts: list[str], commands: CommandServer, tmp_path: Path
) -> None:
    rendezvous = ["--nnodes=3", f"--rdzv-endpoint={FIRST}:29473", "--rdzv-id=x", "--silence=2"]
    machines = [
        commands.popen(
            "python",
            "-m",
            FAKE,
            "train_until_stopped",
            "--notes",
            str(tmp_path),
            "--network",
            host,
            *rendezvous,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for host in hosts
    ]
    for rank in range(3):
        wait_until((tmp_path / f"training_{rank}").exists, 120)
    wait_until(lambda: all(lines_held(host) for host in hosts), 120)
    ip("-n", hosts[2], "link", "set", LINK, "down")
    try:
        ended = [machine.communicate(timeout=120)[1] for machine in machines]
    finally:
        ip("-n", hosts[2], "link", "set", LINK, "up")
    assert [machine.returncode for machine in machines] == [1, 1, 1]
    said = "error: the node of rank {} does not respond\n  where:  network\n"
    # The second node is connected to the first one only, and reads the failure there. torch sorts nodes by address.
    for text, lost in zip(ended, (2, 2, 0), strict=True):
        assert text.startswith(said.format(lost))


def test_a_launcher_stays_and_joins_again_when_the_machine_of_the_rendezvous_is_replaced(
    hosts: list[str], commands: CommandServer, tmp_path: Path
) -> None:
    rendezvous = ["--nnodes=2", f"--rdzv-endpoint={FIRST}:29474", "--rdzv-id=x", "--max-restarts=1"]

    def begin(host: str) -> subprocess.Popen[str]:
        words = ["train_until_stopped", "--notes", str(tmp_path), "--network", host, *rendezvous]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        return commands.popen(
            "python", "-m", FAKE, *words, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe
        )

    def await_training(times: int) -> None:
        """Wait until both ranks have begun to train so many times."""
        for path in (tmp_path / "training_0", tmp_path / "training_1"):
            wait_until(lambda path=path: path.exists() and len(path.read_text()) >= times, 60)

    machines = [begin(host) for host in hosts[:2]]
    await_training(1)
    machines[0].kill()
    machines[0].communicate()
    time.sleep(1)
    machines[0] = begin(hosts[0])
    await_training(2)
    machines[1].terminate()
    ended = [machine.communicate(timeout=60)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [75, 75], ended
    assert f"joining them again at {FIRST}:29474, for up to 10 minutes\n" in ended[1]


def reset(line: socket.socket) -> None:
    """Close a connection so that the other end gets an error, as for a node that does not answer."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()


def test_only_a_connection_with_the_token_of_the_start_can_report_a_lost_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keepalive, "_MAX_UNKNOWN", 4)
    lost: list[int] = []
    listener = keepalive.listen()
    address = ("127.0.0.1", listener.getsockname()[1])
    serve = (listener, "secret", lambda rank, seconds: lost.append(rank))
    threading.Thread(target=keepalive.serve_connections, args=serve, daemon=True).start()

    def connected(message: bytes) -> socket.socket:
        line = socket.create_connection(address)
        line.sendall(message)
        return line

    def wait_until_read() -> None:
        """Wait until what was sent so far is read: the server reads all connections in turn."""
        with connected(b"wrong\n") as line:
            assert line.recv(1) == b""

    # In parts, as a busy network may deliver it.
    right = connected(b"secret")
    wait_until_read()
    strangers = [connected(text) for text in (b"1", b"1\n", b"secre 1\n", b"secret x\n", b"\xff\n")]
    right.sendall(b" 3\n")
    wait_until_read()
    quiet = [connected(b"") for _ in range(3)]
    other = connected(b"secret 2\n")
    wait_until_read()
    for line in (*strangers, *quiet):
        reset(line)
    other.close()
    wait_until_read()
    assert lost == []
    reset(right)
    wait_until(lambda: lost == [3], 10)
    many = [connected(b"") for _ in range(20)]

    def num_open() -> int:
        found = 0
        for line in many:
            line.setblocking(False)
            try:
                assert line.recv(1) == b""
            except BlockingIOError:
                found += 1
        return found

    wait_until(lambda: num_open() == 4, 10)
    for line in many:
        line.close()


def lines_held(host: str) -> bool:
    """Whether the kernel's probes watch over a connection of this machine."""
    shown = subprocess.run(
        ["ss", "-N", host, "-tno"], check=True, capture_output=True, text=True
    ).stdout
    return "keepalive" in shown


def test_a_long_wait_for_machines_is_told_and_a_signal_ends_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host = RendezvousHost(Rendezvous("c10d", "nowhere.invalid:29400", "x", 2, 3))
    host.report_wait()
    assert capfd.readouterr().err == (
        "waiting for other nodes at nowhere.invalid:29400 (run x): 2 to 3 nodes are required; "
        "the host name nowhere.invalid cannot be resolved\n"
    )
    host.failure_dir = FailureDirectory(tmp_path / "launch_1")
    host.failure_dir.write(0, unreachable_node_record(1, 20))
    host.report_wait()
    assert capfd.readouterr().err.startswith("error: the node of rank 1 does not respond\n")
    with pytest.raises(RendezvousInterrupted), host.waiting():
        host.stop(15)
    with pytest.raises(RendezvousInterrupted), host.during_rendezvous():
        pytest.fail("a later rendezvous does not begin")


def test_a_launcher_that_lost_the_others_joins_again_unless_that_cannot_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = Rendezvous("c10d", "node0:29400", "x", 2, 2)

    def begun(rendezvous: Rendezvous, max_restarts: int, name: str) -> RendezvousHost:
        host = RendezvousHost(rendezvous, max_restarts)
        host.begin(FailureDirectory(tmp_path / name))
        with host.during_rendezvous():
            pass
        return host

    host = begun(endpoint, 1, "joins")
    assert host.may_rejoin()
    with host.during_rendezvous():
        pass
    assert host.restarts == 1
    assert not host.may_rejoin(), "no restart is left"
    host = begun(endpoint, 1, "nodes_join")
    host.joining_nodes()
    with host.during_rendezvous():
        pass
    assert host.restarts == 0, "a restart for nodes that join does not count"
    assert not begun(replace(endpoint, rdzv_backend="local"), 1, "one_node").may_rejoin()
    host = begun(endpoint, 1, "signal")
    assert host.failure_dir is not None
    host.failure_dir.record_signal(15)
    assert not host.may_rejoin()
    host = begun(endpoint, 1, "final")
    assert host.failure_dir is not None
    host.failure_dir.write(0, FailureRecord(1.0, 0, 4, "the disk is full"))
    assert not host.may_rejoin()
    host.lost_connection()
    assert host.may_rejoin(), "the agent stopped the ranks"
    monkeypatch.setattr("automodel_ckpt.cli.launch.rendezvous_host.REJOIN_SECONDS", 0.0)
    assert not host.may_rejoin(), "it tried for too long"


def test_a_launcher_waits_for_the_end_of_an_earlier_run_at_its_address(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = RendezvousConnectionError("The connection to the C10d store has failed.")
    broken.__cause__ = DistNetworkError("recvValue failed on SocketImpl(fd=18)")
    unknown = RendezvousConnectionError("The connection to the C10d store has failed.")
    unknown.__cause__ = DistNetworkError("The client socket has timed out after 60000ms")
    assert is_of_ending_run(RendezvousClosedError()) and is_of_ending_run(broken)
    assert not is_of_ending_run(unknown) and not is_of_ending_run(RendezvousTimeoutError())
    host = RendezvousHost(Rendezvous("c10d", "node0:29400", "x", 2, 2))
    assert host.may_join_later() and host.may_join_later()
    assert capfd.readouterr().err == (
        "waiting for the end of an earlier run at node0:29400, for up to 2 minutes\n"
    )
    monkeypatch.setattr("automodel_ckpt.cli.launch.rendezvous_host.ENDING_SECONDS", 0.0)
    assert not host.may_join_later(), "it waited for too long"
    assert not RendezvousHost(Rendezvous("static", "node0:29400", "x", 2, 2)).may_join_later()


class Inner:
    """A rendezvous whose connection is broken, or not."""

    def __init__(self, is_broken: bool, store: Any = None) -> None:
        self.is_broken, self.calls = is_broken, list[str]()
        self.store = store

    def next_rendezvous(self) -> RendezvousInfo:
        address = RendezvousStoreInfo("node0", 29400)
        return RendezvousInfo(self.store, 0, 2, address)

    def num_nodes_waiting(self) -> int:
        if self.is_broken:
            raise RendezvousConnectionError("broken")
        return 0

    def shutdown(self) -> bool:
        self.calls.append("closed")
        return True

    def _stop_heartbeats(self) -> None:
        self.calls.append("stopped")


@pytest.mark.parametrize(
    ("is_broken", "max_restarts", "calls", "is_kept"),
    [
        (False, 1, [], True),
        (True, 1, ["stopped"], False),
        (False, 0, ["closed"], False),
        (True, 0, ["closed"], False),
    ],
)
def test_an_agent_that_ends_closes_the_rendezvous_only_if_none_follows(
    is_broken: bool, max_restarts: int, calls: list[str], is_kept: bool
) -> None:
    host = RendezvousHost(Rendezvous("c10d", "node0:29400", "x", 2, 2), max_restarts)
    inner: Any = Inner(is_broken)
    hosted = HostedRendezvous(inner, cast(Any, host))
    with contextlib.suppress(RendezvousConnectionError):
        hosted.num_nodes_waiting()
    hosted.shutdown()
    assert inner.calls == calls
    assert (host.kept() is inner) == is_kept


def test_ranks_are_forked_when_the_launchers_of_all_nodes_have_forked_theirs(
    tmp_path: Path,
) -> None:
    store = HashStore()
    nodes = []
    for node in range(2):
        host = RendezvousHost(Rendezvous("c10d", "node0:29400", "x", 2, 2))
        host.begin(FailureDirectory(tmp_path / str(node)))
        inner: Any = Inner(is_broken=False, store=store)
        nodes.append((host.failure_dir, HostedRendezvous(inner, cast(Any, host))))
    (first_dir, first), (second_dir, second) = nodes
    assert first_dir is not None and second_dir is not None
    first.next_rendezvous()
    second.next_rendezvous()
    # The agents ask for waiting nodes again and again, after they have forked.
    first.num_nodes_waiting()
    first.num_nodes_waiting()
    assert not first_dir.has_forked(0)
    second.num_nodes_waiting()
    assert second_dir.has_forked(0)
    first.num_nodes_waiting()
    assert first_dir.has_forked(0)


def test_a_launcher_that_waited_in_vain_says_so() -> None:
    endpoint = Rendezvous("c10d", "node0:29400", "x", 2, 2)
    cases = {
        RendezvousTimeoutError: "the other nodes did not join again within 10 minutes",
        RendezvousClosedError: "another node ended the run",
        RendezvousConnectionError: "the connection to the other nodes broke",
    }
    for kind, said in cases.items():
        message = rendezvous_failure(endpoint, kind("torch")).message
        assert message.splitlines()[:2] == [
            f"error: {said}",
            "  where:  rendezvous c10d at node0:29400",
        ]


def test_addresses_and_interfaces_are_told() -> None:
    assert is_own_address("127.0.0.1")
    assert not is_own_address("192.0.2.1")
    assert is_loopback("localhost")
    assert is_loopback("no such name")
    assert not is_loopback("192.0.2.1")
    assert (interface_of("127.0.0.1"), interface_of("192.0.2.1")) == ("lo", None)
    assert (interface_of("::1") in ("lo", None), interface_of("2001:db8::1")) == (True, None)
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no such name") is None


@pytest.mark.parametrize(
    ("own", "given", "chosen"),
    [
        ("127.0.1.1", {"MASTER_ADDR": "192.0.2.7", "WORLD_SIZE": "2"}, "eth7"),
        ("192.0.2.9", {"MASTER_ADDR": "192.0.2.7", "WORLD_SIZE": "2"}, None),
        ("192.0.2.9", {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}, "lo"),
        ("192.0.2.9", {"MASTER_ADDR": "gpu7", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "lo"),
        ("127.0.1.1", {}, "lo"),
        ("127.0.1.1", {"MASTER_ADDR": "192.0.2.7", "GLOO_SOCKET_IFNAME": "mine"}, "mine"),
    ],
)
def test_gloo_is_told_an_interface_only_where_it_would_not_be_found(
    monkeypatch: pytest.MonkeyPatch, own: str, given: dict[str, str], chosen: str | None
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: own)
    monkeypatch.setattr(
        "automodel_ckpt.parallel.ranks.network.address_towards", lambda host: "192.0.2.9"
    )
    monkeypatch.setattr(
        "automodel_ckpt.parallel.ranks.network.interface_of",
        {"192.0.2.9": "eth7", "127.0.0.1": "lo"}.get,
    )
    let_gloo_be_found(given)
    assert given.get("GLOO_SOCKET_IFNAME") == chosen


def test_connections_to_one_port_are_bounded_and_nothing_else_is_held() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        ports = [server.getsockname()[1] for server in (one, other)]
        lines = [socket.create_connection(("127.0.0.1", port)) for port in ports]
        held = len(os.listdir("/proc/self/fd"))
        bound_silence(ports[0], 7)
        assert len(os.listdir("/proc/self/fd")) == held
        limits = [line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for line in lines]
        for line in lines:
            line.close()
    assert limits == [7000, 0]


SMALL = """\
model:
  from_config: {model_type: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
    intermediate_size: 16, vocab_size: 64}
dataset: {_target_: automodel_ckpt.data.mock.random_tokens, vocab_size: 64, seq_length: 8, num_samples: 64}
distributed: {backend: gloo}
step_scheduler: {global_batch_size: 8, local_batch_size: 2, max_steps: 20, ckpt_every_steps: 10}
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
        pytest.param((["--nproc-per-node=2", "--rdzv-endpoint=0.0.0.0:29871"], {}), id="endpoint"),
        pytest.param(([], {}), id="one rank"),
        pytest.param(
            ([], {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}), id="env"
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
        time.sleep(0.02)
    assert process.returncode == 0
    assert found <= {"0100007F", "0000000000000000FFFF00000100007F"}
    assert found or not words, "no socket was seen"


SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "1"}


@pytest.mark.parametrize(
    ("variables", "missing", "alone"),
    [
        ({**SRUN, "SLURM_PROCID": "0"}, "ranks 1, 2, 3 of 4", "unset SLURM_PROCID"),
        ({**SRUN, "SLURM_PROCID": "2"}, "rank 0 of 4", "unset SLURM_PROCID"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "rank 1 of 2", "unset RANK"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "rank 0 of 2", "unset RANK"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            "the launcher's store at 127.0.0.1:{MASTER_PORT}",
            "unset RANK",
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
