"""Audio of data sets: how files are read, what the samples are, and users' mistakes."""

import base64
import json
import logging
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from automodel_ckpt.data.batches.packing import IS_TOKEN
from automodel_ckpt.data.conversations.messages import UnusableSample
from automodel_ckpt.data.image_collate import ImageTextCollator
from automodel_ckpt.data.media import media_files as audio_files
from automodel_ckpt.data.media.media_files import duration_of, open_audio
from automodel_ckpt.data.vlm import conversations, transcripts
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.interface import image_token_ids
from tests.support.models.audio import (
    FAMILIES,
    ONE_AUDIO,
    RATE,
    tone,
    write_conversations,
    write_wav,
)

TONE = tone(440, 0.25)
AUDIO = {"type": "audio"}


@pytest.fixture(scope="module")
def processors() -> dict[str, tuple[Any, Any]]:
    return {family: make() for family, make in FAMILIES.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data"), 10)


def collator(made: tuple[Any, Any], samples: Any) -> ImageTextCollator:
    config, processor = made
    return ImageTextCollator(processor, image_token_ids(config, processor), media=samples.media)


def labeled_texts(processor: Any, batch: dict[str, torch.Tensor]) -> list[str]:
    return [processor.tokenizer.decode(row[row >= 0]) for row in batch["labels"]]


def kinds_in(batch: dict[str, torch.Tensor]) -> set[str]:
    """The kinds of media that a batch has values of."""
    suffixes = {"input_features": "audio", "pixel_values": "image"}
    return {kind for name in batch for end, kind in suffixes.items() if name.endswith(end)}


def text(value: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": value}]


def one_turn(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}, {"role": "assistant", "content": text("red")}]


def written(directory: Path, *rows: dict[str, Any]) -> str:
    write_wav(directory / "a.wav", TONE)
    path = directory / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_all_places_of_an_audio_give_the_same_samples(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "a.wav", TONE)
    content = path.read_bytes()
    encoded = base64.b64encode(content).decode()
    expected = (TONE / 2**15).astype(np.float32)
    places: list[Any] = [
        "a.wav",
        f"file://{path}",
        f"data:audio/wav;base64,{encoded}",
        content,
        {"bytes": content, "path": None},
        {"path": "a.wav", "bytes": None},
        {"base64": encoded},
        {"array": expected.tolist(), "sampling_rate": RATE},
        {"array": [expected.tolist()], "sampling_rate": RATE},
    ]
    for place in places:
        assert np.array_equal(open_audio(place, tmp_path, RATE), expected), place
        assert duration_of(place, tmp_path) == 0.25


def test_a_file_that_was_cut_is_an_error_and_one_from_a_pipe_is_read(tmp_path: Path) -> None:
    content = write_wav(tmp_path / "a.wav", TONE).read_bytes()
    with pytest.raises(UnusableSample, match="ends before its header says"):
        open_audio(content[:-100], tmp_path, RATE)
    # As ffmpeg writes it to standard output.
    piped = content.replace(b"data" + (2 * len(TONE)).to_bytes(4, "little"), b"data" + b"\xff" * 4)
    assert piped != content
    assert np.array_equal(open_audio(piped, tmp_path, RATE), open_audio(content, tmp_path, RATE))
    (tmp_path / "piped.wav").write_bytes(piped)
    assert duration_of(piped, tmp_path) == duration_of("piped.wav", tmp_path) == 0.25


@pytest.mark.skipif(not find_spec("soxr"), reason="needs the extra audio")
@pytest.mark.parametrize("rate", [8_000, 44_100])
def test_other_sampling_rates_are_converted_as_by_transformers(rate: int, tmp_path: Path) -> None:
    path = write_wav(tmp_path / "a.wav", tone(440, 0.25, rate), rate)
    found = open_audio("a.wav", tmp_path, RATE)
    load: Any = __import__("transformers.audio_utils").audio_utils.load_audio
    assert np.array_equal(found, load(str(path), RATE, backend="soundfile"))
    middle = slice(500, -500)
    np.testing.assert_allclose(found[middle], (TONE / 2**15)[middle], atol=2e-3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("missing.wav", "cannot be read"),
        ("empty.wav", "no samples"),
        ("http://host/a.wav", "audios are not downloaded"),
        (7, "neither a path nor the content"),
        ({"array": [0.0]}, "sampling rate"),
        ({"array": ["x"], "sampling_rate": RATE}, "not numbers"),
        ({"array": [float("nan")], "sampling_rate": RATE}, "not numbers"),
    ],
)
def test_an_audio_that_cannot_be_used_is_rejected(value: Any, message: str, tmp_path: Path) -> None:
    write_wav(tmp_path / "empty.wav", TONE[:0])
    with pytest.raises(UnusableSample, match=message):
        open_audio(value, tmp_path, RATE)


def test_without_the_extra_the_errors_name_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("soundfile", "soxr"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    write_wav(tmp_path / "a.wav", TONE, 44_100)
    (tmp_path / "a.flac").write_bytes(b"fLaC....")
    with pytest.raises(UnusableSample, match="16000 Hz") as caught:
        open_audio("a.wav", tmp_path, RATE)
    assert "44100 Hz" in str(caught.value.value) and "[audio]" in str(caught.value.hint)
    with pytest.raises(UnusableSample, match="soundfile") as caught:
        open_audio("a.flac", tmp_path, RATE)
    assert "[audio]" in str(caught.value.hint)
    assert audio_files._INSTALL.startswith("pip install")


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_the_assistant_says_has_labels(family: str, processors: Any, data: Path) -> None:
    config, processor = processors[family]
    samples = conversations(processor, str(data), media=["audio"])
    collate = collator(processors[family], samples)
    batch = collate([samples[number] for number in (2, 3)])
    assert labeled_texts(processor, batch) == ["It is blue</s>", "It is grey</s>"]
    ids = torch.tensor(sorted(image_token_ids(config, processor)))
    is_audio = torch.isin(batch["input_ids"], ids)
    assert is_audio.any(1).all()
    assert (batch["labels"][is_audio] == -100).all()
    unknown = ImageTextCollator(processor, media=frozenset())
    with pytest.raises(RecipeError, match="samples have audio, which the data set does not"):
        unknown([samples[2]])
    if family in ONE_AUDIO:
        return
    # A micro-batch without audio gets a blank one.
    batch = collate([samples[4], samples[9]])
    assert labeled_texts(processor, batch) == ["It is red</s>", "It is green</s>", ""]
    assert kinds_in(batch) == {"audio"}
    assert torch.equal(batch[IS_TOKEN][:2], batch["attention_mask"][:2] != 0)
    assert not batch[IS_TOKEN][2].any()


@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in ONE_AUDIO])
def test_every_turn_with_an_audio_and_an_image_has_labels(
    family: str, processors: Any, tmp_path: Path
) -> None:
    _, processor = processors[family]
    has_images = hasattr(processor, "image_processor")
    pixels = np.full((16, 16, 3), 90, dtype=np.uint8)
    __import__("PIL.Image").Image.fromarray(pixels).save(tmp_path / "a.png")
    image = [{"type": "image", "image": "a.png"}] if has_images else []
    turns = [
        turn
        for number in range(3)
        for turn in one_turn([{**AUDIO, "path": "a.wav"}, *image, *text(f"{number}?")])
    ]
    media = ["audio", "image"] if has_images else ["audio"]
    samples = conversations(processor, written(tmp_path, {"messages": turns}), media=media)
    batch = collator(processors[family], samples)([samples[0]])
    assert labeled_texts(processor, batch) == ["red</s>" * 3]
    # A mixture of both without either gets one row with both.
    plain = replace(samples[0], text="<s><|assistant|>red</s>", images=[], audios=[])
    plain = replace(plain, labeled_spans=[(16, 23)])
    blank = collator(processors[family], samples)([plain])
    assert len(blank["input_ids"]) == 2
    assert kinds_in(blank) == samples.media


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": one_turn([AUDIO, *text("?")])}, "number of audios does not match"),
        (
            {"messages": one_turn([AUDIO, *text("?")]), "audios": ["a.wav", "a.wav"]},
            "number of audios does not match",
        ),
        ({"messages": one_turn(text("<|AUDIO|>?")), "audios": ["a.wav"]}, "placeholder"),
        ({"messages": one_turn([{**AUDIO, "audio": "no.wav"}])}, "cannot be read"),
        ({"messages": one_turn([{"type": "image", "image": "a.png"}])}, "not supported here"),
        ({"messages": one_turn([{**AUDIO, "audio": "a.wav", "text": "x"}])}, "has a text"),
    ],
)
def test_a_conversation_that_cannot_be_used_is_rejected_with_its_line(
    row: dict[str, Any], message: str, processors: Any, tmp_path: Path
) -> None:
    _, processor = processors["qwen2_audio"]
    with pytest.raises(RecipeError, match=message) as caught:
        conversations(processor, written(tmp_path, row))[0]
    assert "rows.jsonl" in str(caught.value)


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen2_5_omni"])
def test_audio_that_the_processor_would_cut_is_an_error_or_counted(
    family: str, processors: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, processor = processors[family]
    limit = processor.feature_extractor.chunk_length
    for name, seconds in (("fits", limit), ("long", limit + 0.06)):
        write_wav(tmp_path / f"{name}.wav", tone(300, seconds))
    rows = [{"messages": one_turn("?"), "audios": f"{name}.wav"} for name in ("fits", "long")]
    path = written(tmp_path, *rows)
    samples = conversations(processor, path, media=["audio"])
    collate = collator(processors[family], samples)
    assert labeled_texts(processor, collate([samples[0]])) == ["red</s>"]
    with pytest.raises(RecipeError, match="cuts its end"):
        collate([samples[1]])
    skipped = replace(samples[1], truncation="skip")
    with caplog.at_level(logging.WARNING):
        assert labeled_texts(processor, collate([samples[0], skipped])) == ["red</s>", ""]
    assert "is skipped (1 so far)" in caplog.text
    assert collate.num_tokens(skipped) == 0


def test_transcripts_of_a_table_have_labels(
    processors: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, processor = processors["qwen2_audio"]
    texts = ["Hello, it's <COMMA> me", " ", "too short", "too long", "<NOISE>"]
    seconds = [0.3, 0.3, 0.05, 0.9, 0.3]
    cells = []
    for number, each in enumerate(seconds):
        path = write_wav(tmp_path / f"{number}.wav", tone(300, each))
        cells.append({"bytes": path.read_bytes(), "path": None})
    rows = datasets.Dataset.from_dict({"audio": cells, "text": texts})
    rows = rows.cast_column("audio", datasets.Audio())
    rows.to_parquet(tmp_path / "a.parquet")
    options: dict[str, Any] = {"prompt": "Write.", "system_prompt": "S"}
    with caplog.at_level(logging.INFO):
        samples = transcripts(
            processor,
            str(tmp_path / "a.parquet"),
            normalize="upper_words",
            min_seconds=0.1,
            max_seconds=0.5,
            **options,
        )
    assert "4 of 5 rows left out" in caplog.text
    assert len(samples) == 1
    batch = collator(processors["qwen2_audio"], samples)([samples[0]])
    assert labeled_texts(processor, batch) == ["HELLO IT'S ME</s>"]
    assert samples[0].text.startswith("<s><|system|>S</s><|user|>Write.<|audio_bos|>")
    later = transcripts(processor, str(tmp_path / "a.parquet"), prompt="W", prompt_first=False)
    assert "<|audio_eos|>W</s>" in later[0].text and len(later) == 4
    with pytest.raises(RecipeError, match="no row is left"):
        transcripts(processor, str(tmp_path / "a.parquet"), min_seconds=9)
    with pytest.raises(RecipeError, match="a row has no transcript"):
        transcripts(processor, str(tmp_path / "a.parquet"), skip_empty=False)[1]
    with pytest.raises(RecipeError, match="as a text and as a column"):
        transcripts(processor, "a", prompt="a", prompt_field="b")
