"""``ckpt`` finds its argument, reports what is wrong with the rest, and starts immediately."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.cli.ckpt import main
from tests.support.measure import seconds_of_children
from tests.support.models.shards import checkpoint_in

Capture = pytest.CaptureFixture[str]


def rows(path: Path, capsys: Capture) -> dict[str, dict[str, object]]:
    assert main(["ls", str(path), "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_ls_lists_complete_torn_foreign_and_unfinished_directories(
    tmp_path: Path, capsys: Capture
) -> None:
    for step in (20, 100):
        checkpoint_in(tmp_path, step)
    (checkpoint_in(tmp_path, 40) / "MANIFEST.json").write_bytes(b"{}")
    (tmp_path / "epoch_0_step_50" / "model").mkdir(parents=True)
    (tmp_path / "checkpoint-7" / "model").mkdir(parents=True)
    (tmp_path / f".epoch_0_step_60.staging-{'0' * 32}").mkdir()
    os.rename(checkpoint_in(tmp_path, 110), tmp_path / "epoch_0_step_110.superseded-1")
    checkpoint_in(tmp_path, 105)
    (tmp_path / "unrelated").mkdir()
    found = rows(tmp_path, capsys)
    assert [name for name in found if name.startswith("epoch")][:5] == [
        f"epoch_0_step_{step}" for step in (20, 40, 50, 100, 105)
    ]
    assert (
        found["epoch_0_step_20"]["train_loss"] == 1.5
        and found["epoch_0_step_20"]["val_loss"] == 1.25
    )
    assert found["epoch_0_step_105"]["pointers"] == ["LATEST"]
    complete = {name for name, row in found.items() if row["complete"]}
    assert complete == {
        "epoch_0_step_20",
        "epoch_0_step_100",
        "epoch_0_step_105",
        "epoch_0_step_110.superseded-1",
    }
    reasons = {
        "epoch_0_step_40": "damaged",
        "epoch_0_step_50": "no MANIFEST",
        "checkpoint-7": "external",
        f".epoch_0_step_60.staging-{'0' * 32}": "incomplete",
        "epoch_0_step_110.superseded-1": "superseded",
    }
    for name, reason in reasons.items():
        assert reason in str(found[name]["reason"])
    assert "unrelated" not in found
    assert main(["ls", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "LATEST" in text and "1.2500" in text and "\x1b" not in text


def test_a_run_a_pointer_a_text_pointer_and_a_checkpoint_all_lead_to_it(
    tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / "job" / "checkpoints"
    checkpoint_in(run, 20)
    newest = checkpoint_in(run, 40)
    ways = [tmp_path / "job", run, run / "LATEST", newest]
    for way in ways:
        assert main(["show", str(way), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["path"] == str(newest)
    (run / "LATEST").unlink()
    (run / "LATEST.txt").write_text("epoch_0_step_20\n")
    for way in (run / "LATEST", run / "LATEST.txt"):
        assert main(["show", str(way), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step"] == 20


def test_show_gives_tensors_position_and_environment(tmp_path: Path, capsys: Capture) -> None:
    checkpoint_in(tmp_path, 20)
    assert main(["show", str(tmp_path), "--tensors"]) == 0
    text = capsys.readouterr().out
    for part in ("step 20", "F32", "[4, 3]", "2 slices", "consumed_samples  160", "python  3"):
        assert part in text


def test_consolidate_prints_the_directory_it_wrote(tmp_path: Path, capsys: Capture) -> None:
    checkpoint = checkpoint_in(tmp_path, 20)
    assert main(["consolidate", str(tmp_path / "LATEST")]) == 0
    captured = capsys.readouterr()
    assert (
        captured.out == f"{checkpoint}/model/consolidated\n" and "digests checked" in captured.err
    )
    arguments = [
        "consolidate",
        str(checkpoint / "model"),
        "--output",
        str(tmp_path / "out"),
        "--cast-dtype",
        "bf16",
    ]
    assert main([*arguments, "--nproc", "1", "--num-threads", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["casts"] == {"F32->BF16": 1} and report["output"] == str(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["ls", "nowhere"], 3),
        (["show", "."], 3),
        (["ls", "--bogus"], 2),
        (["verify", "x" * 300], 3),
        (["plot", "run", "-o", "/dev/null/place.html"], 4),
    ],
)
def test_with_json_an_error_is_a_document_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    arguments: list[str],
    code: int,
) -> None:
    checkpoint_in(tmp_path / "run", 20)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path if "run" in arguments else tmp_path / "empty")
    assert main([*arguments, "--json"]) == code
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert error["code"] == code and [{*p} for p in error["problems"]] == [
        {"what", "where", "value", "remedy"}
    ]
    assert (
        captured.err.startswith(f"error: {error['problems'][0]['what']}")
        and "internal" not in captured.err
    )


def test_a_path_may_begin_with_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A shell does not expand ``--output=~/exported``."""
    checkpoint_in(tmp_path / "home" / "run", 1)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert main(["export", "~/run", "--output=~/exported"]) == 0
    # Without config.json, no program loads the files.
    assert "vllm" not in capsys.readouterr().err
    assert (tmp_path / "home" / "exported" / "model.safetensors.index.json").is_file()
    assert main(["diff", "~/run", "~/exported"]) == 0
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize(
    "words", [["prune", "", "--keep-last=1"], ["ls", ""], ["average", "a", ""]]
)
def test_an_empty_path_is_not_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, words: list[str]
) -> None:
    """``ckpt prune "$RUN"`` without the variable."""
    for step in (1, 2):
        checkpoint_in(tmp_path / "checkpoints", step)
    monkeypatch.chdir(tmp_path)
    assert main([*words, *(["-o", "b"] if words[0] == "average" else [])]) == 2
    assert "a path is empty" in capsys.readouterr().err
    assert (tmp_path / "checkpoints/epoch_0_step_1").is_dir()


@pytest.mark.parametrize(
    ("words", "where", "hint"),
    [
        (["prnue", "."], "ckpt", "did you mean prune?"),
        (["frobnicate"], "ckpt", "`ckpt --help` lists them"),
        (["prune", ".", "--keep-lst", "2"], "ckpt prune", "did you mean --keep-last?"),
        (["list", "."], "ckpt", "here: ckpt ls"),
        (["compare", "a", "b"], "ckpt", "here: ckpt diff"),
        (["merge", "a"], "ckpt", "here: ckpt export --merge"),
        (["rm", "a"], "ckpt", "here: ckpt prune, which removes all checkpoints that its options"),
        (["verify", ".", "extra"], "ckpt verify", "`ckpt verify --help` lists them"),
        (["verify", "--num-threads=two"], "ckpt verify", "`ckpt verify --help`"),
    ],
)
def test_a_misspelled_word_gets_the_one_that_was_meant(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    words: list[str],
    where: str,
    hint: str,
) -> None:
    (tmp_path / "-dash").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert f"  where:  {where}" in lines and hint in lines[-1]
    if words[-1] == "--num-threads=two":
        assert "two is not a whole number" in lines[0]


def test_a_directory_of_runs_is_a_row_for_each(tmp_path: Path, capsys: Capture) -> None:
    for step in (20, 40):
        checkpoint_in(tmp_path / "a", step)
    checkpoint_in(tmp_path / "group" / "b" / "checkpoints", 7)
    (tmp_path / "link").symlink_to("a")
    assert main(["ls", str(tmp_path), "--json"]) == 0
    found = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name: (row["num_checkpoints"], row["newest"]) for name, row in found.items()} == {
        "a": (2, "epoch_0_step_40"),
        "group/b/checkpoints": (1, "epoch_0_step_7"),
    }
    assert main(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["a", "2", "epoch_0_step_40"]
    for words in (["verify"], ["prune", "--keep-last=1"], ["plot"], ["average", "-o", "x", "y"]):
        assert main([*words, str(tmp_path)]) == 3
        message = capsys.readouterr().err
        assert "the directory contains runs" in message
        assert f"specify one of them: {tmp_path}/a, {tmp_path}/group/b/checkpoints" in message


def test_a_command_that_uses_an_earlier_checkpoint_of_a_run_says_so(
    tmp_path: Path, capsys: Capture
) -> None:
    """Without a warning, an export of a run whose newest checkpoint is damaged would be that of another step."""
    for step in (1, 2):
        checkpoint_in(tmp_path / "run", step)
    assert main(["show", str(tmp_path / "run")]) == 0
    assert "warning" not in capsys.readouterr().err
    (tmp_path / "run/epoch_0_step_2/MANIFEST.json").write_text("damaged")
    assert main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "out")]) == 0
    warning = capsys.readouterr().err.splitlines()[0]
    assert warning.startswith(f"warning: using {tmp_path}/run/epoch_0_step_1: epoch_0_step_2 ")
    assert "the manifest is damaged" in warning


def test_a_directory_of_another_user_does_not_hide_the_other_checkpoints(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint, or a directory such as lost+found, whose content this user may not read."""
    run = tmp_path / "runs" / "run"
    for step in (1, 2):
        checkpoint_in(run, step)
    for directory in (run / "lost+found", run.parent / "lost+found"):
        (directory / "inside").mkdir(parents=True)
        deny(monkeypatch, directory)
    deny(monkeypatch, run / "epoch_0_step_1")
    listed = rows(run, capsys)
    assert list(listed) == ["epoch_0_step_1", "epoch_0_step_2"]
    assert listed["epoch_0_step_1"]["reason"] == "cannot be read: Permission denied"
    assert listed["epoch_0_step_2"]["complete"] is True
    assert main(["verify", str(run)]) == 3
    verified = capsys.readouterr().out
    assert "the checkpoint cannot be read" in verified
    assert f"{run}/epoch_0_step_2: ok" in verified
    assert main(["ls", str(run.parent)]) == 0


def deny(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Let the system calls on the content of *directory* fail, as for another user. Tests can run as root."""
    for name in ("stat", "lstat", "listdir", "scandir"):
        call = getattr(os, name)
        lists = name in ("listdir", "scandir")

        def guarded(
            path: Any = ".", *rest: Any, call: Any = call, lists: bool = lists, **options: Any
        ) -> Any:
            is_path = isinstance(path, str | os.PathLike)
            inside = is_path and Path(path).is_relative_to(directory)
            if inside and (lists or Path(path) != directory):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *rest, **options)

        monkeypatch.setattr(os, name, guarded)


def test_a_part_of_a_checkpoint_means_the_checkpoint_and_an_export_itself(
    tmp_path: Path, capsys: Capture
) -> None:
    checkpoint = checkpoint_in(tmp_path, 20)
    assert main(["show", str(checkpoint / "model"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(checkpoint)
    assert main(["ls", str(checkpoint), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["pointers"] == ["LATEST"]
    assert main(["consolidate", str(checkpoint)]) == 0
    export = checkpoint / "model" / "consolidated"
    assert main(["verify", str(export)]) == 0
    (file,) = export.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    capsys.readouterr()
    assert main(["verify", str(export)]) == 3
    assert "a file of the export is damaged" in capsys.readouterr().out
    (export / "export_manifest.json").unlink()
    assert main(["verify", str(export)]) == 3
    text = capsys.readouterr().out
    assert (
        "unverifiable: no manifest" in text
        and "unverifiable: no digests" in text
        and "damaged" not in text
    )


def test_names_from_a_disk_cannot_steer_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    hostile = "evil\x1b]0;owned\x07\u202egnp\n"
    (tmp_path / hostile / "model").mkdir(parents=True)
    checkpoint_in(tmp_path, 20)
    assert main(["ls", str(tmp_path)]) == 0
    assert main(["show", str(tmp_path / hostile)]) == 3
    assert main(["consolidate", str(tmp_path / hostile)]) == 3
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert not any(bad in text for bad in ("\x1b", "\x07", "\u202e"))
    assert "evil\\x1b]0;owned" in captured.out


def test_help_and_version_are_instant_and_no_command_imports_torch(tmp_path: Path) -> None:
    checkpoint_in(tmp_path, 20)
    code = "import sys; from automodel_ckpt.cli.ckpt import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    for arguments in (["--help"], ["--version"], ["chat", "nowhere"], ["consolidate", "."]):
        started = seconds_of_children()
        subprocess.run(
            [sys.executable, "-c", code, *arguments], check=True, cwd=tmp_path, capture_output=True
        )
        assert seconds_of_children() - started < 1


def test_a_narrow_terminal_gets_fewer_columns_and_a_pipe_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    checkpoint_in(tmp_path, 20)
    heads = []
    for columns, is_terminal in ((130, True), (60, True), (60, False)):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda value=is_terminal: value)
        assert main(["ls", str(tmp_path)]) == 0
        text = re.sub("\x1b[^m]*m", "", capsys.readouterr().out)
        heads.append(re.split("  +", text.splitlines()[0]))
        assert max(map(len, text.splitlines())) <= columns or not is_terminal
    assert [len(head) for head in heads] == [9, 3, 9]
    assert heads[1] == ["checkpoint", "step", "val loss"]
