"""Questions about images in the columns of a table: presets, formats of answers, and rows that cannot be used."""

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from automodel_ckpt.data.image_collate import ImageTextCollator
from automodel_ckpt.data.media.columns import json_tokens
from automodel_ckpt.data.media.image_conversations import ImageText
from automodel_ckpt.data.vlm import conversations, image_answers
from automodel_ckpt.errors import RecipeError
from tests.support.models.vision import TEMPLATE, llava

RECEIPT = {"gt_parse": {"menu": [{"nm": "Tea", "price": "2"}, {"nm": "Pie"}], "total": {"n": 3}}}

RECEIPT_TOKENS = (
    "<s_total><s_n>3</s_n></s_total><s_menu><s_price>2</s_price><s_nm>Tea</s_nm><sep/>"
    "<s_nm>Pie</s_nm></s_menu>"
)


@pytest.fixture(scope="module")
def processor() -> Any:
    return llava()[1]


def picture(level: int) -> Image.Image:
    return Image.fromarray(np.full((8, 8, 3), level, dtype=np.uint8))


def png(level: int) -> bytes:
    buffer = io.BytesIO()
    picture(level).save(buffer, "PNG")
    return buffer.getvalue()


def bomb(side: int = 30_000) -> bytes:
    """A PNG file of a few bytes that declares side * side pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def table(directory: Path, image_column: str, **columns: list[Any]) -> str:
    """A Parquet file with a column of images, as the Hub's data sets have it."""
    num_rows = len(next(iter(columns.values())))
    images = [picture(10 + number) for number in range(num_rows)]
    rows = datasets.Dataset.from_dict({image_column: images, **columns})
    rows = rows.cast_column(image_column, datasets.Image())
    path = directory / "train.parquet"
    rows.to_parquet(str(path))
    return str(path)


def labeled(processor: Any, sample: ImageText) -> str:
    batch = ImageTextCollator(processor)([sample])
    row = batch["labels"][0]
    return str(processor.tokenizer.decode(row[row >= 0]))


PRESETS = [
    ("medpix", "image_id", {"question": ["Where?"], "answer": ["Left"]}, "Where?", "Left"),
    ("rdr", "image", {"text": ["A red item"]}, "Describe this image.", "A red item"),
    (
        "shopify",
        "product_image",
        {"ground_truth_category": ["Toys > Dolls"]},
        "What product category does this item belong to?",
        "Toys > Dolls",
    ),
    (
        "cord_v2",
        "image",
        {"ground_truth": [json.dumps(RECEIPT)]},
        "Describe this image.",
        RECEIPT_TOKENS,
    ),
]


@pytest.mark.parametrize(("preset", "column", "columns", "question", "answer"), PRESETS)
def test_a_preset_reads_the_columns_of_its_data_set(
    preset: Any,
    column: str,
    columns: dict[str, Any],
    question: str,
    answer: str,
    processor: Any,
    tmp_path: Path,
) -> None:
    path = table(tmp_path, column, **columns)
    [sample] = image_answers(processor, path, preset, seq_length=None)
    assert sample.text == f"<s><|user|><image>{question}</s><|assistant|>{answer}</s>"
    assert [image.getpixel((0, 0)) for image in sample.images] == [(10, 10, 10)]
    assert labeled(processor, sample) == f"{answer}</s>"


def test_other_columns_are_named_and_take_precedence_over_the_preset(
    processor: Any, tmp_path: Path
) -> None:
    path = table(tmp_path, "photo", q=["How many?"] * 3, text=["one", "two", "three"])
    samples = image_answers(
        processor, path, "rdr", image_field="photo", prompt_field="q", max_samples=2
    )
    assert [sample.text for sample in samples] == [
        "<s><|user|><image>How many?</s><|assistant|>one</s>",
        "<s><|user|><image>How many?</s><|assistant|>two</s>",
    ]
    other = image_answers(
        processor, path, "medpix", image_field="photo", prompt="Count.", answer_field="text"
    )
    assert other[2].text == "<s><|user|><image>Count.</s><|assistant|>three</s>"


@pytest.mark.parametrize("kind", ["path", "bytes", "several"])
def test_images_are_paths_bytes_or_several(kind: str, processor: Any, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(90))
    if kind == "bytes":
        rows = datasets.Dataset.from_dict({"image": [png(90)], "answer": ["yes"]})
        path = tmp_path / "rows.parquet"
        rows.to_parquet(str(path))
    else:
        image: Any = "a.png" if kind == "path" else ["a.png", "a.png"]
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({"image": image, "answer": "yes"}) + "\n")
    [sample] = image_answers(processor, str(path))
    number = 2 if kind == "several" else 1
    assert [image.getpixel((0, 0)) for image in sample.images] == [(90, 90, 90)] * number
    assert sample.text.count("<image>") == number


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": 1, "b": {"c": [True, None]}}, "<s_b><s_c>True<sep/>None</s_c></s_b><s_a>1</s_a>"),
        ([{"a": "x"}, {"text_sequence": "plain"}], "<s_a>x</s_a><sep/>plain"),
        ({}, ""),
    ],
)
def test_an_object_becomes_the_tokens_of_donut(value: Any, expected: str) -> None:
    assert json_tokens(value) == expected


UNUSABLE = [
    ({"image": "a.png", "answer": None}, {}, "no text in a column"),
    ({"image": "a.png", "answer": " "}, {}, "column answer"),
    ({"image": None, "answer": "yes"}, {}, "a row has no image"),
    ({"image": [], "answer": "yes"}, {}, "a row has no image"),
    ({"image": "gone.png", "answer": "yes"}, {}, r"gone.png \(No such file"),
    ({"image": "rows.jsonl", "answer": "yes"}, {}, "an image cannot be read"),
    ({"image": "bomb.png", "answer": "yes"}, {}, "exceeds limit"),
    ({"image": "https://example.org/a.png", "answer": "yes"}, {}, "images are not downloaded"),
    ({"image": 7, "answer": "yes"}, {}, "neither a path nor"),
    ({"image": "a.png", "answer": "{}"}, {"answer_format": "json_tokens"}, "not a JSON object"),
    ({"image": "a.png", "answer": "{"}, {"answer_format": "json_tokens"}, "this is not JSON"),
    (
        {"image": "a.png", "answer": "[" * 100_000},
        {"answer_format": "json_tokens"},
        "not a JSON object",
    ),
    (
        {"image": "a.png", "answer": {"gt_parses": []}},
        {"answer_format": "json_tokens"},
        "not a JSON object",
    ),
    ({"image": "a.png", "answer": "an <image>"}, {}, "placeholder for an image"),
]


@pytest.mark.parametrize(("row", "options", "message"), UNUSABLE)
def test_a_row_that_makes_no_sample_is_rejected_with_its_line(
    row: dict[str, Any], options: dict[str, Any], message: str, processor: Any, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png(90))
    (tmp_path / "bomb.png").write_bytes(bomb())
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    samples = image_answers(processor, str(path), **options)
    with pytest.raises(RecipeError, match=message) as caught:
        samples[0]
    assert "rows.jsonl:1" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_field": "photo"}, r"photo(.|\n)*image, answer"),
        ({"prompt_field": "question"}, "question"),
        ({"path": None}, "the data set has no path"),
        ({"preset": "cord"}, "unknown value for preset"),
        ({"answer_format": "xml"}, "unknown value for answer_format"),
        ({"truncation": "left"}, "unknown value for truncation"),
        ({"prompt": "?", "prompt_field": "answer"}, "as a text and as a column"),
        ({"path": "gone.jsonl"}, "gone.jsonl"),
    ],
)
def test_wrong_arguments_are_rejected_before_training(
    options: dict[str, Any], message: str, processor: Any, tmp_path: Path
) -> None:
    path = table(tmp_path, "image", answer=["yes"])
    with pytest.raises(RecipeError, match=message):
        image_answers(processor, **{"path": path} | options)


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize("has_markers", [False, True])
def test_a_prefix_precedes_every_answer_and_has_no_label(
    has_markers: bool, processor: Any, tmp_path: Path
) -> None:
    said = "{{ c['text'] }}"
    template = TEMPLATE.replace("IMAGE", "<image>")
    if has_markers:
        marked = f"{{% generation %}}{said}{{% endgeneration %}}"
        chosen = f"{{% if m['role'] == 'assistant' %}}{marked}{{% else %}}{said}{{% endif %}}"
        template = template.replace(said, chosen)
    turns = [turn("user", "a?"), turn("assistant", "red"), turn("user", "b?")]
    turns.append(turn("assistant", "blue"))
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    end = "" if has_markers else "</s>"
    for learn, expected in (("all", f"red{end}blue{end}"), ("last", f"blue{end}")):
        [sample] = conversations(
            processor, str(path), chat_template=template, learn=learn, answer_prefix="<think>\n"
        )
        assert sample.text == (
            "<s><|user|>a?</s><|assistant|><think>\nred</s>"
            "<|user|>b?</s><|assistant|><think>\nblue</s>"
        )
        assert "".join(sample.text[a:b] for a, b in sample.labeled_spans) == expected
        assert labeled(processor, sample) == expected


def test_the_markers_of_llavas_conversations_are_the_places_of_their_images(
    processor: Any, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png(90))
    turns = [
        {"from": "human", "value": "<image>\nWhat is it?"},
        {"from": "gpt", "value": "A square"},
        {"from": "human", "value": "Why?"},
        {"from": "gpt", "value": "It has corners"},
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"conversations": turns, "image": "a.png"}]))
    options = {
        "messages_field": "conversations",
        "images_field": "image",
        "image_marker": "<image>",
    }
    [sample] = conversations(processor, str(path), **options)  # type: ignore[arg-type]
    assert sample.text == (
        "<s><|user|><image>What is it?</s><|assistant|>A square</s>"
        "<|user|>Why?</s><|assistant|>It has corners</s>"
    )
    assert len(sample.images) == 1


def test_a_template_that_supports_only_text_gets_the_placeholders_of_images(
    processor: Any, tmp_path: Path
) -> None:
    path = table(tmp_path, "image", answer=["yes"])
    template = (
        "<s>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    [sample] = image_answers(processor, path, chat_template=template)
    assert sample.text == "<s><|user|><image>Describe this image.</s><|assistant|>yes</s>"
    assert labeled(processor, sample) == "yes</s>"


@pytest.mark.parametrize(("content", "message"), [(bomb(), "exceeds limit"), (png(1)[:40], "")])
def test_a_damaged_image_in_a_column_is_rejected_with_its_row(
    content: bytes, message: str, processor: Any, tmp_path: Path
) -> None:
    images = [{"bytes": png(1), "path": None}, {"bytes": content, "path": "x.png"}]
    rows = datasets.Dataset.from_dict({"image": images, "answer": ["yes", "no"]})
    path = tmp_path / "rows.parquet"
    rows.cast_column("image", datasets.Image()).to_parquet(str(path))
    samples = image_answers(processor, str(path))
    assert samples[0].images[0].size == (8, 8)
    with pytest.raises(RecipeError, match=f"an image cannot be read(.|\n)*{message}") as caught:
        samples[1]
    assert "row 1" in str(caught.value)
