"""Rows for the data sets of NeMo AutoModel's recipes with audio and its transcripts.

AutoModel writes the question before the audio, averages channels, and changes the sampling rate to 16 kHz. Ours follows
the processor. An audio that cannot be read is left out there, and an error here.
"""

from __future__ import annotations

from automodel_ckpt.config.automodel.dataset_rows import (
    IMAGE_LENGTH,
    LIMIT,
    SPLIT,
    TOKENIZER,
)
from automodel_ckpt.config.automodel.rows import (
    AUTOMODEL_DEFAULT,
    Key,
    Needs,
    NoEffect,
    Row,
    Section,
    Steps,
)
from automodel_ckpt.config.tree.yaml_tree import Node

_OURS = "automodel_ckpt.data.vlm.transcripts"
_ENGLISH_PROMPT = (
    "Transcribe the following English audio verbatim. Output only the raw transcript text with no "
    "leading or trailing commentary."
)
"""AutoModel's default question of its English mixture."""

TRANSCRIPTS: tuple[Row, ...] = (
    Key("path_or_dataset", "path"),
    SPLIT,
    Key("name"),
    Key("audio_column", "audio_field"),
    Key("text_column", "text_field"),
    Key("system_prompt"),
    Key("user_prompt", "prompt"),
    Key("drop_empty_text", "skip_empty"),
    Key("min_audio_duration_seconds", "min_seconds"),
    Key("max_audio_duration_seconds", "max_seconds"),
    NoEffect("sampling_rate", "trust_remote_code"),
    LIMIT,
    IMAGE_LENGTH,
    TOKENIZER,
)
COMMON_VOICE: tuple[Row, ...] = (
    Key("path_or_dataset", "path", default="ysdede/commonvoice_17_tr_fixed"),
    SPLIT,
    Key("audio_column", "audio_field"),
    Key("text_column", "text_field", default="transcription"),
    NoEffect("sampling_rate", "trust_remote_code"),
    LIMIT,
    IMAGE_LENGTH,
    TOKENIZER,
)
"""Rows for the Turkish part of Common Voice 17."""

_ENGLISH = (
    ("ami_ihm", "edinburghcstr/ami", "ihm", "train", "text"),
    ("earnings22", "sanchit-gandhi/earnings22_split", None, "train", "sentence"),
    ("voxpopuli_en", "facebook/voxpopuli", "en", "train[:4000]", "normalized_text"),
    ("gigaspeech_s", "speechcolab/gigaspeech", "s", "train", "text"),
    ("spgispeech_s", "kensho/spgispeech", "S", "train", "transcript"),
    ("librispeech", "openslr/librispeech_asr", "clean", "train.100", "text"),
)
"""The data sets of AutoModel's English mixture: name, path, subset, split, column of the transcripts."""


def english_mixture(section: Section) -> None:
    """Translate the mixture of English data sets: a mixture of transcripts, each used once per epoch."""
    values = [
        ("system_prompt", section.take("system_prompt")),
        ("audio_field", section.take("audio_column")),
        ("min_seconds", _given(section, "min_audio_duration_seconds", "1.0")),
        ("max_seconds", _given(section, "max_audio_duration_seconds", "30.0")),
        ("prompt", _given(section, "user_prompt", _ENGLISH_PROMPT)),
    ]
    for name, path, subset, split, column in _ENGLISH:
        own = f"sources.{name}"
        of_source = [
            ("_target_", _OURS),
            ("path", path),
            ("name", subset),
            ("split", split),
            ("text_field", column),
            ("normalize", "upper_words"),
            ("truncation", "right"),
        ]
        for key, text in of_source:
            if text is not None:
                section.put(f"{own}.{key}", Node(text, AUTOMODEL_DEFAULT, quoted=True))
        section.put(f"{own}.seq_length", Node("null", AUTOMODEL_DEFAULT))
        for key, node in values:
            if node is not None:
                section.put(f"{own}.{key}", node)
    shuffled = not section.has("shuffle_seed") or section.peek("shuffle_seed") is not None
    NoEffect("shuffle_seed", "text_column", "sampling_rate").apply(section)
    loader = section.work.section("dataloader")
    if shuffled and section.path == "dataset" and not loader.has("shuffle"):
        # AutoModel mixes the rows once.
        loader.put("shuffle", Node("true", AUTOMODEL_DEFAULT))


def _given(section: Section, name: str, default: str) -> Node | None:
    """Remove and return the value of a key, AutoModel's default if it is missing, and None if it is null."""
    if not section.has(name):
        return Node(default, AUTOMODEL_DEFAULT, quoted=not default[0].isdecimal())
    return section.take(name)


ENGLISH_MIXTURE: tuple[Row, ...] = (
    Needs(
        "sources",
        "a list of data sets in AutoModel's form",
        "write a mixture: dataset._target_ automodel_ckpt.data.mixture.mixture with sources of "
        "automodel_ckpt.data.vlm.transcripts",
    ),
    Steps(
        english_mixture,
        (
            "system_prompt",
            "user_prompt",
            "audio_column",
            "min_audio_duration_seconds",
            "max_audio_duration_seconds",
        ),
    ),
)
