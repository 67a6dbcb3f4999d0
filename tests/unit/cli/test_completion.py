import shutil
import subprocess

import pytest

from automodel_ckpt.cli.ckpt import main


def completed(script: str, function: str, *words: str) -> list[str]:
    """What bash offers for the last of *words*."""
    line = " ".join(f"'{word}'" for word in words)
    tell = f'{script}\nCOMP_WORDS=({line})\nCOMP_CWORD={len(words) - 1}\n{function}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    shell = subprocess.run(
        ["bash", "--norc", "-c", tell], capture_output=True, text=True, check=True
    )
    assert shell.stderr == ""
    return shell.stdout.split()


@pytest.fixture
def bash(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", "bash"]) == 0
    return capsys.readouterr().out


def test_bash_completes_commands_and_their_options(bash: str) -> None:
    assert completed(bash, "_ckpt", "ckpt", "unp") == ["unpack", "unpin"]
    assert completed(bash, "_ckpt", "ckpt", "prune", "--keep-e") == ["--keep-every-steps"]
    assert completed(bash, "_ckpt", "ckpt", "ls", "") == []  # without words, bash offers files
    assert completed(bash, "_ckpt", "ckpt", "nonsense", "--") == []


def test_bash_completes_the_keys_and_flags_of_a_recipe(bash: str) -> None:
    assert completed(bash, "_ckpt_train", "ckpt-train", "--checkpoint.keep_b") == [
        "--checkpoint.keep_best"
    ]
    assert completed(bash, "_ckpt_train", "ckpt-train", "x.yaml", "--nproc") == ["--nproc-per-node"]
    assert completed(bash, "_ckpt_train", "ckpt-train", "--see") == ["--seed"]
    assert "--selftest-resume" in completed(bash, "_ckpt_train", "ckpt-train", "--self")
    assert "relations" not in bash


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_each_shell_takes_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "keep-last" in script
    if shutil.which(shell):
        checked = subprocess.run(
            [shell, "-n"], input=script, capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stderr) == (0, "")
