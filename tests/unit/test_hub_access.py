"""What a repository of the Hub that cannot be read is reported as, by one request, and which commit is used."""

import errno
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, hf_hub_download

from automodel_ckpt.base import hub_access
from automodel_ckpt.base.hub_access import cached_commit, check_access, explained, resolve_commit
from automodel_ckpt.errors import RecipeError
from tests.support.servers.hub_server import (
    TOKEN,
    HubServer,
    Reply,
    Request,
    Reset,
    error,
    hub_server,
    using,
)

LOGIN = "`hf auth login`"


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with hub_server() as running:
        yield running


@pytest.fixture
def home(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    server.reset()
    monkeypatch.setattr(hub_access, "_PAUSES", (0.01, 0.01))
    with using(server, str(tmp_path), monkeypatch):
        yield tmp_path
    hub_access._lost.clear()


def problem(name: str, revision: str | None = None) -> str:
    with pytest.raises(RecipeError) as caught:
        resolve_commit(name, revision, where="model.from_pretrained")
    return str(caught.value)


def reset(request: Request) -> Reply:
    raise Reset


def test_the_commit_of_a_branch_and_of_a_missing_probe_file(server: HubServer, home: Path) -> None:
    model = server.add("a/model", {"config.json": b"{}"})
    model.commit("v2", {}, "no config")
    assert resolve_commit("a/model", where="x") == model.branches["main"]
    assert resolve_commit("a/model", "v2", where="x") == model.branches["v2"]
    assert len(server.requests) == 2


def test_a_repository_that_was_renamed_is_followed(server: HubServer, home: Path) -> None:
    model = server.add("new/name", {"config.json": b"{}"})

    def redirect(request: Request) -> Reply | None:
        if "/old/name/" not in request.path:
            return None
        return Reply(307, b"", {"Location": request.path.replace("/old/", "/new/")})

    server.fault = redirect
    assert resolve_commit("old/name", where="x") == model.branches["main"]
    # The token goes to no other host.
    server.fault = lambda request: Reply(307, b"", {"Location": "http://127.0.0.1:1/x"})
    assert resolve_commit("old/name", where="x") is None


@pytest.mark.parametrize(
    ("token", "name", "revision", "expected"),
    [
        (None, "a/gated", None, ("gated", "request access at ENDPOINT/a/gated, then " + LOGIN)),
        (TOKEN, "a/gated", None, ("gated", "request access at ENDPOINT/a/gated\n")),
        (None, "a/private", None, ("no such model, or it is private", LOGIN)),
        (None, "a/none", None, ("no such model, or it is private", LOGIN)),
        (TOKEN, "a/none", None, ("no such model, or it is private", "has no access")),
        ("hf_other", "a/model", None, ("the Hub rejects the token", LOGIN)),
        (TOKEN, "a/model", "v3", ("no such branch, tag or commit", "a/model@v3")),
        (TOKEN, "a/model", "../../x", ("not a branch, tag or commit", "../../x")),
    ],
)
def test_each_cause_has_a_message_that_states_what_to_do(
    server: HubServer,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    token: str | None,
    name: str,
    revision: str | None,
    expected: tuple[str, ...],
) -> None:
    server.add("a/model", {"config.json": b"{}"})
    server.add("a/gated", {"config.json": b"{}"}, gated="manual")
    server.add("a/private", {"config.json": b"{}"}, private=True)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    else:
        monkeypatch.delenv("HF_TOKEN")
    text = problem(name, revision) + "\n"
    for part in expected:
        assert part.replace("ENDPOINT", server.endpoint) in text
    assert TOKEN not in text and len(text.splitlines()) <= 4
    assert len(server.requests) <= 1


def test_a_rate_limit_and_a_failure_of_the_hub(server: HubServer, home: Path) -> None:
    server.add("a/model", {"config.json": b"{}"})
    server.fault = lambda request: error(429, Retry_After="300")
    assert "try again in 300 s" in problem("a/model")
    assert len(server.requests) == 1
    server.requests.clear()
    server.fault = lambda request: error(503)
    assert "the Hub has a failure (503)" in problem("a/model")
    assert len(server.requests) == 3
    replies = iter([error(429, Retry_After="0"), error(500)])
    server.fault = lambda request: next(replies, None)
    assert resolve_commit("a/model", where="x") == server.repository("a/model").branches["main"]


def test_without_a_network_the_cache_is_used_and_nothing_is_repeated(
    server: HubServer, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    main = server.add("a/model", {"config.json": b"{}"}).branches["main"]
    hf_hub_download("a/model", "config.json")
    server.fault = reset
    assert "cannot be reached, and this model is not in the cache" in problem("a/other")
    with caplog.at_level(logging.WARNING, "automodel_ckpt"):
        assert resolve_commit("a/model", where="x") == main
    assert f"the Hub cannot be reached; using commit {main[:12]}" in caplog.text
    assert constants.HF_HUB_OFFLINE
    server.requests.clear()
    assert "`hf download a/other`" in problem("a/other")
    assert "HF_HUB_OFFLINE" not in problem("a/other")
    assert resolve_commit("a/model", where="x") == main
    assert not server.requests


def test_without_a_network_a_commit_in_the_cache_leaves_no_request_to_the_libraries(
    server: HubServer, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # transformers lists the files of a repository even if its revision is a commit in the cache.
    main = server.add("a/model", {"config.json": b"{}"}).branches["main"]
    hf_hub_download("a/model", "config.json", revision=main)
    assert resolve_commit("a/model", main, where="x") == main
    assert not constants.HF_HUB_OFFLINE
    server.fault = lambda request: error(401, "RepoNotFound")
    assert resolve_commit("a/model", main, where="x") == main
    assert not constants.HF_HUB_OFFLINE, "other repositories can be read"
    server.fault = reset
    with caplog.at_level(logging.WARNING, "automodel_ckpt"):
        assert resolve_commit("a/model", main, where="x") == main
    assert "the Hub cannot be reached" in caplog.text and constants.HF_HUB_OFFLINE


def test_what_was_read_by_its_commit_is_in_the_cache_for_a_start_without_a_network(
    server: HubServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = server.add("a/model", {"config.json": b"{}"})
    model.commit("feature/x", {"config.json": b"[]"}, "another branch")
    commits = {}
    for branch in ("main", "feature/x"):
        commits[branch] = resolve_commit("a/model", branch, where="x")
        hf_hub_download("a/model", "config.json", revision=commits[branch])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for branch, commit in commits.items():
        assert resolve_commit("a/model", branch, where="x") == commit == model.branches[branch]
    assert resolve_commit("a/model", where="x") == commits["main"]


def test_offline_by_choice(server: HubServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "not in the cache, and HF_HUB_OFFLINE is set" in problem("a/model")
    check_access("a/data", where="dataset.path")
    assert not server.requests and cached_commit("a/model", "../../refs") is None


def test_a_host_without_an_address_is_not_tried_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_no_address(*_: Any, **__: Any) -> None:
        # A resolver that does not answer would take a long time.
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", has_no_address)
    monkeypatch.setattr(constants, "ENDPOINT", "https://no-such-host.invalid")
    monkeypatch.setattr(hub_access, "_PAUSES", (60.0,))
    pauses: list[float] = []
    monkeypatch.setattr(hub_access.time, "sleep", pauses.append)
    assert "the Hub cannot be reached" in problem("a/model")
    assert pauses == []


def test_a_data_set_that_is_not_reachable_is_left_to_its_library(
    server: HubServer, home: Path
) -> None:
    server.add("a/data", {"train.csv": b"x"}, "dataset")
    check_access("a/data", where="dataset.path")
    with pytest.raises(RecipeError, match="there is no such data set"):
        check_access("a/none", where="dataset.path")
    server.fault = lambda request: error(429, Retry_After="60")
    check_access("a/data", where="dataset.path")
    assert constants.HF_HUB_OFFLINE
    # What the library raises then states the first cause.
    absent = explained(FileNotFoundError("not cached"), "a/data", "dataset.path", "dataset")
    assert "limits the rate of requests (429), and this data set is not in the cache" in str(absent)


def test_what_follows_from_an_error_of_the_hub_is_explained(home: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    caught = ValueError("cannot load the model")
    caught.__cause__ = full
    found = explained(caught, "a/model", "model.from_pretrained")
    assert found is not None
    assert "disk of the Hub's cache is full" in str(found)
    assert str(home) in str(found)
    assert explained(caught, str(home), "model.from_pretrained") is None
    assert explained(ValueError("bad config"), "a/model", "x") is None
