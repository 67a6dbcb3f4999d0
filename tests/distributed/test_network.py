"""Machines whose own name leads nowhere useful: network namespaces, where 127.0.0.1 is not that of another."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from automodel_ckpt.cli.launch.failures import FailureDirectory, unreachable_node_record
from automodel_ckpt.cli.launch.nodes import RendezvousHost, RendezvousInterrupted
from automodel_ckpt.cli.launch.topology import Rendezvous
from automodel_ckpt.distributed.network import (
    address_towards,
    bound_silence,
    interface_of,
    is_loopback,
    is_own_address,
    let_gloo_be_found,
)
from tests.distributed.test_launch import wait_until
from tests.support.command_server import CommandServer
from tests.support.networks import LINK, NoNamespacesError, ip, nodes_at
from tests.support.ranks import without_gloo_greetings

ROOT = Path(__file__).parents[2]
FAKE = "tests.support.fake_train"
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
    meet = ["--nnodes=3", f"--rdzv-endpoint={FIRST}:29473", "--rdzv-id=x", "--silence=2"]
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
            *meet,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for host in hosts
    ]
    for rank in range(3):
        wait_until((tmp_path / f"training_{rank}").exists, 60)
    wait_until(lambda: all(lines_held(host) for host in hosts), 20)
    ip("-n", hosts[2], "link", "set", LINK, "down")
    try:
        ended = [machine.communicate(timeout=30)[1] for machine in machines]
    finally:
        ip("-n", hosts[2], "link", "set", LINK, "up")
    assert [machine.returncode for machine in machines] == [1, 1, 1]
    said = "error: the node of rank {} does not respond\n  where:  network\n"
    # The second node is connected to the first one only, and reads the failure there. torch sorts nodes by address.
    for text, lost in zip(ended, (2, 2, 0), strict=True):
        assert text.startswith(said.format(lost))


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
    with pytest.raises(RendezvousInterrupted), host.meeting():
        pytest.fail("a later meeting does not begin")


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
        ("127.0.1.1", {"MASTER_ADDR": "192.0.2.7"}, "eth7"),
        ("192.0.2.9", {"MASTER_ADDR": "192.0.2.7"}, None),
        ("127.0.1.1", {"MASTER_ADDR": "127.0.0.1"}, None),
        ("127.0.1.1", {}, None),
        ("127.0.1.1", {"MASTER_ADDR": "192.0.2.7", "GLOO_SOCKET_IFNAME": "mine"}, "mine"),
    ],
)
def test_gloo_is_told_an_interface_only_where_it_would_not_be_found(
    monkeypatch: pytest.MonkeyPatch, own: str, given: dict[str, str], chosen: str | None
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: own)
    monkeypatch.setattr(
        "automodel_ckpt.distributed.network.address_towards", lambda host: "192.0.2.9"
    )
    monkeypatch.setattr(
        "automodel_ckpt.distributed.network.interface_of", {"192.0.2.9": "eth7"}.get
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
