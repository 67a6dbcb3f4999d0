from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import normalizers
from tokenizers.normalizers import Prepend, Replace, Strip
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Sequence, WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.data.batches.packing import PackedDataset
from automodel_ckpt.data.collate import PadCollator
from automodel_ckpt.data.text import prompt_completion, text
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.examples.data.python_docs import train_tokenizer
from tests.unit.data.toys import jsonl

PAIRS = ({"prompt": "2 + 2 =", "completion": " 4"}, {"prompt": "A", "completion": "B" * 30})


def test_only_completion_and_end_carry_labels(tokenizer: Any, tmp_path: Path) -> None:
    dataset = prompt_completion(tokenizer, jsonl(tmp_path / "a.jsonl", *PAIRS))
    assert len(dataset) == 2
    sample = dataset[0]
    masked = sample["labels"].count(-100)
    assert tokenizer.decode(sample["input_ids"]) == "2 + 2 = 4</s>"
    assert tokenizer.decode(sample["labels"][masked:]) == " 4</s>"
    assert sample["labels"][masked:] == sample["input_ids"][masked:]


def test_a_tokenizer_that_begins_with_bos_does_so_here(tokenizer: Any, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    beginning = train_tokenizer(400)
    beginning.backend_tokenizer.post_processor = TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", 1)]
    )
    path = jsonl(tmp_path / "a.jsonl", *PAIRS)
    with_bos, without = prompt_completion(beginning, path)[0], prompt_completion(tokenizer, path)[0]
    assert with_bos == {
        "input_ids": [1, *without["input_ids"]],
        "labels": [-100, *without["labels"]],
    }


SPACE_STEPS = {
    "Mistral": (None, Metaspace(prepend_scheme="first", split=False)),
    "ALBERT": (None, Metaspace(prepend_scheme="always")),
    "Llama 2": (normalizers.Sequence([Prepend("▁"), Replace(" ", "▁")]), None),
    "BART with a space": (None, ByteLevel(add_prefix_space=True)),
    "none": (None, Metaspace(prepend_scheme="never")),
}
CONTINUED = (
    {"prompt": "Is it red? ", "completion": "It is"},
    {"prompt": "Is it bl", "completion": "ue"},
    {"prompt": "Is it?", "completion": " It is"},
    {"prompt": "", "completion": "It is"},
    {"prompt": "Is it?", "completion": "ue</s>It is"},
    {"prompt": "Is it?</s>", "completion": "It is"},
    {"prompt": "Is it", "completion": "?? It is"},
)


@pytest.mark.parametrize("family", SPACE_STEPS)
def test_a_tokenizer_puts_no_space_between_prompt_and_completion(
    family: str, tmp_path: Path
) -> None:
    tokenizer = with_steps(*SPACE_STEPS[family])
    dataset = prompt_completion(tokenizer, jsonl(tmp_path / "a.jsonl", *CONTINUED))
    for number, row in enumerate(CONTINUED):
        sample = dataset[number]
        prompt = encoded(tokenizer, row["prompt"])
        whole = encoded(tokenizer, row["prompt"] + row["completion"])
        ids = sample["input_ids"]
        # A model that generates gets the tokens of the prompt.
        assert ids[: len(prompt)] == prompt and sample["labels"][: len(prompt)] == [-100] * len(
            prompt
        )
        assert written(tokenizer, ids) == written(tokenizer, [*whole, tokenizer.eos_token_id]), row


DIVIDING_STEPS = {
    "T5": (None, Sequence([WhitespaceSplit(), Metaspace()])),
    "stripped": (Strip(), Metaspace()),
}


@pytest.mark.parametrize("family", DIVIDING_STEPS)
def test_a_tokenizer_that_divides_a_text_before_it_adds_spaces_is_used_as_it_is(
    family: str, tmp_path: Path
) -> None:
    tokenizer = with_steps(*DIVIDING_STEPS[family])
    rows = ({"prompt": "Is it? ", "completion": "It is 2"},)
    (sample,) = prompt_completion(tokenizer, jsonl(tmp_path / "a.jsonl", *rows))
    ids = [encoded(tokenizer, text) for text in rows[0].values()]
    assert sample["input_ids"] == [*ids[0], *ids[1], tokenizer.eos_token_id]
    assert " is" in written(tokenizer, ids[1])


def with_steps(normalizer: Any, pre_tokenizer: Any) -> Any:
    """Train a tokenizer with these steps, which can put a space before a text."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["<unk>", "</s>"], show_progress=False)
    made.train_from_iterator(["It is red", "Is it blue?? No.", "ue bl It ??", "It ?"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


def encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def written(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of all tokens with every space that they have, which a decoder could remove."""
    return "".join(tokenizer.convert_ids_to_tokens(ids)).replace("▁", " ").replace("Ġ", " ")


ALPACA = "{{ instruction }}\n{% if input %}{{ input }}\n{% endif %}"


def test_a_text_may_be_written_from_several_fields(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = (
        {"instruction": "Add", "input": "1 2", "output": "3"},
        {"instruction": "Go", "input": None, "output": "on"},
    )
    path = jsonl(tmp_path / "a.jsonl", *rows)
    with caplog.at_level("INFO"):
        dataset = prompt_completion(tokenizer, path, prompt_field=ALPACA, completion_field="output")
        assert "unused fields" not in caplog.text
        prompt_completion(tokenizer, path, prompt_field="instruction", completion_field="output")
    assert "unused fields: input" in caplog.text
    assert [tokenizer.decode(dataset[i]["input_ids"]) for i in range(2)] == [
        "Add\n1 2\n3</s>",
        "Go\non</s>",
    ]
    assert tokenizer.decode(text(tokenizer, path, field="{{ output }}!")[0]["labels"]) == "3!</s>"


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{{ instructions }}", "the data has no field instructions"),
        ("{{ prompt }", "a field template is not valid Jinja"),
        ("{{ prompt / 0 }}", "a field template fails on a sample\n.*a.jsonl:1"),
        ("{{ prompt.__class__ }}x{{ prompt.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_a_template_that_cannot_be_written_is_refused(
    tokenizer: Any, tmp_path: Path, template: str, what: str
) -> None:
    with pytest.raises(RecipeError, match=what):
        prompt_completion(tokenizer, jsonl(tmp_path / "a.jsonl", *PAIRS), prompt_field=template)


def test_documents_are_learnt_whole(tokenizer: Any, tmp_path: Path) -> None:
    dataset = text(
        tokenizer,
        jsonl(tmp_path / "a.jsonl", {"body": "first"}, "", {"body": "second"}),
        field="body",
    )
    assert [tokenizer.decode(dataset[i]["labels"]) for i in range(2)] == ["first</s>", "second</s>"]


def test_a_long_sample_is_refused_with_file_and_line(tokenizer: Any, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", PAIRS[0], "", PAIRS[1])
    with pytest.raises(
        RecipeError, match=r"a\.jsonl:3 \(\d+ tokens\)\n.*1 of 2 samples; seq_length 12"
    ):
        prompt_completion(tokenizer, path, seq_length=12)


def test_a_long_sample_is_cut_or_left_out_with_the_counts(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = jsonl(tmp_path / "a.jsonl", *PAIRS, {"prompt": "C" * 40, "completion": "D"})
    for _ in ("prepared now", "from the cache"):
        caplog.clear()
        dataset = prompt_completion(tokenizer, path, seq_length=12, truncation="right")
        assert [len(dataset[i]["input_ids"]) for i in range(len(dataset))][1:] == [12]
        assert "1 of 3 samples truncated to seq_length 12" in caplog.text


def test_a_changed_file_is_prepared_anew(tokenizer: Any, tmp_path: Path) -> None:
    first = text(tokenizer, jsonl(tmp_path / "a.jsonl", {"text": "first"}))[0]
    assert text(tokenizer, jsonl(tmp_path / "a.jsonl", {"text": "other"}))[0] != first


@pytest.mark.parametrize("way", ["plain", "packed", "streamed"])
def test_data_that_changed_but_is_as_long_is_told_of_at_a_resume(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    def loader() -> GlobalBatchLoader:
        dataset = text(tokenizer, str(tmp_path / "*.jsonl"), streaming=way == "streamed")
        return GlobalBatchLoader(
            PackedDataset(dataset, 64) if way == "packed" else dataset,
            global_batch_size=1,
            local_batch_size=1,
            collate_fn=PadCollator(0),
        )

    jsonl(tmp_path / "a.jsonl", {"text": "first"})
    jsonl(tmp_path / "b.jsonl", {"text": "second"})
    saved = loader().state_dict()
    loader().load_state_dict(saved)
    loader().load_state_dict(
        {name: value for name, value in saved.items() if name != "data"}
    )  # of an older version
    assert "was saved with" not in caplog.text
    (tmp_path / "b.jsonl").unlink()
    jsonl(tmp_path / "c.jsonl", {"text": "another"})
    loader().load_state_dict(saved)
    assert "the data has changed since this checkpoint was saved" in caplog.text


def test_a_tokenizer_without_end_token_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    endless = train_tokenizer(401)
    endless.eos_token = None
    with pytest.raises(RecipeError, match="no end-of-sequence token"):
        text(endless, jsonl(tmp_path / "a.jsonl", {"text": "a"}))


def test_what_is_blank_is_left_out_and_counted(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("first\n\n  \nsecond\n")
    with caplog.at_level("INFO"):
        dataset = text(tokenizer, str(path))
    assert [tokenizer.decode(dataset[i]["labels"]) for i in range(len(dataset))] == [
        "first</s>",
        "second</s>",
    ]
    assert "samples skipped: too long, without labels" in caplog.text
    pairs = jsonl(tmp_path / "b.jsonl", {"prompt": "", "completion": ""}, *PAIRS)
    assert len(prompt_completion(tokenizer, pairs)) == 2


def test_a_text_that_has_its_start_and_end_tokens_gets_no_second_ones(
    tokenizer: Any, tmp_path: Path
) -> None:
    from tokenizers.processors import TemplateProcessing

    beginning = train_tokenizer(400)
    beginning.backend_tokenizer.post_processor = TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", 1)]
    )
    documents = jsonl(
        tmp_path / "a.jsonl",
        *({"text": text} for text in ("a b", "<s>a b", "a b</s>", "<s>a b</s>")),
    )
    whole = text(beginning, documents)
    assert {beginning.decode(whole[i]["labels"]) for i in range(4)} == {"<s>a b</s>"}
    stream = text(beginning, documents, streaming=True)
    assert [stream.prepare(row) for row in stream] == [whole[i] for i in range(4)]
    packed = PackedDataset(whole, 16)
    assert sum(len(pack["input_ids"]) for pack in (packed[i] for i in range(len(packed)))) == sum(
        whole.lengths
    )
    answers = [("<s>a", " b"), ("a", " b</s>"), ("", "<s>a b"), ("a", " b")]
    pairs = jsonl(tmp_path / "b.jsonl", *({"prompt": p, "completion": c} for p, c in answers))
    asked = prompt_completion(beginning, pairs)
    assert [beginning.decode(asked[i]["input_ids"]) for i in range(4)] == ["<s>a b</s>"] * 4
    assert [asked[i]["labels"].count(-100) for i in range(4)] == [2, 2, 0, 2]


def test_empty_completions_are_counted(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "a", "completion": c} for c in ("", " ", "</s>", "b")]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    for _ in ("prepared now", "from the cache"):
        caplog.clear()
        prompt_completion(tokenizer, path)
        assert (
            "3 of 4 samples have an empty completion: only the end token is trained on"
            in caplog.text
        )
    stream = prompt_completion(tokenizer, path, streaming=True)
    for row in stream:
        stream.prepare(row)
    stream.report()
    assert "as far as this rank read it: 3 of 4 samples have an empty completion" in caplog.text
