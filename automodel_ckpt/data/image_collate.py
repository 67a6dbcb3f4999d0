"""Collate conversations with images or audio to a micro-batch, with the model's processor."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from automodel_ckpt.base.bounded_templates import bound_chat_templates
from automodel_ckpt.data.batches.packing import IS_TOKEN
from automodel_ckpt.data.collate import IGNORE_INDEX, Batch, Ids, unusable_sample
from automodel_ckpt.data.media.image_conversations import ImageText
from automodel_ckpt.data.media.media_files import (
    AUDIO,
    IMAGE,
    Media,
    pillow,
    placeholders_of,
    sampling_rate_of,
    usual_media,
)
from automodel_ckpt.data.samples.tokenized import too_long
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)

_END_SECONDS = 0.05
"""Length of the end of an audio that a probe changes. The last frame of a spectrogram may be unused in any audio."""


_BLANK_PIXELS = 64
_OF_AUDIO = re.compile("feature|audio")
"""The names of tensors of audio. They may have the shape of the tokens by chance."""
_REJECTIONS = (ValueError, TypeError, IndexError, KeyError, StopIteration)
"""The errors that processors raise for samples that they cannot prepare."""


class ImageTextCollator:
    """Converts :class:`~automodel_ckpt.data.media.image_conversations.ImageText` samples to tensors with a processor.

    ``input_ids``, ``attention_mask`` and ``labels`` have the shape [samples, length] and are padded on the right. The
    shapes of other tensors depend on the model. Labels are on the assistant's text, never on *image_token_ids*, the
    tokens of images and audio. A micro-batch without images, or without audio, gets an additional row with a blank one
    and no label, because every rank has to run the same towers: the towers of *media*, the kinds that the data may have
    (None: images, or audio if the processor takes no images). The mask IS_TOKEN then leaves out its tokens. Raises
    :class:`RecipeError` for samples that are too long, that the processor rejects, or that have audio of which it would
    use only a part.
    """

    def __init__(
        self,
        processor: Any,
        image_token_ids: frozenset[int] = frozenset(),
        pad_to_multiple_of: int | None = None,
        media: Media | None = None,
    ) -> None:
        self.processor = processor
        self.media = usual_media(processor) if media is None else media
        self.image_token_ids = image_token_ids
        self.multiple = pad_to_multiple_of or 1
        self.num_left_out = 0
        self._longest_audio = 0
        """Samples of the longest audio that the processor uses to its end, as far as is known."""

    def num_tokens(self, sample: ImageText) -> int:
        """Return the number of tokens of a sample, truncated to its seq_length; 0 if it is skipped.

        Raises :class:`RecipeError` for a sample that is too long and must not be truncated, or of another class.
        """
        check_conversation(sample)
        if not self._uses_whole_audio(sample):
            return 0
        batch = self._process([sample])
        length = int(batch["attention_mask"].sum())
        tokens: Ids = batch["input_ids"][0, :length].tolist()
        if not self._is_used(sample, tokens, self._labeled(sample, tokens)):
            return 0
        return min(length, sample.seq_length or length)

    def __call__(self, samples: Sequence[ImageText]) -> Batch:
        for sample in samples:
            check_conversation(sample)
        samples = [sample if self._uses_whole_audio(sample) else self.blank for sample in samples]
        present = {IMAGE for sample in samples if sample.images}
        present |= {AUDIO for sample in samples if sample.audios}
        if not present <= self.media:
            # Other micro-batches get no blank one of these.
            raise RecipeError(
                f"samples have {', '.join(sorted(present - self.media))}, which the data set does not announce",
                where=", ".join(sample.where for sample in samples),
                value=f"media: {', '.join(sorted(self.media))}",
                hint=f"set dataset.media: [{', '.join(sorted(present | self.media))}], or only the kinds that samples "
                "have; a data set of another class has an attribute media, a frozenset of image and audio",
            )
        if present < self.media:
            samples = [*samples, self.blank]
        batch = self._process(samples)
        lengths: Ids = batch["attention_mask"].sum(1).tolist()
        rows: list[Ids] = batch["input_ids"].tolist()
        # _call pads on the right, whatever the processor's own setting is.
        tokens = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        is_labeled = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        used = []
        for number, (sample, row) in enumerate(zip(samples, tokens, strict=True)):
            flags = self._labeled(sample, row)
            used.append(sample if self._is_used(sample, row, flags) else self.blank)
            is_labeled[number, : len(flags)] = torch.tensor(flags)
        if any(sample is not given for sample, given in zip(used, samples, strict=True)):
            # Processed again, because the tensors of the pixels do not show to which sample they belong.
            # The blank sample has no seq_length and is always used, so this happens at most once.
            return self(used)
        batch["labels"] = batch["input_ids"].where(is_labeled, IGNORE_INDEX)
        is_blank = torch.tensor([sample is self.blank for sample in samples])
        if is_blank.any():
            batch[IS_TOKEN] = (batch["attention_mask"] != 0) & ~is_blank[:, None]
        return self._truncated(batch, samples, lengths)

    @cached_property
    def blank(self) -> ImageText:
        """A sample with a blank image or audio, or both, and no labels."""
        image = audio = None
        if IMAGE in self.media:
            image = pillow().new("RGB", (_BLANK_PIXELS, _BLANK_PIXELS))
        if AUDIO in self.media:
            audio = np.zeros(sampling_rate_of(self.processor), np.float32)
        return self.unlabeled(image, ".", audio=audio)

    def unlabeled(
        self, image: Any | None, text: str, *, image_is_first: bool = True, audio: Any | None = None
    ) -> ImageText:
        """Make a sample of a *text* of the user, an *audio*, and an image before or after them, without labels."""
        parts = [{"type": "text", "text": text}]
        if audio is not None:
            parts.insert(0, {"type": AUDIO})
        if image is not None:
            parts.insert(0 if image_is_first else len(parts), {"type": IMAGE})
        rendered = "".join(
            part.get("text") or self._placeholders.get(part["type"], "") for part in parts
        )
        bound_chat_templates()
        try:
            rendered = self.processor.apply_chat_template(
                [{"role": "user", "content": parts}], tokenize=False
            )
        except Exception:  # a template can raise anything, for example divide by zero
            # The processor has no template, or one that fails: the recipe set another one for the data set.
            log.debug("the processor's template cannot render a question", exc_info=True)
        images, audios = ([] if each is None else [each] for each in (image, audio))
        return ImageText(rendered, images, [], audios=audios)

    def _process(self, samples: Sequence[ImageText]) -> Batch:
        try:
            batch = self._call_together(samples)
        except _REJECTIONS as error:
            reason, where = error, ", ".join(sample.where for sample in samples)
            for sample in samples if len(samples) > 1 else ():
                try:
                    self._call_together([sample])
                except _REJECTIONS as own:
                    reason, where = own, sample.where
                    break
            raise RecipeError(
                "the processor rejects a sample",
                where=where,
                value=f"{type(reason).__name__}: {reason}",
                hint="correct the conversation, its images or audio, or the chat template; some processors take no "
                "samples without audio beside others",
            ) from error
        return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}

    def _call_together(self, samples: Sequence[ImageText]) -> Any:
        images = [sample.images for sample in samples]
        audios = [audio for sample in samples for audio in sample.audios]
        texts = [sample.text for sample in samples]
        return self._call(texts, images, audios, self._adds_special_tokens(texts[0]))

    def _call(
        self, texts: list[str], images: list[Any] | None, audios: Sequence[Any], special: bool
    ) -> Any:
        inputs: dict[str, Any] = {"text": texts, "return_tensors": "pt"}
        of_text = {
            "padding": True,
            "padding_side": "right",
            "pad_to_multiple_of": self.multiple,
            "add_special_tokens": special,
        }
        if any(images or ()):
            inputs["images"] = images
        if not audios:
            return self.processor(**inputs, **of_text)
        # Settings of the text must not pad the audio: processors choose how to pad it.
        return self.processor(
            **inputs,
            audio=list(audios),
            text_kwargs=of_text,
            audio_kwargs={"sampling_rate": sampling_rate_of(self.processor)},
        )

    def _adds_special_tokens(self, text: str) -> bool:
        """Whether the processor has to add special tokens, which is not the case if the template wrote them.

        transformers' ``apply_chat_template`` follows the same rule.
        """
        start = self.processor.tokenizer.bos_token
        return start is None or not text.startswith(start)

    def _labeled(self, sample: ImageText, tokens: Ids) -> list[bool]:
        """Return for each token whether it is the assistant's.

        Positions are counted from the end: the placeholder of an earlier image may expand to any number of tokens.
        """
        flags = [False] * len(tokens)
        for start, end in sample.labeled_spans:
            first = len(tokens) - self._num_from(sample, start, tokens)
            last = len(tokens) - self._num_from(sample, end, tokens)
            flags[first:last] = [token not in self.image_token_ids for token in tokens[first:last]]
        if sample.labeled_spans and not any(flags[1:]):
            raise RecipeError(
                "this conversation has no assistant token to train on",
                where=sample.where,
                value=sample.text[:200],
                hint="correct the chat template, or its generation markers; a processor that adds text after the "
                "conversation, as PaliGemma's, is not supported",
            )
        return flags

    def _num_from(self, sample: ImageText, start: int, tokens: Ids) -> int:
        """Count the last *tokens* that belong to the sample's text from character *start* on."""
        rest = sample.text[start:]
        counts = {kind: rest.count(text) for kind, text in self._placeholders.items()}
        num_images, num_audios = counts.get(IMAGE, 0), counts.get(AUDIO, 0)
        special = self._adds_special_tokens(sample.text)
        encode = partial(self.processor.tokenizer, add_special_tokens=special, verbose=False)
        if num_images or num_audios:
            images = [sample.images[len(sample.images) - num_images :]] if num_images else None
            audios = sample.audios[len(sample.audios) - num_audios :]
            processed = self._call([rest], images, audios, special)
            rest_tokens: Ids = processed["input_ids"][0].tolist()
        else:
            rest_tokens = encode(rest)["input_ids"]
        pairs = zip(reversed(rest_tokens), reversed(tokens), strict=False)
        num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if num_equal == len(rest_tokens) or not self.processor.tokenizer.is_fast:
            return num_equal
        # The rest begins with other tokens than it does behind the text before it: a token contains a space before the
        # rest, or SentencePiece's tokenizers put one before the first word of a text.
        firsts = [rest.index(text) for kind, text in self._placeholders.items() if counts[kind]]
        end = start + min(firsts, default=len(rest))
        encoded = encode(sample.text, return_offsets_mapping=True)
        stops = [stop for _, stop in encoded["offset_mapping"]]
        first, last = (sum(stop <= position for stop in stops) for position in (start, end))
        in_context = encoded["input_ids"][first:last]
        num_alone = len(encode(sample.text[start:end])["input_ids"])
        num_found = len(rest_tokens) - num_alone + len(in_context)
        first = len(tokens) - num_found
        is_found = tokens[first : first + len(in_context)] == in_context
        return num_found if is_found else num_equal

    @cached_property
    def _placeholders(self) -> dict[str, str]:
        return placeholders_of(self.processor)

    def _is_end_used(self, num_samples: int) -> bool:
        """Whether another end of an audio of *num_samples* changes what the processor makes of it."""
        num_changed = min(num_samples, int(_END_SECONDS * sampling_rate_of(self.processor)))
        silence = np.zeros(num_samples, np.float32)
        noise = silence.copy()
        noise[-num_changed:] = np.random.default_rng(0).uniform(-0.5, 0.5, num_changed)
        try:
            quiet, loud = (
                self._call_together([self.unlabeled(None, ".", audio=samples)])
                for samples in (silence, noise)
            )
        except Exception as error:  # feature extractors raise many types for what they reject
            # Not cut: the samples show the error.
            log.debug("the processor rejects %d samples of audio: %r", num_samples, error)
            return True
        return not all(
            torch.equal(quiet[name], loud[name])
            for name in quiet
            if isinstance(quiet[name], torch.Tensor)
        )

    def _uses_whole_audio(self, sample: ImageText) -> bool:
        """Whether the processor uses all of a sample's audio; if not, the sample is skipped with a warning.

        With *truncation* ``error``, raises :class:`RecipeError`.
        """
        longest = max(map(len, sample.audios), default=0)
        if longest <= self._longest_audio or self._is_end_used(longest):
            self._longest_audio = max(self._longest_audio, longest)
            return True
        seconds = longest / sampling_rate_of(self.processor)
        if sample.truncation == "error":
            raise RecipeError(
                "an audio is longer than what the processor uses of it",
                where=sample.where,
                value=f"{seconds:.1f} s; {type(self.processor).__name__} cuts its end",
                hint="divide it into shorter ones with their texts, or leave such samples out: dataset.truncation skip",
            )
        self._report_skipped(
            sample, f"its audio has {seconds:.1f} s, of which the processor cuts the end"
        )
        return False

    def _is_used(self, sample: ImageText, tokens: Ids, labeled: list[bool]) -> bool:
        """Whether a sample is used, whole or truncated; logs a warning if it is skipped.

        With *truncation* ``error``, raises :class:`RecipeError` for a sample that is too long.
        """
        limit = sample.seq_length
        if limit is None or len(tokens) <= limit:
            return True
        if sample.truncation == "error":
            raise too_long({0: len(tokens)}, limit, 1, lambda _: sample.where)
        cuts_media = any(token in self.image_token_ids for token in tokens[limit:])
        if sample.truncation == "right" and not cuts_media and any(labeled[1:limit]):
            return True
        why = f"it has {len(tokens)} tokens, seq_length is {limit}"
        if sample.truncation == "right":
            why += ", and truncation would cut media or all labels"
        self._report_skipped(sample, why)
        return False

    def _report_skipped(self, sample: ImageText, why: str) -> None:
        # In a worker process, this counts the samples of that worker.
        self.num_left_out += 1
        log.warning("%s is skipped (%d so far): %s", sample.where, self.num_left_out, why)

    def _truncated(self, batch: Batch, samples: Sequence[ImageText], lengths: Ids) -> Batch:
        """Truncate every sample of a batch to its seq_length, and remove the padding that is not needed any more."""
        limits = [sample.seq_length for sample in samples]
        ends = [min(length, limit or length) for length, limit in zip(lengths, limits, strict=True)]
        if ends == lengths:
            return batch
        positions = torch.arange(batch["labels"].shape[1])
        beyond = positions[None] >= torch.tensor(ends)[:, None]
        padding = {"input_ids": self.processor.tokenizer.pad_token_id or 0, "labels": IGNORE_INDEX}
        width = -(-max(ends) // self.multiple) * self.multiple
        truncated = {}
        for name, value in batch.items():
            # Integer tensors [batch, length] have a value per token; others, such as pixels, stay unchanged.
            is_of_text = value.shape == beyond.shape and not _OF_AUDIO.search(name)
            if is_of_text and not value.is_floating_point():
                value = value.masked_fill(beyond, padding.get(name, 0))[:, :width]
            truncated[name] = value
        return truncated


def check_conversation(sample: object) -> None:
    """Raise :class:`RecipeError` for a sample that is not an :class:`ImageText`."""
    if not isinstance(sample, ImageText):
        found = ", ".join(sample) if isinstance(sample, dict) else type(sample).__name__
        raise unusable_sample("a sample is not a conversation with images or audio", found)
