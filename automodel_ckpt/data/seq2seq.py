"""Builder for pairs of a source and a target text, which encoder-decoder models train on, and their micro-batches.

Data sets and caches store a pair as one list of tokens: the source's tokens without labels, then the target's tokens
with labels. Data sets, mixtures and streams treat it like every other sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Unpack

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.collate import (
    IGNORE_INDEX,
    AnySample,
    Batch,
    Ids,
    Key,
    PadCollator,
    RowOptions,
    Sample,
    require_choice,
    require_keys,
    require_range,
    require_tokenizer,
    unusable_sample,
)
from automodel_ckpt.data.rows.rows import Rows, names_in
from automodel_ckpt.data.samples.encoder import encode_all, ends_of, tokenize, truncated
from automodel_ckpt.data.samples.samples import TextDataset, samples_of
from automodel_ckpt.data.samples.tokenized import (
    UNLIMITED,
    EarlierTruncation,
    Samples,
    TokenizedDataset,
    TokenizedSample,
    too_long,
)


def source_target(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str],
    seq_length: int | None = 512,
    target_length: int | None = None,
    source_field: str = "source",
    target_field: str = "target",
    source_prompt: str = "",
    truncation: Literal["error", "right", "skip"] = "error",
    start_token_id: int | None = None,
    **options: Unpack[RowOptions],
) -> TextDataset:
    """Make one sample per row: a source text for the encoder, and a target text for the decoder, which has labels.

    *source_field* and *target_field* are fields, or Jinja templates of fields, such as ``"{{ translation.de }}"``.
    *source_prompt* is written before each source, such as ``"translate English to German: "``. Both texts get the
    special tokens that the tokenizer adds to a source and to a target (mBART: the code of ``tgt_lang``). A target also
    gets an end token if the tokenizer adds none, and loses a first token that is *start_token_id*, with which the
    decoder starts anyway; the recipe supplies it.

    A row with a source of more than *seq_length* tokens, or a target of more than *target_length* (null:
    *seq_length*), is rejected with its location. With *truncation* ``right``, the tokenizer truncates the text, so that
    its special tokens remain, and with ``skip`` the row is skipped; the numbers are logged.
    """
    limit = seq_length if target_length is None else target_length
    if limit is not None:
        # A token and the end token.
        require_range("target_length", limit, 2)
    encoder = SourceTargetEncoder(
        require_tokenizer(tokenizer),
        (source_field, target_field),
        source_prompt,
        truncation,
        UNLIMITED if seq_length is None else seq_length,
        UNLIMITED if limit is None else limit,
        start_token_id,
    )
    return samples_of(
        path,
        tokenizer,
        encoder.encode,
        EarlierTruncation.of("right", seq_length),
        fields=[*names_in(source_field), *names_in(target_field)],
        key=("source_target", source_field, target_field, source_prompt, truncation, *encoder.key),
        **options,
        kind=SourceTargetDataset,
    )


@dataclass(frozen=True)
class SourceTargetEncoder:
    """Tokenizes the texts in two *fields*, with the limits *seq_length* of sources and *target_length* of targets."""

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    fields: tuple[str, str]
    prompt: str
    truncation: str
    seq_length: int
    target_length: int
    start_token_id: int | None

    def __post_init__(self) -> None:
        require_choice("truncation", self.truncation, ("error", "right", "skip"))

    @property
    def key(self) -> Key:
        """What the tokens depend on besides the texts and the backend of the tokenizer, for the key of a cache."""
        return (self.target_length, self.start_token_id, self._around_targets)

    @cached_property
    def _around_targets(self) -> tuple[int, ...]:
        """The tokens of a short target, which show the special tokens that the tokenizer adds."""
        return tuple(self._tokenized_targets(["a"])[0])

    @cached_property
    def _end(self) -> Ids:
        """The end token, if the tokenizer does not add it to targets."""
        known = ends_of(self.tokenizer, self.tokenizer.eos_token_id, self.tokenizer.sep_token_id)
        return [] if set(known) & set(self._around_targets) else known[:1]

    def encode(self, rows: Rows) -> Samples:
        """Make a sample of each row. Raises :class:`RecipeError` for a source without tokens, or texts too long."""
        sources, targets = rows.texts(self.fields)
        sources = [self.prompt + source for source in sources]
        source_ids = encode_all(self.tokenizer, sources, add_special_tokens=True)
        target_ids = [self._as_target(ids) for ids in self._tokenized_targets(targets)]
        for number, ids in enumerate(source_ids):
            if not ids:
                raise rows.unusable(number, "a source has no tokens", repr(sources[number]))
        for texts, limit, noun, key in (
            (source_ids, self.seq_length, "source", "seq_length"),
            (target_ids, self.target_length, "target", "target_length"),
        ):
            lengths = {row: len(ids) for row, ids in enumerate(texts) if len(ids) > limit}
            if lengths and self.truncation == "error":
                raise too_long(lengths, limit, rows.num_rows, rows.place, noun, key)
        samples = []
        for number, (source, target) in enumerate(zip(source_ids, target_ids, strict=True)):
            is_long = len(source) > self.seq_length or len(target) > self.target_length
            if is_long and self.truncation == "skip":
                target = []
            elif is_long:
                source, target = self._truncated(sources[number], targets[number])
            is_empty = not targets[number].strip()
            sample = TokenizedSample.answer(source, target, is_empty)
            samples.append(sample._replace(is_cut=is_long))
        return samples

    def _tokenized_targets(self, texts: Sequence[str]) -> list[Ids]:
        """The tokens of targets, with what the tokenizer adds to them: tokenizers of translation have two modes."""
        return [ids for ids, _ in tokenize(self.tokenizer, (), text_target=list(texts))]

    def _as_target(self, ids: Ids) -> Ids:
        if self.start_token_id is not None and self._around_targets[:1] == (self.start_token_id,):
            ids = ids[1:]
        return ids + self._end

    def _truncated(self, source: str, target: str) -> tuple[Ids, Ids]:
        """The tokens of both texts within their limits; the tokenizer's special tokens remain."""
        source_ids, _ = truncated(self.tokenizer, [source], self.seq_length)
        [whole] = self._tokenized_targets([target])
        # The tokens that _as_target adds or removes count, too.
        num_more = len(self._as_target(whole)) - len(whole)
        limit = min(self.target_length, UNLIMITED - 1) - num_more
        target_ids, _ = truncated(self.tokenizer, [], limit, text_target=[target])
        return source_ids, self._as_target(target_ids)


class SourceTargetDataset(TokenizedDataset):
    """A map-style data set of pairs, ``{"input_ids": list[int], "labels": list[int]}``: the source and the target."""

    # A promise is not inherited: a subclass could draw random numbers.
    draws_nothing = True

    @staticmethod
    def item(samples: Sequence[Sample], number: float, limit: int | None) -> Any:
        # Divided where the labels begin.
        [sample] = samples
        tokens = sample["input_ids"]
        start = sum(label == IGNORE_INDEX for label in sample["labels"])
        return {"input_ids": tokens[:start], "labels": tokens[start:]}

    def limit_text(self, seq_length: int) -> str:
        return "dataset.seq_length or dataset.target_length"


class SourceTargetCollator:
    """Pads the sources and the targets of pairs on the right, each to the length of the longest.

    The argument is a non-empty list of ``{"input_ids": list[int], "labels": list[int]}``, the tokens of the source and
    the tokens of the target, as for transformers' ``DataCollatorForSeq2Seq``. Returns int64 tensors ``input_ids`` and
    ``attention_mask`` [pairs, S] and ``labels`` [pairs, T], with -100 for padding; S and T are rounded up to a multiple
    of *pad_to_multiple_of*. Raises :class:`RecipeError` for other samples.
    """

    draws_nothing = True

    def __init__(self, pad_token_id: int, pad_to_multiple_of: int | None = None) -> None:
        self._pad = PadCollator(pad_token_id, pad_to_multiple_of)

    def __call__(self, samples: Sequence[AnySample]) -> Batch:
        sources, targets = [], []
        for sample in samples:
            require_keys(sample, "input_ids", "labels")
            source = sample["input_ids"]
            if not len(source):
                raise unusable_sample("a sample has a source without tokens", source)
            # A target without tokens has one position without a label.
            target = list(sample["labels"]) or [IGNORE_INDEX]
            sources.append({"input_ids": source, "labels": source})
            targets.append({"input_ids": target, "labels": target})
        padded = self._pad(sources)
        labels = self._pad(targets)["labels"]
        return {
            "input_ids": padded["input_ids"],
            "attention_mask": padded["attention_mask"],
            "labels": labels,
        }
