"""Uploads to the Hub while a run trains: what is uploaded when, what follows a failure, and what the end reports."""

import logging
import shutil
import threading
import time
from pathlib import Path

import pytest

from automodel_ckpt.checkpoint.remote import child_process
from automodel_ckpt.checkpoint.remote.child_process import Status
from automodel_ckpt.checkpoint.run.links import clear_links, link, pending
from automodel_ckpt.config.keys.checkpoint import HubConfig
from automodel_ckpt.errors import RecipeError, SaveFailed
from automodel_ckpt.hub.background import LINK, STATUS, Pushes, check_hub
from automodel_ckpt.hub.pusher import Pusher
from tests.support.runs.idle_process import use_idle_processes
from tests.support.servers.hub_server import TOKEN, HubServer, error

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "org/tiny"
FIRST, SECOND, LAST = "epoch_0_step_5", "epoch_1_step_10", "epoch_1_step_12"


@pytest.fixture
def run(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(child_process, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(child_process, "_LONGEST_PAUSE_SECONDS", 0.05)
    return shutil.copytree(runs / "lora", tmp_path / "run", symlinks=True)


def upload(run: Path, push: str, *names: str, went_back_to: int = 0) -> None:
    """Upload checkpoints with a process of their own, and end it."""
    for name in names:
        link(run, LINK, name)
    pusher = Pusher(run, HubConfig(REPO, push), went_back_to=went_back_to)  # type: ignore[arg-type]
    pusher.finish()
    pusher.run()


def step_in(hub: HubServer, branch: str) -> str:
    card = hub.repository(REPO).files(branch)["README.md"].decode()
    (line,) = (line for line in card.splitlines() if "(epoch" in line and "| step" in line)
    return line.split()[3]


def test_every_checkpoint_gets_a_branch_and_the_best_one_the_main_branch(
    hub: HubServer, run: Path
) -> None:
    (run / "LOWEST_VAL").unlink()
    (run / "LOWEST_VAL").symlink_to(SECOND)
    upload(run, "every", FIRST, SECOND)
    # Checkpoint 12 is newer, but not better.
    upload(run, "every", LAST)
    repository = hub.repository(REPO)
    assert repository.branches.keys() == {"main", "step-5", "step-10", "step-12"}
    assert [step_in(hub, branch) for branch in ("main", "step-5", "step-12")] == ["10", "5", "12"]
    assert not pending(run, LINK)
    assert Status.read(run, STATUS).uploaded == LAST


def test_without_validation_the_main_branch_has_the_newest(hub: HubServer, run: Path) -> None:
    (run / "LOWEST_VAL").unlink()
    upload(run, "every", SECOND)
    # An older one that waited, in the process of a later start.
    upload(run, "every", FIRST, went_back_to=12)
    assert step_in(hub, "main") == "10"
    # The run went back to step 4: then its next checkpoint is the newest.
    upload(run, "every", FIRST, went_back_to=4)
    assert step_in(hub, "main") == "5"


def test_a_better_checkpoint_replaces_one_that_waits(hub: HubServer, run: Path) -> None:
    upload(run, "best", FIRST, SECOND)
    assert len(hub.repository(REPO).commits) == 2
    assert step_in(hub, "main") == "10"


def test_a_failing_hub_is_repeated_until_it_works(hub: HubServer, run: Path) -> None:
    link(run, LINK, LAST)
    hub.fault = lambda request: error(503)
    pusher = Pusher(run, HubConfig(REPO))
    thread = threading.Thread(target=pusher.run)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while pusher.status.failures < 3 and time.monotonic() < deadline:
            pass
        assert "the Hub has a failure (503)" in Status.read(run, STATUS).error
        assert pending(run, LINK) == [LAST]
        hub.fault = None
    finally:
        pusher.finish()
        thread.join(60)
    assert Status.read(run, STATUS).error == ""
    assert step_in(hub, "main") == "12"


def test_a_rejected_token_ends_the_uploads_only_at_the_end_of_the_run(
    hub: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    upload(run, "final", LAST)
    status = Status.read(run, STATUS)
    assert status.is_over and "the Hub rejects the token" in status.error
    assert pending(run, LINK) == [LAST]
    assert "hf_other" not in capsys.readouterr().err
    # The next start of the run uploads it.
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    upload(run, "final")
    assert step_in(hub, "main") == "12"


def test_a_damaged_checkpoint_is_reported_and_does_not_block_the_others(
    hub: HubServer, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = run / SECOND / "model/adapter_model.safetensors"
    weights.write_bytes(b"\0" + weights.read_bytes()[1:])
    upload(run, "every", FIRST, SECOND)
    assert f"{SECOND} is not uploaded" in capsys.readouterr().err
    assert "step-5" in hub.repository(REPO).branches and not pending(run, LINK)


@pytest.mark.parametrize("push", ["final", "best", "every"])
def test_what_is_not_uploaded_at_the_end_is_a_warning_or_an_error(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, push: str
) -> None:
    started = use_idle_processes(monkeypatch, 0)
    link(run, LINK, LAST)
    pushes = Pushes(run, HubConfig(REPO, push), makes_exports=False)  # type: ignore[arg-type]
    # The run continues from step 10: what a start after it had published is not uploaded.
    pushes.start(10)
    assert not pending(run, LINK)
    (run / "LOWEST_VAL").unlink()
    (run / "LOWEST_VAL").symlink_to(FIRST)
    for name in (FIRST, SECOND):
        pushes.note_saved(name)
    pushes.note_last(SECOND)
    expected = {"final": [SECOND], "best": [FIRST], "every": [SECOND, FIRST]}[push]
    assert pending(run, LINK) == expected
    # The run goes back while it trains.
    pushes.roll_back(9)
    assert SECOND not in pending(run, LINK)
    assert started[-1].job["went_back_to"] == 9
    link(run, LINK, SECOND)
    with caplog.at_level(logging.WARNING, "automodel_ckpt"):
        pushes.finish()
    assert f"ckpt push {run} hub:{REPO}" in caplog.text
    required = Pushes(run, HubConfig(REPO, push, required=True), makes_exports=False)  # type: ignore[arg-type]
    required.start(12)
    with pytest.raises(SaveFailed, match="not uploaded to the Hub"):
        required.finish()
    clear_links(run, LINK)
    required.finish()


def test_the_section_is_checked_without_a_request(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_hub(HubConfig(REPO))
    with pytest.raises(RecipeError, match="the model card cannot be read"):
        check_hub(HubConfig(REPO, card=str(tmp_path / "none.md")))
    (tmp_path / "id_rsa").write_text("a secret")
    (tmp_path / "link.md").symlink_to("id_rsa")
    for name in ("id_rsa", "link.md"):
        with pytest.raises(RecipeError, match="a model card is a Markdown file") as caught:
            check_hub(HubConfig(REPO, card=str(tmp_path / name)))
        assert "a secret" not in str(caught.value)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(RecipeError, match="need a token"):
        check_hub(HubConfig(REPO))
    assert not hub.requests
