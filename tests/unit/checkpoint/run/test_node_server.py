"""What the server of a node's memory checkpoints refuses, and how copies and publications arrive."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.memory import node_process
from automodel_ckpt.checkpoint.memory.node_process import NodeProcess, NodeServer
from automodel_ckpt.checkpoint.memory.requests import (
    Address,
    HangReports,
    NodeFailed,
    command,
    listens,
    read_range,
    send_file,
)
from automodel_ckpt.checkpoint.memory.save_files import files_below, mark_save, save_digest
from automodel_ckpt.checkpoint.store.transfer import Throttle
from automodel_ckpt.errors import SaveFailed
from tests.support.servers.serving import serve

TOKEN = "secret"
NAME = "epoch_0_step_7"
STAGING = layout.staging_name(NAME, "0" * 32)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NodeServer]:
    root = tmp_path / "node"
    (root / NAME / "model").mkdir(parents=True)
    (root / NAME / "model" / "file").write_bytes(b"0123456789")
    (root / STAGING).mkdir()
    (tmp_path / "outside").write_text("private")
    served = NodeServer(root, Address("127.0.0.1", 0), TOKEN)
    threading.Thread(target=serve, args=(served,), daemon=True).start()
    yield served
    served.shutdown()
    served.server_close()


def address(server: NodeServer) -> Address:
    return Address("127.0.0.1", server.server_address[1])


def answers(server: NodeServer, request: object, body: bytes = b"") -> list[Any]:
    """What the server answers to a request that may be invalid."""
    if isinstance(request, dict):
        request = {"token": TOKEN, **request}
    with socket.create_connection(address(server), 120) as connection:
        connection.sendall(json.dumps(request).encode() + b"\n" + body)
        connection.shutdown(socket.SHUT_WR)
        return [json.loads(line) for line in connection.makefile("rb")]


INVALID = [{"error": "the request is not valid"}]


def test_byte_ranges_are_read(server: NodeServer) -> None:
    assert read_range(address(server), TOKEN, f"{NAME}/model/file", 2, 5) == b"234"
    assert read_range(address(server), TOKEN, f"{NAME}/model/file", 5, 5) == b""
    with pytest.raises(FileNotFoundError):
        read_range(address(server), TOKEN, f"{NAME}/model/other", 0, 1)
    with pytest.raises(NodeFailed, match="does not have the bytes 5 to 11"):
        read_range(address(server), TOKEN, f"{NAME}/model/file", 5, 11)


def test_who_does_not_know_the_token_is_refused(server: NodeServer) -> None:
    with pytest.raises(NodeFailed, match="token of another start"):
        read_range(address(server), "guess", f"{NAME}/model/file", 0, 1)
    with pytest.raises(NodeFailed, match="token of another start"):
        command(address(server), "guess", {"do": "keep", "names": [NAME]})
    assert (server.root / NAME).is_dir()


@pytest.mark.parametrize(
    "name",
    ["../outside", f"{NAME}/../../outside", f"{NAME}//etc/passwd", "owner.json", "", NAME, 5],
)
def test_only_files_of_checkpoints_can_be_named(server: NodeServer, name: object) -> None:
    assert answers(server, {"do": "read", "name": name, "start": 0, "end": 1}) == INVALID
    assert answers(server, {"do": "write", "name": name, "nbytes": 4}, b"data") == INVALID


def test_links_are_not_followed(server: NodeServer, tmp_path: Path) -> None:
    (server.root / NAME / "link").symlink_to(tmp_path / "outside")
    (answer,) = answers(server, {"do": "read", "name": f"{NAME}/link", "start": 0, "end": 1})
    assert "error" in answer


def test_published_files_cannot_be_replaced(server: NodeServer) -> None:
    name = f"{NAME}/model/file"
    assert answers(server, {"do": "write", "name": name, "nbytes": 4}, b"data") == INVALID
    assert (server.root / NAME / "model" / "file").read_bytes() == b"0123456789"


def test_a_copy_appears_complete_and_a_late_one_creates_no_directory(
    server: NodeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    (source / STAGING / "optim").mkdir(parents=True)
    (source / STAGING / "optim" / "big").write_bytes(b"x" * (3 << 20))
    send_file(address(server), TOKEN, source, f"{STAGING}/optim/big", Throttle())
    assert (server.root / STAGING / "optim" / "big").stat().st_size == 3 << 20
    assert server.received(STAGING) == {"optim/big"}
    assert list(files_below(server.root / STAGING)) == ["optim/big"]
    late = layout.staging_name(NAME, "1" * 32)
    (source / late).mkdir()
    (source / late / "file").write_bytes(b"x")
    monkeypatch.setattr("automodel_ckpt.checkpoint.memory.requests._READY_SECONDS", 0.1)
    with pytest.raises(NodeFailed, match="could not store"):
        send_file(address(server), TOKEN, source, f"{late}/file", Throttle())
    assert not (server.root / late).exists()


def test_an_interrupted_copy_leaves_nothing(server: NodeServer) -> None:
    request = {"do": "write", "name": f"{STAGING}/file", "nbytes": 100}
    accepted, answer = answers(server, request, b"only a part")
    assert accepted == {} and answer == {"error": "the connection ended"}
    assert list((server.root / STAGING).iterdir()) == []


def test_a_publication_replaces_that_of_a_failed_save_and_is_kept_alone(server: NodeServer) -> None:
    (server.root / "epoch_0_step_6").mkdir()
    mark_save(server.root / NAME, "xxh3:00")
    (server.root / STAGING / "new").write_text("new")
    document = {"do": "publish", "staging": STAGING, "name": NAME, "digest": "xxh3:1f"}
    command(address(server), TOKEN, document)
    assert sorted(path.name for path in (server.root / NAME).iterdir()) == [".save", "new"]
    assert save_digest(server.root / NAME) == ("xxh3:1f", False)
    command(address(server), TOKEN, {"do": "keep", "names": [NAME]})
    assert [path.name for path in server.root.iterdir()] == [NAME]


def test_what_no_save_has_written_stays(server: NodeServer) -> None:
    """The directory with the name of the checkpoint that is published, and others."""
    (server.root / "epoch_0_step_6").mkdir()
    (server.root / "epoch_0_step_6" / "notes.txt").write_text("mine")
    (server.root / "epoch_0_step_5").symlink_to(server.root)
    document = {"do": "publish", "staging": STAGING, "name": NAME, "digest": "xxh3:1f"}
    command(address(server), TOKEN, document)
    command(address(server), TOKEN, {"do": "keep", "names": [NAME]})
    assert list(files_below(server.root / f"{NAME}.superseded-1")) == ["model/file"]
    assert (server.root / "epoch_0_step_6" / "notes.txt").read_text() == "mine"
    assert (server.root / "epoch_0_step_5").is_symlink()


@pytest.mark.parametrize(
    "document",
    [
        {"do": "publish", "staging": NAME, "name": NAME, "digest": "x"},
        {"do": "publish", "staging": STAGING, "name": "../x", "digest": "x"},
        {"do": "publish", "staging": STAGING, "name": NAME, "digest": "\n"},
        {"do": "keep", "names": [".."]},
        {"do": "keep"},
        {"do": "remove"},
        {"do": "publish", "staging": STAGING, "name": NAME, "digest": 5},
        [],
    ],
)
def test_other_commands_are_refused(server: NodeServer, document: object) -> None:
    assert answers(server, document) == INVALID
    assert (server.root / STAGING).is_dir() and (server.root / NAME).is_dir()


def test_a_process_that_fails_is_replaced_at_the_port_that_other_nodes_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a command that was canceled: its answer would be taken for the next one's."""

    def cancel() -> None:
        raise SaveFailed("canceled", where="here", value="", hint="")

    with pytest.raises(NodeFailed, match=r"(?i)address"):
        NodeProcess(tmp_path, "192.0.2.1", TOKEN)
    process = NodeProcess(tmp_path, "127.0.0.1", TOKEN)
    address, pids = process.address, [process.pid]
    commanded = {"do": "keep", "names": [NAME], "to": []}

    def assert_replaced() -> None:
        process.do(commanded, lambda: None)
        assert process.pid not in pids and process.address == address
        pids.append(process.pid)

    with closing(process):
        process.do(commanded, lambda: None)
        os.kill(pids[-1], signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(node_process, "STALLED_SECONDS", 0.1)
            with pytest.raises(NodeFailed, match="nothing for 0 s"):
                process.do(commanded, lambda: None)
        assert_replaced()
        with pytest.raises(NodeFailed, match="canceled"):
            process.do(commanded, cancel)
        assert_replaced()
        os.kill(pids[-1], signal.SIGKILL)
        wait_until(lambda: not listens(address))
        process.start_again()
        assert listens(address)
        assert_replaced()
        process.kill()
        with socket.create_server(address), pytest.raises(NodeFailed, match=r"(?i)address"):
            process.do(commanded, lambda: None)
        assert_replaced()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def write_report(run: Path, file: str, text: str = "state") -> None:
    path = run / layout.HANGS / file
    path.parent.mkdir(parents=True, exist_ok=True)
    # As ranks do: no other process reads half of it.
    path.with_name(".staged").write_text(text)
    path.with_name(".staged").rename(path)


def reports_in(run: Path) -> dict[str, str]:
    root = run / layout.HANGS
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.txt")}


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_each_node_gets_the_reports_on_hangs_of_the_others(tmp_path: Path) -> None:
    """Those of earlier starts are not sent. A process that was killed sends them again."""
    roots = [tmp_path / "first", tmp_path / "second"]
    for root in roots:
        write_report(root, "step_1/rank_0.txt", f"earlier start of {root.name}")
    first, second = [NodeProcess(root, "127.0.0.1", TOKEN) for root in roots]
    with closing(first), closing(second):
        first.send_reports([second.address])
        second.send_reports([first.address])
        write_report(roots[0], "step_3/rank_0.txt", "waits")
        wait_until(lambda: "step_3/rank_0.txt" in reports_in(roots[1]))
        write_report(roots[1], "step_3/rank_1.txt", "is late")
        write_report(roots[1], "step_3/stacks_of_rank_2.txt", "is suspended")
        wait_until(lambda: len(reports_in(roots[0])) == 4)
        first.kill()
        first.do({"do": "keep", "names": [NAME], "to": []}, lambda: None)
        write_report(roots[0], "step_3/report.txt", "rank 1 did not arrive")
        wait_until(lambda: "step_3/report.txt" in reports_in(roots[1]))
    expected = {
        "step_3/rank_0.txt": "waits",
        "step_3/rank_1.txt": "is late",
        "step_3/stacks_of_rank_2.txt": "is suspended",
        "step_3/report.txt": "rank 1 did not arrive",
    }
    for root in roots:
        earlier = {"step_1/rank_0.txt": f"earlier start of {root.name}"}
        assert reports_in(root) == expected | earlier


@pytest.mark.parametrize(
    "file", ["step_3/other.txt", "rank_0.txt", "../rank_0.txt", "step_3/../rank_0.txt", ""]
)
def test_only_reports_are_accepted_as_reports(server: NodeServer, file: str) -> None:
    name = f"{layout.HANGS}/{file}"
    assert answers(server, {"do": "write", "name": name, "nbytes": 5}, b"state") == INVALID
    name = f"{layout.HANGS}/step_3/rank_0.txt"
    assert answers(server, {"do": "read", "name": name, "start": 0, "end": 1}) == INVALID
    assert not (server.root / layout.HANGS).exists()


@pytest.mark.parametrize("link", [layout.HANGS, f"{layout.HANGS}/step_3"])
def test_reports_are_not_written_through_links(tmp_path: Path, link: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    run = tmp_path / "run"
    (run / link).parent.mkdir(parents=True)
    (run / link).symlink_to(outside)
    with pytest.raises(NotADirectoryError, match="symbolic link"):
        HangReports(run, lambda *_: None).receive("step_3/rank_0.txt", b"state")
    assert list(outside.iterdir()) == []
