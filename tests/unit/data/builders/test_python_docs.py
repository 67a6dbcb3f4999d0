from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from automodel_ckpt.data.batches.packing import PackedDataset
from automodel_ckpt.data.samples.tokenized import TokenizedDataset
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.examples.data import python_docs
from automodel_ckpt.examples.data.python_docs import (
    docstring_pairs,
    language_modeling,
    summaries,
    train_tokenizer,
)
from automodel_ckpt.examples.data.python_library import library_pairs
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


def test_the_tokenizer_gives_back_any_text(tokenizer: Any) -> None:
    text = "def f(x):\n    return 'ünï € \\x00' \t\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 1024
    assert len(ids) < len(text.encode())
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3


def test_plain_transformers_loads_the_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("import os")["input_ids"] == tokenizer("import os")["input_ids"]
    assert loaded.eos_token_id == tokenizer.eos_token_id


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


def test_of_processes_that_start_together_one_trains(
    tmp_path: Path, commands: CommandServer
) -> None:
    code = "import logging; logging.basicConfig(level='INFO'); from automodel_ckpt.examples.data.python_docs import *; "
    logs = finish(
        *(start(code + "train_tokenizer(400)", tmp_path / "cache", commands) for _ in range(2))
    )
    assert sum(log.count("training a tokenizer") for log in logs) == 1


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


def test_blocks_hold_the_whole_reference_in_order(tokenizer: Any) -> None:
    train = language_modeling(tokenizer, seq_length=64)
    samples = [train[i] for i in range(len(train))]
    assert all(len(sample["input_ids"]) == 64 for sample in samples[:-1])
    assert 2 <= len(samples[-1]["input_ids"]) <= 64
    assert all(sample["labels"] == sample["input_ids"] for sample in samples)
    text = tokenizer.decode([token for sample in samples for token in sample["input_ids"]])
    topics = python_docs._load_topics()
    documents = text.split("</s>")
    assert documents[0] in topics.values()
    assert set(documents[:-1]) <= set(topics.values())


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


def test_packed_pairs_waste_less_than_a_hundredth(pairs: TokenizedDataset) -> None:
    packed = PackedDataset(pairs, 1024)
    assert len(packed) > 300
    assert 0 <= packed.waste < 0.01


def test_finding_docstrings_imports_no_module(tmp_path: Path, commands: CommandServer) -> None:
    code = """
import sys; from automodel_ckpt.examples.data import python_library as d; before = set(sys.modules)
assert len(d.library_pairs("validation")) > 100
new = {name for name in set(sys.modules) - before if not name.startswith("encodings.")}  # a file declares its encoding
assert not new, new
assert "this" not in sys.modules"""
    finish(start(code, tmp_path / "cache", commands))


def test_cut_samples_are_counted_in_the_log(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = docstring_pairs(tokenizer, seq_length=96)
    cut = sum(dataset[i]["input_ids"][-1] != tokenizer.eos_token_id for i in range(len(dataset)))
    assert f"{cut} of {len(dataset)} samples were truncated to seq_length 96" in caplog.text


def test_a_pair_longer_than_the_context_can_be_refused_with_its_place(tokenizer: Any) -> None:
    with pytest.raises(RecipeError, match=r"\.py:\d+ \(\d+ tokens\).*\n.*samples; seq_length 96"):
        docstring_pairs(tokenizer, seq_length=96, split="validation", truncation="error")


def test_max_samples_takes_the_first(tokenizer: Any) -> None:
    whole, few = language_modeling(tokenizer), language_modeling(tokenizer, max_samples=3)
    assert [few[i] for i in range(3)] == [whole[i] for i in range(3)]
    assert len(few) == 3
    with pytest.raises(IndexError):
        few[3]


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"split": "test"}, "dataset.split"),
        ({"seq_length": 1}, "dataset.seq_length"),
        ({"max_samples": 0}, "dataset.max_samples"),
    ],
)
def test_wrong_arguments_are_refused(tokenizer: Any, arguments: dict[str, Any], where: str) -> None:
    for builder in (language_modeling, docstring_pairs):
        with pytest.raises(RecipeError, match=where):
            builder(tokenizer, **{"seq_length": 96, **arguments})


def test_a_vocabulary_that_cannot_hold_all_bytes_is_refused() -> None:
    with pytest.raises(RecipeError, match="at least 259"):
        train_tokenizer(200)
    assert len(train_tokenizer(259)) == 259


def test_another_tokenizer_has_other_prepared_samples(tokenizer: Any) -> None:
    other = train_tokenizer(300)
    assert language_modeling(other, 64)[0] != language_modeling(tokenizer, 64)[0]


def test_summaries_are_signatures_with_the_first_paragraphs(tokenizer: Any) -> None:
    dataset: Any = summaries(tokenizer, split="validation", source_prompt="explain: ")
    texts = {}
    for number in range(len(dataset)):
        sample = dataset[number]
        assert len(sample["input_ids"]) <= 64
        assert sample["labels"][-1] == tokenizer.eos_token_id
        source = tokenizer.decode(sample["input_ids"], skip_special_tokens=True)
        texts[source] = tokenizer.decode(sample["labels"], skip_special_tokens=True)
    # Whole sources, with whole targets.
    pairs = [pair for pair in library_pairs("validation") if len(pair.docstring) < 40]
    found = [texts.get(f"explain: {pair.prompt.rstrip()}") for pair in pairs]
    expected = [" ".join(pair.docstring.split("\n\n")[0].split()) for pair in pairs]
    same = [text == other for text, other in zip(found, expected, strict=True) if text is not None]
    assert len(same) > 20
    assert all(same)
