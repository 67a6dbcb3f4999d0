"""`ckpt push` and the uploading process of a run, killed at their requests: the Hub has complete models only.

A sample of the requests; with the environment variable ``REMOTE_POINTS``, each of them.
"""

import copy
import multiprocessing
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub.utils._http import close_session

from automodel_ckpt.checkpoint.run.links import link
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.config.keys.checkpoint import HubConfig
from automodel_ckpt.hub.background import LINK
from automodel_ckpt.hub.pusher import Pusher
from tests.support.servers.hub_server import HubServer, Request, Reset

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "org/tiny"
FIRST, LAST = "epoch_0_step_5", "epoch_1_step_12"
Work = Callable[[Path], None]
Branches = Mapping[str, Mapping[str, bytes]]


def push(words: list[str], run: Path) -> None:
    path, *options = words
    assert main(["push", str(run / path), *options]) == 0


def push_in_background(run: Path) -> None:
    """What the process of the section ``hub`` does, from its start to the end of the training."""
    pusher = Pusher(run, HubConfig(REPO, "every"))
    pusher.finish()
    pusher.run()


@dataclass(frozen=True)
class Scenario:
    """Uploads of the run ``full``. The main branch has another model before, if it *replaces* one."""

    work: Work
    replaces: bool = True
    links: tuple[str, ...] = ()


SCENARIOS = {
    # The checkpoint has no export: it is made in a directory of the run.
    "a new branch": Scenario(partial(push, [FIRST, f"hub:{REPO}@best"])),
    "the main branch": Scenario(partial(push, [LAST, f"hub:{REPO}"])),
    "while a run trains": Scenario(push_in_background, replaces=False, links=(FIRST, LAST)),
}


class Killer:
    """Runs uploads in processes, and kills one at a request: before the Hub carries it out, or before it replies."""

    def __init__(self, hub: HubServer) -> None:
        self._hub = hub
        self._process: multiprocessing.process.BaseProcess | None = None
        self._left = -1
        self._is_after = False

    def run(self, work: Work, run: Path, *, at: int | None = None, after: bool = False) -> int:
        """Do *work*, and kill it at request number *at*. Return the number of requests."""
        self._hub.requests.clear()
        self._left, self._is_after = -1 if at is None else at, after
        self._hub.fault, self._hub.after = self._before, self._afterwards
        self._process = multiprocessing.get_context("fork").Process(target=_main, args=(work, run))
        with warnings.catch_warnings():
            # The server's threads: the process does not use them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        self._process.join(60)
        assert self._process.exitcode == (0 if at is None else -signal.SIGKILL)
        self._hub.fault = self._hub.after = None
        return len(self._hub.requests)

    def _before(self, request: Request) -> None:
        self._left -= 1
        if self._left == -1 and not self._is_after:
            self._kill()

    def _afterwards(self, request: Request) -> None:
        if self._left == -1 and self._is_after:
            self._kill()

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        raise Reset


def _main(work: Work, run: Path) -> None:
    # Connections of the parent process.
    close_session()
    work(run)


def branches(hub: HubServer) -> dict[str, dict[str, bytes]]:
    """The files of each branch."""
    found = hub.repositories.get(("model", REPO))
    return {} if found is None else {name: found.files(name) for name in found.branches}


def differing(found: Branches, expected: Branches) -> list[str]:
    """The files that branches do not have in common."""
    names = []
    for branch in found.keys() | expected.keys():
        some, others = found.get(branch, {}), expected.get(branch, {})
        for name in some.keys() | others.keys():
            if some.get(name) != others.get(name):
                names.append(f"{branch}: {name}")
    return names


def listing(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("while a run trains", marks=pytest.mark.further),
        pytest.param("a new branch", marks=pytest.mark.further),
        pytest.param("the main branch", marks=pytest.mark.further),
    ],
)
def test_a_process_killed_at_any_request_leaves_complete_models_and_is_repeated(
    hub: HubServer, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    scenario = SCENARIOS[name]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    killer = Killer(hub)
    if scenario.replaces:
        killer.run(partial(push, ["", f"hub:{REPO}", "--base-model", "org/base"]), runs / "lora")
    stored = copy.deepcopy((hub.repositories, hub.objects))
    before = branches(hub)

    def anew(point: str) -> Path:
        hub.reset()
        hub.repositories.update(copy.deepcopy(stored[0]))
        hub.objects.update(stored[1])
        # The card has the name of the run.
        run = shutil.copytree(runs / "full", tmp_path / point / "run", symlinks=True)
        for checkpoint in scenario.links:
            link(run, LINK, checkpoint)
        return run

    run = anew("clean")
    num_requests = killer.run(scenario.work, run)
    assert num_requests > 8
    expected, files = branches(hub), listing(run)
    points = [(num_requests // 2, False), (num_requests - 2, True)]
    if os.environ.get("REMOTE_POINTS"):
        points = [(number, after) for number in range(num_requests) for after in (False, True)]
    for number, after in points:
        point = f"{number}-{after}"
        run = anew(point)
        killer.run(scenario.work, run, at=number, after=after)
        for branch, content in branches(hub).items():
            # A new branch has no model yet: neither another branch's nor a part of the new one.
            is_empty = content.keys() <= {".gitattributes"}
            assert is_empty or content in (before.get(branch), expected[branch]), point
        arrived = set(hub.objects)
        killer.run(scenario.work, run)
        assert differing(branches(hub), expected) == [], point
        assert listing(run) == files and not listing(scratch), point
        sent = {each.split("/")[2] for each in hub.requests if each.startswith("PUT /lfs/")}
        assert not sent & arrived, point
        shutil.rmtree(run)
