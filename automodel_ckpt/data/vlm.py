"""Builders of data sets with images or audio: conversations, questions about images in columns, and transcripts.

All of them read local files, directories, or data sets of the Hub, and return
:class:`~automodel_ckpt.data.media.image_conversations.ImageConversations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from automodel_ckpt.data.collate import Item, Key
from automodel_ckpt.data.media.columns import AnswerColumns, TranscriptColumns, usable_rows
from automodel_ckpt.data.media.image_conversations import (
    ImageConversations,
    ImageOptions,
    RowContent,
)
from automodel_ckpt.data.media.media_files import AUDIO, Media, media_of, usual_media
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.errors import RecipeError


def conversations(
    processor: Any,
    path: str | list[str],
    seq_length: int | None = 2048,
    messages_field: str = "messages",
    images_field: str = "images",
    audios_field: str = "audios",
    tools_field: str = "tools",
    image_marker: str | None = None,
    audio_marker: str | None = None,
    media: list[str] | None = None,
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    learn: Literal["all", "last"] = "all",
    answer_prefix: str = "",
    truncation: Literal["error", "right", "skip"] = "error",
    max_samples: int | None = None,
    name: str | None = None,
    split: str = "train",
) -> ImageConversations:
    """Make one sample per conversation, with labels on the assistant's text and the end of its turns.

    The content of a message is text, or a list of ``{"type": "text", "text": ...}`` and ``{"type": "image", "image":
    ...}``. An image is a path; relative paths start at the directory of the data file. A row may also have a field
    *images_field* with one image or a list, as paths or as an image column of ``datasets``. These images fill the
    entries ``{"type": "image"}`` in order; if there are no entries, they are put before the first message of the user.
    Audio is given in the same way, with the type ``audio`` and *audios_field*. *media* are the kinds that samples may
    have, ``image`` and ``audio``; by default images, or audio if the processor takes no images. A sample with another
    kind is an error.
    The tools in *tools_field*, if the data has it, are passed to the template.
    With *image_marker* or *audio_marker*, this text in a user's message is such an entry (``<image>`` in LLaVA's data).
    With *learn* ``last``, only the assistant's last turn has labels. *answer_prefix* is inserted before each text of
    the assistant, without labels: a model that writes an empty thinking channel before each answer expects it.

    Images are opened when a sample is read. A sample of more than *seq_length* tokens (None: no limit), including those
    of its images, is then rejected with its location. With *truncation* ``right`` it is truncated, or skipped if
    truncation would cut an image or leave no label; with ``skip`` it is always skipped. Skipped samples have no loss
    and are logged.
    """
    source = Source.of(path, name, split)
    options = ImageOptions(
        seq_length,
        truncation,
        chat_template,
        template_kwargs or {},
        learn,
        answer_prefix,
        image_marker,
        audio_marker,
    )

    def content_of(row: Item) -> RowContent:
        images = _as_list(row.get(images_field))
        audios = _as_list(row.get(audios_field))
        return RowContent(row.get(messages_field), images, row.get(tools_field), audios)

    key: Key = ("conversations", messages_field, images_field)
    if audios_field in source.fields:
        key += (audios_field,)
    if tools_field in source.fields:
        # Added only then, so that the keys of data without tools stay the same.
        key += (tools_field,)

    return ImageConversations(
        processor,
        source,
        [messages_field],
        content_of,
        options,
        key=key,
        max_samples=max_samples,
        media=usual_media(processor) if media is None else _required(media, processor),
    )


def _required(media: Sequence[str], processor: Any) -> Media:
    """Check the kinds of media that the recipe names. Raises :class:`RecipeError` for one that is not supported."""
    supported = media_of(processor)
    if not supported.issuperset(media):
        raise RecipeError(
            "the model's processor does not take these kinds of media",
            where="dataset.media",
            value=f"{', '.join(media)}; {type(processor).__name__}",
            hint=f"it takes: {', '.join(sorted(supported))}",
        )
    return frozenset(media)


def image_answers(
    processor: Any,
    path: str | list[str] | None = None,
    preset: Literal["medpix", "cord_v2", "rdr", "shopify"] | None = None,
    image_field: str | None = None,
    prompt: str | None = None,
    prompt_field: str | None = None,
    answer_field: str | None = None,
    answer_format: Literal["text", "json_tokens"] | None = None,
    seq_length: int | None = 2048,
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    answer_prefix: str = "",
    truncation: Literal["error", "right", "skip"] = "error",
    max_samples: int | None = None,
    name: str | None = None,
    split: str = "train",
) -> ImageConversations:
    """Make one sample per row of a table: an image and a question, and the answer with labels.

    The image (a path, bytes, or an image column of ``datasets``; a list is several images) is in the column
    *image_field* (default: ``image``), the answer in *answer_field* (default: ``answer``). The question is the text
    *prompt* (default: ``Describe this image.``), or the text of the column *prompt_field*. With *answer_format*
    ``json_tokens``, the answer is an object, or its JSON text, which becomes the token sequence of Donut and CORD.

    A *preset* gives the path and the columns of a data set of the Hub: ``medpix`` (mmoukouba/MedPix-VQA), ``cord_v2``
    (naver-clova-ix/cord-v2), ``rdr`` (quintend/rdr-items), ``shopify`` (Shopify/product-catalogue). Other arguments
    take precedence over it. For the remaining arguments see :func:`conversations`.

    Raises :class:`RecipeError` for columns that do not exist, and with the location of a row without answer or image.
    """
    given = {
        "path": path,
        "image_field": image_field,
        "prompt": prompt,
        "prompt_field": prompt_field,
        "answer_field": answer_field,
        "answer_format": answer_format,
    }
    columns = AnswerColumns.of(preset, given)
    options = ImageOptions(
        seq_length,
        truncation,
        chat_template,
        template_kwargs or {},
        answer_prefix=answer_prefix,
    )
    return ImageConversations(
        processor,
        Source.of(columns.path or "", name, split),
        columns.fields,
        columns.content_of,
        options,
        key=("image_answers", repr(columns)),
        max_samples=max_samples,
    )


def transcripts(
    processor: Any,
    path: str | list[str],
    audio_field: str = "audio",
    text_field: str = "text",
    prompt: str | None = None,
    prompt_field: str | None = None,
    prompt_first: bool = True,
    system_prompt: str | None = None,
    normalize: Literal["none", "upper_words"] = "none",
    skip_empty: bool = True,
    min_seconds: float | None = None,
    max_seconds: float | None = None,
    seq_length: int | None = 2048,
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    answer_prefix: str = "",
    truncation: Literal["error", "right", "skip"] = "error",
    max_samples: int | None = None,
    name: str | None = None,
    split: str = "train",
) -> ImageConversations:
    """Make one sample per row of a table for speech recognition: an audio, and its transcript with labels.

    The audio (a path, bytes, or an audio column of ``datasets``) is in the column *audio_field*, the transcript in
    *text_field*. The question is *prompt*, the text of the column *prompt_field*, or only the audio. It is written
    before the audio, or after it without *prompt_first*. *system_prompt*, if there is one, is the first message.

    Before training, rows with an empty transcript are left out (with *skip_empty*), and rows with audio that is shorter
    than *min_seconds* or longer than *max_seconds*; the headers of all audio are read for this. The log has their
    number. With *normalize* ``upper_words``, transcripts are upper-case words without punctuation and without tags such
    as ``<COMMA>``. For the remaining arguments see :func:`conversations`.

    Raises :class:`RecipeError` for columns that do not exist, if no row is left, and with the location of a row without
    audio or text.
    """
    columns = TranscriptColumns(
        audio_field,
        text_field,
        prompt,
        prompt_field,
        prompt_first,
        system_prompt,
        normalize,
    )
    options = ImageOptions(
        seq_length,
        truncation,
        chat_template,
        template_kwargs or {},
        answer_prefix=answer_prefix,
    )
    source = Source.of(path, name, split)
    source.require(columns.fields)
    numbers = usable_rows(source, columns, skip_empty, min_seconds, max_seconds)
    limits = (skip_empty, min_seconds, max_seconds)
    return ImageConversations(
        processor,
        source,
        columns.fields,
        columns.content_of,
        options,
        key=("transcripts", repr(columns), limits),
        max_samples=max_samples,
        media=frozenset([AUDIO]),
        numbers=numbers,
    )


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
