"""Pins and users' links in a run directory: they protect their checkpoint, and go with it when it is set aside."""

import os
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.run import links, maintenance
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.errors import LeaseLost

NAME = "epoch_0_step_20"
ASIDE = f"{NAME}.superseded-1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two checkpoints, and links of every kind to the second."""
    root = tmp_path / "run"
    for step in (10, 20):
        (root / f"epoch_0_step_{step}" / "model").mkdir(parents=True)
        (root / f"epoch_0_step_{step}" / layout.MANIFEST).write_text(str(step))
    commit.point(root, layout.LATEST, NAME)
    maintenance.pin(root, NAME)
    (root / "paper" / "figures").mkdir(parents=True)
    (root / "mine").symlink_to(NAME)
    (root / "paper" / "figures" / "best").symlink_to(f"../../{NAME}/model")
    (root / "absolute").symlink_to(root / NAME)
    (root / "newest").symlink_to("LATEST")
    (root / "elsewhere").symlink_to(f"/somewhere/{NAME}")
    return root


def texts(root: Path) -> dict[str, str]:
    found = [*root.iterdir(), *(root / "paper" / "figures").iterdir()]
    return {path.name: os.readlink(path) for path in found if path.is_symlink()}


def followed(root: Path, name: str) -> dict[str, str]:
    return {
        "LATEST": NAME,
        f"pin-{name}": name,
        "mine": name,
        "best": f"../../{name}/model",
        "absolute": f"{root}/{name}",
        "newest": "LATEST",
        "elsewhere": f"/somewhere/{NAME}",
    }


def test_pins_and_links_follow_a_checkpoint_that_is_set_aside_and_go_on_protecting_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert links.set_aside(run, NAME) == ASIDE
    assert texts(run) == followed(run, ASIDE)
    (run / NAME / "model").mkdir(parents=True)  # the run gets there again
    assert (
        texts(run) == followed(run, ASIDE) and (run / "mine" / layout.MANIFEST).read_text() == "20"
    )
    assert links.pinned_names(run) == {ASIDE} and links.protected_names(run) == {NAME, ASIDE}
    for link in (run / "mine", run / "absolute", run / "paper" / "figures" / "best"):
        link.unlink()
    assert main(["prune", str(run), "--superseded"]) == 0 and (run / ASIDE).is_dir()
    assert main(["unpin", str(run / ASIDE)]) == 0
    assert main(["prune", str(run), "--superseded"]) == 0 and not (run / ASIDE).exists()
    assert ASIDE in capsys.readouterr().out


def test_where_pins_are_text_files_they_follow_too(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise PermissionError(1, os.strerror(1))

    (run / f"pin-{NAME}").unlink()
    monkeypatch.setattr(os, "symlink", unsupported)
    maintenance.pin(run, NAME)
    links.set_aside(run, NAME)
    assert (run / f"pin-{ASIDE}.txt").read_text() == f"{ASIDE}\n" and not (
        run / f"pin-{NAME}.txt"
    ).exists()
    assert links.pinned_names(run) == {ASIDE}


@pytest.mark.parametrize("calls", range(12))
def test_a_run_killed_while_it_sets_a_checkpoint_aside_leaves_it_protected(
    run: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Before each system call in turn: no link ever leads to another checkpoint, and the next start mends them."""

    class Killed(BaseException):
        pass

    made = []

    def counting(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if len(made) == calls:
                raise Killed
            made.append(real)
            return real(*arguments, **options)

        return call

    with monkeypatch.context() as patched:
        for name in ("rename", "symlink", "unlink"):
            patched.setattr(os, name, counting(getattr(os, name)))
        try:
            links.set_aside(run, NAME)
        except Killed:
            pass
        else:
            assert calls == 11
            return
    assert {NAME, ASIDE} & links.protected_names(run) and (run / NAME).exists()
    commit.recover(run)
    links.repair_links(run)
    assert texts(run) == followed(run, NAME)


def test_a_checkpoint_that_is_pinned_while_prune_waits_or_works_stays(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for link in ("mine", "absolute", f"pin-{NAME}", "LATEST", "paper/figures/best"):
        (run / link).unlink()
    assert maintenance.remove(run, [NAME], check_lease=lambda: maintenance.pin(run, NAME)) == []
    maintenance.unpin(run, NAME)
    real = commit.withdraw

    def withdraw(path: Path) -> Path:
        maintenance.pin(run, NAME)  # at the last moment
        return real(path)

    monkeypatch.setattr(commit, "withdraw", withdraw)
    assert maintenance.remove(run, [NAME], check_lease=lambda: None) == []
    assert (run / NAME / layout.MANIFEST).read_text() == "20" and links.pinned_names(run) == {NAME}


def test_prune_ends_when_another_run_takes_over_while_it_works(run: Path) -> None:
    def lost() -> None:
        raise LeaseLost("another run has taken over", where="", value="", hint="")

    with pytest.raises(LeaseLost):
        maintenance.remove(run, ["epoch_0_step_10"], check_lease=lost)
    assert (run / "epoch_0_step_10").is_dir()
