"""Rows are tokenized in parts by worker processes, with the samples, errors and files of one process."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from automodel_ckpt.data.chat import messages
from automodel_ckpt.data.rows import preparation
from automodel_ckpt.data.rows.preparation import in_order
from automodel_ckpt.data.text import prompt_completion, text
from automodel_ckpt.errors import RecipeError
from tests.support.models.stand_ins import LLAMA_CHAT, write_model
from tests.unit.data.toys import jsonl

NUM_ROWS = 150


def row(number: int) -> dict[str, Any]:
    prompt = f"What is {number} plus one? "
    answer = f"It is {number + 1}. " + "The bell rings. " * (number % 5)
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"prompt": prompt, "completion": answer, "messages": turns}


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("model")
    write_model(path, {"model_type": "llama"}, LLAMA_CHAT)
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture
def data(tmp_path: Path) -> str:
    return jsonl(tmp_path / "rows.jsonl", *map(row, range(NUM_ROWS)))


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """A function that sets the number of workers, with small parts and a new cache."""
    monkeypatch.setattr(preparation, "ROWS_PER_PART", 20)
    monkeypatch.setattr(preparation, "FEWEST_ROWS_FOR_WORKERS", 1)

    def use(count: int) -> None:
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(count))
        monkeypatch.setenv("AUTOMODEL_CKPT_CACHE", str(tmp_path / f"cache{count}"))

    return use


def test_workers_write_the_same_bytes_as_one_process(
    chat_tokenizer: Any, data: str, workers: Callable[[int], None], tmp_path: Path
) -> None:
    identities = []
    for count in (1, 3):
        workers(count)
        identities.append(prompt_completion(chat_tokenizer, data, 256).identity)
        for path in (tmp_path / f"cache{count}").glob("prompt_completion-*"):
            path.rename(path.with_name("pairs"))
        messages(chat_tokenizer, data, 60, truncation="right")
    assert identities[0] == identities[1]
    alone = sorted(path for path in (tmp_path / "cache1").rglob("[a-z]*") if path.is_file())
    assert len(alone) == 10
    for path in alone:
        other = tmp_path / "cache3" / path.relative_to(tmp_path / "cache1")
        assert other.read_bytes() == path.read_bytes(), path


def test_the_first_unusable_row_is_reported_with_its_line(
    chat_tokenizer: Any, workers: Callable[[int], None], tmp_path: Path
) -> None:
    rows = [row(number) for number in range(NUM_ROWS)]
    rows[71]["messages"] = [{"role": "user", "content": "no answer"}]
    rows[130]["messages"] = "not a conversation"
    rows[95]["completion"] = None
    path = jsonl(tmp_path / "bad.jsonl", *rows)
    workers(3)
    with pytest.raises(RecipeError, match=f"{path}:72"):
        messages(chat_tokenizer, path)
    with pytest.raises(RecipeError, match="field completion of a sample is missing") as error:
        prompt_completion(chat_tokenizer, path)
    assert f"{path}:96" in str(error.value)


def test_one_error_counts_the_long_samples_of_all_parts(
    tokenizer: Any, workers: Callable[[int], None], tmp_path: Path
) -> None:
    rows = [row(number) for number in range(NUM_ROWS)]
    for number in (3, 57, 80, 149):
        rows[number]["completion"] = "a long answer " * 100
    path = jsonl(tmp_path / "long.jsonl", *rows)
    found = []
    for count in (1, 2):
        workers(count)
        with pytest.raises(RecipeError, match="4 of 150 samples") as error:
            text(tokenizer, path, 200, field="completion")
        found.append(str(error.value))
    assert found[0] == found[1]
    assert f"{path}:4 (" in found[0]


def test_a_killed_worker_costs_no_row() -> None:
    parent = os.getpid()

    def numbers(start: int, stop: int) -> list[int]:
        if start == 40 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return list(range(start, stop))

    ranges = [(start, start + 10) for start in range(0, 200, 10)]
    found: list[int] = []
    for part in in_order(numbers, ranges, 3):
        found += part
    assert found == list(range(200))
