from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.data.samples.tokenized import TokenizedDataset
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.examples.data import python_docs
from automodel_ckpt.examples.data.python_docs import (
    docstring_pairs,
    language_modeling,
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


def test_prepared_samples_are_not_tokenized_again(
    tokenizer: Any, pairs: TokenizedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = language_modeling(tokenizer)
    for name in ("Encoder", "library_pairs", "_load_topics"):
        monkeypatch.delattr(python_docs, name)
    assert language_modeling(tokenizer)[0] == blocks[0]
    assert docstring_pairs(tokenizer, seq_length=96)[0] == pairs[0]
    with pytest.raises(NameError):
        language_modeling(tokenizer, seq_length=33)


def test_the_splits_share_no_document_and_leave_none_out(tokenizer: Any) -> None:
    def documents(split: str) -> set[str]:
        dataset = language_modeling(tokenizer, 64, split)
        text = tokenizer.decode(
            [token for i in range(len(dataset)) for token in dataset[i]["input_ids"]]
        )
        return set(text.split("</s>")[:-1])

    train, validation = documents("train"), documents("validation")
    assert not train & validation
    assert train | validation == set(python_docs._load_topics().values())
    assert len(validation) >= 3


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


def test_cut_samples_are_counted_in_the_log(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = docstring_pairs(tokenizer, seq_length=96)
    cut = sum(dataset[i]["input_ids"][-1] != tokenizer.eos_token_id for i in range(len(dataset)))
    assert f"{cut} of {len(dataset)} samples were truncated to seq_length 96" in caplog.text


def test_a_pair_longer_than_the_context_can_be_refused_with_its_place(tokenizer: Any) -> None:
    with pytest.raises(RecipeError, match=r"\.py:\d+ \(\d+ tokens\).*\n.*samples; seq_length 96"):
        docstring_pairs(tokenizer, seq_length=96, split="validation", truncation="error")
