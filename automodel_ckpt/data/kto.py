"""Completions that are judged one by one, as desirable or undesirable, and their micro-batches for KTO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Unpack, cast

import torch
from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.batches.micro_batches import Collate
from automodel_ckpt.data.chat import PairEncoder
from automodel_ckpt.data.collate import (
    IGNORE_INDEX,
    Batch,
    Item,
    RowOptions,
    Sample,
    require_index,
    require_keys,
)
from automodel_ckpt.data.preference import CHOSEN, REJECTED, PreferenceDataset
from automodel_ckpt.data.preference import pairs as preference_pairs
from automodel_ckpt.data.rows.files import NO_STREAM
from automodel_ckpt.data.rows.rows import Rows
from automodel_ckpt.data.samples.labels import FLAGS
from automodel_ckpt.data.samples.samples import RowStream, TextDataset, samples_of
from automodel_ckpt.data.samples.tokenized import Samples, TokenizedDataset, Truncation
from automodel_ckpt.errors import RecipeError

DESIRABLE = "is_desirable"
"""Name of the judgment of a completion, in samples and in micro-batches."""
MISMATCHED = "mismatched_"
"""Beginning of the names of the tensors in a micro-batch that pair its prompts with other completions."""
_LIMIT = "max_tokens"
"""Name of the number of tokens in a sample up to which its prompt with another completion is truncated."""


def judged_completions(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str],
    seq_length: int | None = 2048,
    prompt_field: str = "prompt",
    completion_field: str = "completion",
    label_field: str = "label",
    system_field: str | None = None,
    as_chat: Literal["auto"] | bool = False,
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    truncation: Literal["error", "right", "skip"] = "error",
    **options: Unpack[RowOptions],
) -> TextDataset:
    """Make one sample per row: a prompt with a completion, and whether the completion is desirable.

    *label_field* contains ``true`` or 1 for desirable completions, ``false`` or 0 for others, also as text. Only the
    completion and its end token have labels. Prompt and completion are texts, which are concatenated unchanged, or
    Jinja templates of fields, such as ``"{{ question }}\\nAnswer: "``, or lists of messages, which are rendered by
    *chat_template* with *template_kwargs* (:func:`~automodel_ckpt.data.chat.messages`); a field ``tools`` is passed to
    the template. With *as_chat*, texts are rendered so too, after the text of *system_field* if it is set; with
    ``auto``, only if the tokenizer has a chat template.

    Samples of more than *seq_length* tokens are rejected with their locations. With *truncation* ``right`` they are
    truncated, or skipped if no label remains; with ``skip`` they are skipped. The numbers are logged. With *streaming*,
    rows are read and tokenized during training, shuffled within blocks of *shuffle_block* rows.
    """
    pairs = PairEncoder(
        tokenizer,
        prompt_field,
        completion_field,
        system_field,
        as_chat,
        chat_template,
        dict(template_kwargs or {}),
        "completion",
    )

    def encode(rows: Rows) -> Samples:
        samples = pairs.encode(rows)
        [labels] = rows.columns([label_field])
        names = rows.class_names(label_field) or ()
        for number, label in enumerate(labels):
            label = names[label] if label in range(len(names)) else label
            judgment = FLAGS.get(str(label).strip().casefold())
            if judgment is None:
                what = "a completion is neither desirable (true) nor undesirable (false)"
                raise rows.unusable(number, what, f"{label!r} in dataset.label_field {label_field}")
            samples[number] = samples[number]._replace(number=judgment)
        return samples

    return samples_of(
        path,
        tokenizer,
        encode,
        Truncation.of(truncation, seq_length),
        fields=[*pairs.names, label_field],
        key=("judged_completions", label_field, *pairs.key),
        **options,
        kind=JudgedDataset,
    )


def split_pairs(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str],
    seq_length: int | None = 2048,
    prompt_field: str = "prompt",
    chosen_field: str = "chosen",
    rejected_field: str = "rejected",
    system_field: str | None = None,
    as_chat: Literal["auto"] | bool = False,
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    truncation: Literal["error", "right", "skip"] = "error",
    **options: Unpack[RowOptions],
) -> SplitPairs:
    """Make two samples per pair of answers: the preferred one is desirable, the rejected one is not.

    The data are pairs as for :func:`~automodel_ckpt.data.preference.pairs`, with the same arguments;
    ``max_samples`` counts pairs. All preferred answers come first, in the order of the data, and then all rejected
    ones, so that without shuffling no answer follows another one to the same prompt.
    """
    pairs = preference_pairs(
        tokenizer,
        path,
        seq_length,
        prompt_field,
        chosen_field,
        rejected_field,
        system_field=system_field,
        as_chat=as_chat,
        chat_template=chat_template,
        template_kwargs=template_kwargs,
        truncation=truncation,
        **options,
    )
    if isinstance(pairs, RowStream):
        raise RecipeError(
            "the two answers of a pair in a stream cannot be separated",
            where="dataset.streaming",
            value=True,
            hint=NO_STREAM,
        )
    return SplitPairs(cast("PreferenceDataset", pairs), seq_length)


class JudgedDataset(TokenizedDataset):
    """A map-style data set of ``{"input_ids", "labels", "is_desirable"}``, and ``"max_tokens"`` if it is limited."""

    # A promise is not inherited: a subclass could draw random numbers.
    draws_nothing = True

    @staticmethod
    def item(samples: Sequence[Sample], number: float, limit: int | None) -> Any:
        return _judged(samples[0], number == 1, limit)


class SplitPairs:
    """A map-style data set of the answers of *pairs*: all preferred ones, then all rejected ones.

    Its samples have the form of :class:`JudgedDataset`.
    """

    draws_nothing = True

    def __init__(self, pairs: PreferenceDataset, max_tokens: int | None) -> None:
        self.dataset = pairs
        self.identity = pairs.identity
        self.max_tokens = max_tokens

    def __len__(self) -> int:
        return 2 * len(self.dataset)

    def __getitem__(self, index: int) -> Item:
        require_index(index, len(self))
        is_rejected, number = divmod(index, len(self.dataset))
        sample = self.dataset[number][REJECTED if is_rejected else CHOSEN]
        return _judged(sample, not is_rejected, self.max_tokens)


def _judged(sample: Item, is_desirable: bool, max_tokens: int | None) -> Item:
    judged = {**sample, DESIRABLE: bool(is_desirable)}
    if max_tokens is not None:
        judged[_LIMIT] = max_tokens
    return judged


@dataclass(frozen=True)
class KTOCollator:
    """Makes a micro-batch of judged completions, and pairs each of its prompts with the completion of another sample.

    The first of the samples that it gets is not part of the micro-batch: it is the one before the micro-batch in the
    global batch. The completion of each sample follows the prompt of the next one. *collate_fn* makes the tensors of
    rows. The tensors of the mismatched rows have names that begin with ``mismatched_``. ``is_desirable`` is a bool
    tensor [rows]. Raises :class:`RecipeError` for samples without a judgment.
    """

    # A promise about this class. The promise of collate_fn is examined as well.
    draws_nothing = True

    collate_fn: Collate

    def __call__(self, samples: Sequence[Item]) -> Batch:
        for sample in samples:
            require_keys(sample, "input_ids", "labels", DESIRABLE)
        rows = list(samples[1:])
        mismatched = [_mismatched(row, other) for other, row in pairwise(samples)]
        batch = dict(self.collate_fn(rows))
        for name, tensor in self.collate_fn(mismatched).items():
            batch[f"{MISMATCHED}{name}"] = tensor
        batch[DESIRABLE] = torch.tensor([row[DESIRABLE] for row in rows], dtype=torch.bool)
        return batch


def _mismatched(sample: Item, other: Item) -> Sample:
    """Join the prompt of *sample* with the completion of *other*, which begins with its first label."""
    num_prompt, other_num_prompt = (
        next((n for n, label in enumerate(labels) if label != IGNORE_INDEX), len(labels))
        for labels in (sample["labels"], other["labels"])
    )
    tokens = [*sample["input_ids"][:num_prompt], *other["input_ids"][other_num_prompt:]]
    labels = [*[IGNORE_INDEX] * num_prompt, *other["labels"][other_num_prompt:]]
    limit = sample.get(_LIMIT)
    return {"input_ids": tokens[:limit], "labels": labels[:limit]}
