"""Conversations with images: what is learnt, where images come from, and what is refused, per family of processors."""

import base64
import io
import json
import logging
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image
from transformers import LlavaProcessor, PreTrainedTokenizerFast

from automodel_ckpt.data.conversations.messages import UnusableSample
from automodel_ckpt.data.image_collate import ImageTextCollator
from automodel_ckpt.data.media.media_files import open_image
from automodel_ckpt.data.vlm import conversations
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.interface import image_token_ids
from tests.support.models.vision import FAMILIES, TEMPLATE, write_conversations

IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def processors() -> dict[str, tuple[Any, Any]]:
    return {family: make() for family, make in FAMILIES.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data"), 10)


def collator(made: tuple[Any, Any]) -> ImageTextCollator:
    config, processor = made
    return ImageTextCollator(processor, image_token_ids(config, processor))


def learnt(processor: Any, batch: dict[str, torch.Tensor]) -> list[str]:
    return [processor.tokenizer.decode(row[row >= 0]) for row in batch["labels"]]


def text(value: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": value}]


def written(directory: Path, *rows: dict[str, Any]) -> str:
    Image.fromarray(np.full((16, 16, 3), 90, dtype=np.uint8)).save(directory / "a.png")
    path = directory / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def one_turn(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}, {"role": "assistant", "content": text("red")}]


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_the_assistant_says_is_learnt(family: str, processors: Any, data: Path) -> None:
    config, processor = processors[family]
    samples = conversations(processor, str(data))
    batch = collator(processors[family])([samples[number] for number in (2, 3, 4)])
    assert learnt(processor, batch) == ["It is blue</s>", "It is grey</s>", "It is red</s>"]
    image = torch.isin(batch["input_ids"], torch.tensor(sorted(image_token_ids(config, processor))))
    assert image[:2].any(1).all() and not image[2].any()
    assert (batch["labels"][image] == -100).all()
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    num_images = len(
        batch.get("image_grid_thw", batch["pixel_values"])
    )  # Qwen concatenates patches
    assert num_images in (2, 3), "concatenated images, or a row of them for each sample"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_behind_a_space_is_learnt_with_its_first_word(
    family: str, processors: Any, data: Path
) -> None:
    _, processor = processors[family]
    samples = conversations(processor, str(data), answer_prefix="So: ")
    batch = collator(processors[family])([samples[2], samples[4]])
    assert learnt(processor, batch) == [" It is blue</s>", " It is red</s>"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_without_images_gets_a_blank_one_that_weighs_nothing(
    family: str, processors: Any, data: Path
) -> None:
    _, processor = processors[family]
    samples = conversations(processor, str(data))
    batch = collator(processors[family])([samples[4], samples[9]])
    assert learnt(processor, batch) == ["It is red</s>", "It is green</s>", ""]
    assert "pixel_values" in batch


@pytest.mark.parametrize("family", FAMILIES)
def test_every_turn_is_learnt_in_a_conversation_with_an_image_in_each(
    family: str, processors: Any, tmp_path: Path
) -> None:
    _, processor = processors[family]
    turns = [
        turn
        for number in range(3)
        for turn in one_turn([{**IMAGE, "path": "a.png"}, *text(f"{number}?")])
    ]
    path = written(tmp_path, {"messages": turns})
    collate = collator(processors[family])
    assert learnt(processor, collate([conversations(processor, path)[0]])) == ["red</s>" * 3]
    assert learnt(processor, collate([conversations(processor, path, learn="last")[0]])) == [
        "red</s>"
    ]


def sentencepiece(prepend: str) -> Any:
    """A tokenizer that puts a space before the first word of a text (``first``), or of each part of it."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=prepend)
    special = ["<unk>", "<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<image>"]
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=special, show_progress=False)
    made.train_from_iterator(["It is red", "It is blue", "why?"], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", special.index("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.parametrize("start", ["<s>", ""])
@pytest.mark.parametrize("prepend", ["first", "always", "never"])
def test_the_first_word_of_an_answer_is_learnt_whatever_the_tokenizer_puts_before_a_text(
    prepend: str, start: str, processors: Any, tmp_path: Path
) -> None:
    tokenizer = sentencepiece(prepend)
    llava = LlavaProcessor(
        processors["llava"][1].image_processor,
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )
    image = tokenizer.convert_tokens_to_ids("<image>")
    # No space is between the header and the answer.
    template = TEMPLATE.replace("<s>", start).replace("|>", "|>(").replace("IMAGE", "<image>")
    turns = []
    for answer in ("It is red", "It is blue"):
        question = [{**IMAGE, "path": "a.png"}, *text("why?")]
        turns += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": text(answer)},
        ]
    path = written(tmp_path, {"messages": turns})
    sample = conversations(llava, path, chat_template=template)[0]
    [labels] = ImageTextCollator(llava, frozenset({image}))([sample])["labels"]
    words = "".join(tokenizer.convert_ids_to_tokens(labels[labels >= 0].tolist()))
    assert words == "It▁is▁red</s>It▁is▁blue</s>"


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_markers_say_what_is_learnt(family: str, processors: Any, data: Path) -> None:
    _, processor = processors[family]
    said = "{{ c['text'] }}"
    marked = "{% generation %}" + said + "{% endgeneration %}"
    chosen = "{% if m['role'] == 'assistant' %}" + marked + "{% else %}" + said + "{% endif %}"
    template = TEMPLATE.replace(said, chosen).replace("IMAGE", processor.image_token)
    samples = conversations(processor, str(data), chat_template=template)
    assert learnt(processor, collator(processors[family])([samples[0], samples[4]])) == [
        "It is red",
        "It is red",
    ]


def test_a_column_of_images_is_decoded_row_by_row(processors: Any, tmp_path: Path) -> None:
    pictures = [Image.fromarray(np.full((8, 8, 3), value, dtype=np.uint8)) for value in (10, 200)]
    table = datasets.Dataset.from_dict(
        {"messages": [one_turn([IMAGE, *text("?")])] * 2, "picture": pictures},
        features=datasets.Features(
            {
                "messages": datasets.List(
                    {
                        "role": datasets.Value("string"),
                        "content": datasets.List(
                            {"type": datasets.Value("string"), "text": datasets.Value("string")}
                        ),
                    }
                ),
                "picture": datasets.Image(),
            }
        ),
    )
    table.to_parquet(str(tmp_path / "rows.parquet"))
    samples = conversations(
        processors["llava"][1], str(tmp_path / "rows.parquet"), images_field="picture"
    )
    assert [sample.images[0].getpixel((0, 0)) for sample in (samples[0], samples[1])] == [
        (10,) * 3,
        (200,) * 3,
    ]


PARTS: list[tuple[Any, str]] = [
    ({"type": "video", "video": "a.mp4"}, "not trained on videos"),
    ({"type": "surprise", "surprise": "?"}, "type: surprise"),
    ({"type": "text", "text": None}, "has no text"),
    ({"type": "text", "text": "?", "image": "a.png"}, "text part of a message has an image"),
    ({"type": "image", "text": "?"}, "image part of a message has a text"),
    ({"source": "a.png"}, "has no text"),
    ({"image": "a.png", "url": "a.png"}, "without a type"),
    (7, "neither text nor an object"),
    ({"type": "image", "base64": "no!"}, "not base64 text"),
    ({"type": "image", "image": [1]}, "neither a path nor"),
    ({"type": "image", "image": "a.png", "max_pixels": 784}, r"max_pixels: 784[\s\S]*processor"),
]


def inline_part(part: Any) -> dict[str, Any]:
    return {"messages": one_turn([*text("?"), part])}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": one_turn([IMAGE])}, "1 entry for 0 images"),
        ({"messages": one_turn([IMAGE]), "images": ["a.png", "a.png"]}, "1 entry for 2 images"),
        (
            {"messages": one_turn("<image>\nWhat is it?"), "images": "a.png"},
            "placeholder for an image",
        ),
        (
            {"messages": one_turn([{**IMAGE, "image": "gone.png"}])},
            r"gone.png \(No such file or directory\)",
        ),
        ({"messages": one_turn([{**IMAGE, "image": "rows.jsonl"}])}, "an image cannot be read"),
        (
            {"messages": one_turn([{**IMAGE, "url": "https://example.org/a.png"}])},
            "images are not downloaded",
        ),
        (
            {"messages": one_turn([{**IMAGE, "image": "a.png"}])[:1]},
            "no assistant text to train on",
        ),
        *((inline_part(part), message) for part, message in PARTS),
    ],
)
def test_a_conversation_that_makes_no_sample_is_refused_with_its_line(
    row: dict[str, Any], message: str, processors: Any, tmp_path: Path
) -> None:
    path = written(tmp_path, row)
    with pytest.raises(RecipeError, match=message) as caught:
        conversations(processors["llava"][1], path)[0]
    assert "rows.jsonl:1" in str(caught.value)


def inline(**entry: Any) -> dict[str, Any]:
    return {"messages": one_turn([entry, *text("?")])}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": one_turn([IMAGE, *text("?")]), "images": ["a.png"]},
        {"messages": one_turn([*text("?")]), "images": "a.png"},
        {"messages": json.dumps(one_turn("?")), "images": ["a.png"]},
        inline(type="image", image="a.png"),
        inline(type="image_url", image_url={"url": "a.png", "detail": "low"}),
        inline(type="image_url", image_url="DATA"),
        inline(type="input_image", image_url="a.png"),
        inline(type="image", base64="BASE64"),
        inline(type="image", image="FOLDER/a.png"),
        inline(type="image", image=None, url=None, path="a.png", text=None),
        inline(image="a.png"),
        {"messages": one_turn([{**IMAGE, "path": "a.png"}, {**text("?")[0], "image": None}])},
        {"messages": one_turn([{**IMAGE, "path": "a.png"}, {"type": "input_text", "text": "?"}])},
        {"messages": one_turn([{**IMAGE, "path": "a.png"}, "?"])},
    ],
)
def test_an_image_in_any_place_and_in_other_programs_entries_is_the_same_sample(
    row: dict[str, Any], processors: Any, tmp_path: Path
) -> None:
    path = Path(written(tmp_path, row))
    content = base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    given = path.read_text().replace("DATA", f"data:image/png;base64,{content}")
    given = given.replace("BASE64", content).replace("FOLDER", f"file://{tmp_path}")
    path.write_text(given)
    # As Qwen's templates do, this one takes every entry with a key of an image for an image.
    template = TEMPLATE.replace("c['type'] == 'image'", "c['type'] == 'image' or 'image' in c")
    template = template.replace("IMAGE", "<image>")
    sample = conversations(processors["llava"][1], str(path), chat_template=template)[0]
    assert sample.text == "<s><|user|><image>?</s><|assistant|>red</s>"
    assert [image.size for image in sample.images] == [(16, 16)]


def encoded(pixels: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", [np.uint16, np.float32, np.int32])
def test_images_of_more_than_8_bits_are_rejected(kind: Any, tmp_path: Path) -> None:
    pixels = np.array([[0, 0x100, 0x7FFF, 0xFFFF]], dtype=kind)
    with pytest.raises(UnusableSample, match="more than 8 bits"):
        open_image(encoded(pixels, "TIFF"), tmp_path)


def test_images_are_turned_as_their_exif_data_state(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x112] = 6  # the top of the scene is at the right
    pixels = np.array([[[0] * 3, [250] * 3]], dtype=np.uint8)
    turned = open_image(encoded(pixels, exif=exif), tmp_path)
    assert np.asarray(turned)[..., 0].tolist() == [[0], [250]]


def test_a_sample_longer_than_seq_length_is_refused_with_its_place(
    processors: Any, data: Path
) -> None:
    samples = conversations(processors["llava"][1], str(data), seq_length=20)
    with pytest.raises(RecipeError, match="1 of 1 sample; seq_length 20") as caught:
        collator(processors["llava"])([samples[4], samples[3]])
    assert "sample 3 of" in str(caught.value)


def test_cutting_keeps_images_whole_and_leaves_out_what_it_cannot_cut(
    processors: Any, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, processor = processors["llava"]
    collate = collator(processors["llava"])

    def cut(seq_length: int) -> dict[str, torch.Tensor]:
        samples = conversations(processor, str(data), seq_length=seq_length, truncation="right")
        return collate([samples[0], samples[4]])

    whole = cut(100)
    lengths = whole["attention_mask"].sum(1).tolist()
    shorter = cut(lengths[0] - 2)
    assert shorter["attention_mask"].sum(1).tolist() == [lengths[0] - 2, lengths[1]]
    remaining = learnt(processor, shorter)
    assert remaining[0] and "It is red".startswith(remaining[0]) and remaining[1] == "It is red</s>"
    assert shorter["pixel_values"].shape == whole["pixel_values"].shape
    with caplog.at_level(logging.WARNING):
        left_out = cut(lengths[1])
    assert learnt(processor, left_out) == ["", "It is red</s>"]
    assert collate.num_left_out == 1
    assert "sample 0 of" in caplog.text and "skipped" in caplog.text
    with caplog.at_level(logging.WARNING):
        replaced = cut(10)
    assert "truncation would cut media" in caplog.text
    image_token = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    num_image_tokens = [
        int((batch["input_ids"] == image_token).sum()) for batch in (replaced, whole)
    ]
    assert num_image_tokens[0] == num_image_tokens[1] > 10, "the blank image is whole"


@pytest.mark.skipif(
    version("transformers").startswith("5.17."),
    reason="this version accepts images that no text has a place for",
)
def test_what_the_processor_refuses_is_named(processors: Any, data: Path) -> None:
    _, processor = processors["llava"]
    sample = conversations(processor, str(data))[0]
    no_place = replace(sample, text="no place for an image", labeled_spans=[], where="line 2")
    with pytest.raises(RecipeError, match=r"rejects a sample\s+where:\s+line 2\n"):
        collator(processors["llava"])([sample, no_place])


def test_samples_of_a_language_model_are_rejected(processors: Any) -> None:
    collate = collator(processors["llava"])
    for function in (lambda sample: collate([sample]), collate.num_tokens):
        with pytest.raises(RecipeError, match="not a conversation with images") as caught:
            function({"input_ids": [1], "labels": [1]})
        assert caught.value.problems[0].value == "input_ids, labels"
