"""Preference data: pairs of a preferred and a rejected answer to the same prompt, and their micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Unpack

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.batches.micro_batches import Collate
from automodel_ckpt.data.collate import (
    Batch,
    Item,
    Sample,
    has_keys,
    require_sample,
)
from automodel_ckpt.data.pairs.pair_encoder import PairEncoder
from automodel_ckpt.data.pairs.preference_rows import (
    CHOSEN,
    PROMPT,
    REJECTED,
    SYSTEM,
    PreferenceFields,
    in_one_form,
    margins_of,
)
from automodel_ckpt.data.rows.arguments import RowOptions
from automodel_ckpt.data.rows.rows import Rows
from automodel_ckpt.data.samples.samples import TextDataset, samples_of
from automodel_ckpt.data.samples.tokenized import Samples, TokenizedDataset, TokenizedSample
from automodel_ckpt.data.samples.truncation import Truncation
from automodel_ckpt.errors import AutomodelError, RecipeError

MARGIN = "margin"
REFERENCE_CHOSEN, REFERENCE_REJECTED = "reference_chosen", "reference_rejected"
NUMBERS = (MARGIN, REFERENCE_CHOSEN, REFERENCE_REJECTED)
"""Numbers of pairs, in samples and in micro-batches: their margins, and log-probabilities under a reference."""


def pairs(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str],
    seq_length: int | None = 2048,
    prompt_field: str = "prompt",
    chosen_field: str = "chosen",
    rejected_field: str = "rejected",
    margin_field: str = "margin",
    system_field: str | None = None,
    as_chat: Literal["auto"] | bool = False,
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    truncation: Literal["error", "right", "skip"] = "error",
    **options: Unpack[RowOptions],
) -> TextDataset:
    """Make one pair per row: the prompt with its preferred answer, and the prompt with its rejected answer.

    Only the answers and their end tokens have labels. Prompt and answers are texts, which are concatenated unchanged,
    or Jinja templates of fields, such as ``"{{ question }}\\nAnswer: "``. They may also be lists of messages, or single
    messages, of ``{"role", "content", ...}`` or ShareGPT's ``{"from", "value"}``; if one of them is, a text is a
    message of the user (the prompt) or of the assistant (an answer). Messages are rendered by *chat_template* with
    *template_kwargs* (:func:`~automodel_ckpt.data.chat.messages`); a field ``tools`` is passed to the template. With
    *as_chat*, texts are rendered so too, after the text of *system_field* if it is set; with ``auto``, only if the
    tokenizer has a chat template.

    Data without the field ``prompt`` has whole conversations in both fields: the messages that both begin with, or the
    words of a text, are the prompt. Rows with two equal answers are skipped.

    Raises :class:`RecipeError` with the location of a row whose fields are neither text nor messages, that the template
    cannot render, or whose margin is not a number.
    """
    fields = PreferenceFields(
        prompt_field, chosen_field, rejected_field, system_field, margin_field
    )

    def encoder_of(answer: str) -> PairEncoder:
        return PairEncoder(
            tokenizer,
            PROMPT,
            answer,
            SYSTEM if system_field is not None else None,
            as_chat,
            chat_template,
            dict(template_kwargs or {}),
            "completion",
        )

    chosen_encoder, rejected_encoder = encoder_of(CHOSEN), encoder_of(REJECTED)

    def encode(rows: Rows) -> Samples:
        table = in_one_form(rows, fields)
        margins = margins_of(rows, margin_field)
        answers = (each.encode(table) for each in (chosen_encoder, rejected_encoder))
        samples = []
        for chosen, rejected, margin in zip(*answers, margins, strict=True):
            if chosen.tokens == rejected.tokens:
                # The row is skipped.
                chosen = rejected = TokenizedSample([], [])
            samples += [chosen._replace(number=margin), rejected._replace(number=margin)]
        return samples

    return samples_of(
        path,
        tokenizer,
        encode,
        Truncation.of(truncation, seq_length),
        fields=fields.names,
        key=("preference-pairs", repr(fields), *chosen_encoder.key),
        **options,
        kind=PreferenceDataset,
    )


class PreferenceDataset(TokenizedDataset):
    """A map-style data set of pairs, ``{"chosen": sample, "rejected": sample}``, with ``"margin"`` if the data has it.

    Tokenized sample 2 i is the preferred one of pair i, and 2 i + 1 the rejected one.
    """

    # A promise is not inherited: a subclass could draw random numbers.
    draws_nothing = True
    group_size: ClassVar[int] = 2
    noun: ClassVar[str] = "pair"

    @staticmethod
    def item(samples: Sequence[Sample], number: float, limit: int | None) -> Any:
        pair: dict[str, Any] = dict(zip((CHOSEN, REJECTED), samples, strict=True))
        if not math.isnan(number):
            pair[MARGIN] = float(number)
        return pair


class PreferenceCollator:
    """Makes a micro-batch of pairs: row 2 i of its tensors is the preferred answer of pair i, 2 i + 1 the rejected one.

    *collate_fn* makes the tensors of the rows. A pair is ``{"chosen": sample, "rejected": sample}``; numbers beside
    them, such as ``margin``, become float32 tensors [pairs] under the same names, with NaN for pairs that lack them.
    Raises :class:`RecipeError` for samples that are not pairs.
    """

    # A promise about this class. The promise of collate_fn is examined as well.
    draws_nothing = True

    def __init__(self, collate_fn: Collate) -> None:
        self.collate_fn = collate_fn

    def __call__(self, pairs: Sequence[Item]) -> Batch:
        for pair in pairs:
            _require_pair(pair)
        rows = [pair[name] for pair in pairs for name in (CHOSEN, REJECTED)]
        batch = dict(self.collate_fn(rows))
        for name in dict.fromkeys(name for pair in pairs for name in pair):
            if name not in (CHOSEN, REJECTED):
                numbers = [pair.get(name, math.nan) for pair in pairs]
                batch[name] = torch.tensor(numbers, dtype=torch.float32)
        return batch


def require_pairs(dataset: Any) -> None:
    """Raise :class:`RecipeError` if the first sample of a map-style data set is not a pair; streams are not read."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset):
        _require_pair(dataset[0])


def _require_pair(pair: object) -> None:
    require_sample(
        has_keys(pair, CHOSEN, REJECTED),
        pair,
        "a sample is not a pair of a preferred and a rejected answer",
        "use a builder of pairs, such as automodel_ckpt.data.preference.pairs, or return "
        '{"chosen": {"input_ids": [...], "labels": [...]}, "rejected": {...}}',
    )


SCORES = (REFERENCE_CHOSEN, REFERENCE_REJECTED)
"""The names of both log-probabilities in samples and micro-batches."""
Scores = npt.NDArray[np.float32]


class ScoredPairs:
    """The pairs of *dataset*, a map-style data set, with the log-probabilities of both answers under a reference.

    Assign :attr:`scores` [pairs, 2] before samples are read. Raises :class:`RecipeError` for a stream.
    """

    # A promise about this class. The promise of the data set is examined as well.
    draws_nothing = True

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise RecipeError(
                "the reference's log-probabilities of a stream cannot be computed before training",
                where="dpo.precompute",
                value=True,
                hint="set dpo.precompute false, or dataset.streaming false",
            )
        self.dataset = dataset
        self.scores: Scores | None = None

    @property
    def identity(self) -> str | None:
        """A digest that changes with the pairs. None when unknown."""
        return getattr(self.dataset, "identity", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Item:
        pair = self.dataset[index]
        if self.scores is None:
            raise AutomodelError(
                "the reference's log-probabilities are not computed yet",
                where="ScoredPairs.scores",
                value=None,
                hint="assign them before samples are read",
            )
        chosen, rejected = self.scores[index].tolist()
        return {**pair, REFERENCE_CHOSEN: chosen, REFERENCE_REJECTED: rejected}
