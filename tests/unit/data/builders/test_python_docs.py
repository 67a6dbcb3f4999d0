from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.data.samples.tokenized import TokenizedDataset
from automodel_ckpt.examples.data.python_docs import (
    docstring_pairs,
    train_tokenizer,
)
from tests.support.servers.command_server import CommandServer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer()


@pytest.fixture(scope="module")
def pairs(tokenizer: Any) -> TokenizedDataset:
    return docstring_pairs(tokenizer, seq_length=96)


def start(
    code: str, cache: Path, commands: CommandServer | None = None, **variables: str
) -> subprocess.Popen[str]:
    """A process that runs *code*: of the server, or with a new interpreter."""
    script = cache.with_suffix(".py")
    script.write_text(code)
    env = {**os.environ, "AUTOMODEL_CKPT_CACHE": str(cache), **variables}
    if commands is not None:
        return commands.popen("python", str(script), env=env, stderr=subprocess.PIPE)
    return subprocess.Popen(
        [sys.executable, str(script)], env=env, stderr=subprocess.PIPE, text=True
    )


def finish(*processes: subprocess.Popen[str]) -> list[str]:
    """What each wrote to stderr, once all have ended well."""
    logs = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), logs
    return logs


def digests(directory: Path) -> dict[str, str]:
    files = [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def test_tokenizer_and_samples_are_the_same_bytes_in_every_process(
    tmp_path: Path, commands: CommandServer
) -> None:
    code = "from automodel_ckpt.examples.data.python_docs import *; language_modeling(train_tokenizer(500), 64)"
    # The server's hashes have a different seed.
    finish(start(code, tmp_path / "1", PYTHONHASHSEED="1"), start(code, tmp_path / "2", commands))
    first, second = digests(tmp_path / "1"), digests(tmp_path / "2")
    assert first == second
    assert any(name.endswith("tokenizer.json") for name in first)
    assert any(name.endswith("tokens.npy") for name in first)


def test_a_pair_asks_for_a_docstring_and_labels_only_that(
    tokenizer: Any, pairs: TokenizedDataset
) -> None:
    def texts(sample: dict[str, list[int]]) -> tuple[str, str]:
        masked = sample["labels"].count(-100)
        assert sample["labels"] == [-100] * masked + sample["input_ids"][masked:]
        return tokenizer.decode(sample["input_ids"][:masked]), tokenizer.decode(
            sample["input_ids"][masked:]
        )

    found = dict(texts(pairs[i]) for i in range(len(pairs)))
    assert len(pairs) > 3000
    assert found["def textwrap.fill(text, width=70, **kwargs):\n"].startswith(
        "Fill a single paragraph of text"
    )
    assert found["class fractions.Fraction(numbers.Rational):\n"].startswith(
        "This class implements rational numbers."
    )
    assert all(len(pairs[i]["input_ids"]) <= 96 for i in range(len(pairs)))
    assert sum(completion.endswith("</s>") for completion in found.values()) > 1000
