"""Tokenizes text to samples, once: samples that were prepared before are read from the cache."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.cache import cached
from automodel_ckpt.data.tokenized import TokenizedDataset, TokenizedSample
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)

_FORMAT = 6
_NUM_SHOWN = 3


@dataclass
class Truncation:
    """The policy for samples of more than *seq_length* tokens: ``error`` rejects them, ``right`` truncates them.

    Counts the truncated samples, the samples that were skipped because no label remained, and the samples with an empty
    completion.
    """

    policy: str
    seq_length: int
    num_cut: int = field(default=0, init=False)
    num_left_out: int = field(default=0, init=False)
    num_empty: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        require_choice("truncation", self.policy, ("error", "right"))
        if self.seq_length < 2:
            hint = "give at least 2 (a token and the one it predicts)"
            raise RecipeError(
                "seq_length is too small",
                where="dataset.seq_length",
                value=self.seq_length,
                hint=hint,
            )

    def apply(self, sample: TokenizedSample, where: Callable[[], str]) -> TokenizedSample | None:
        """The sample, truncated if needed; None if no label remains.

        With the policy ``error``, raises :class:`RecipeError` with the location ``where()`` for a long sample.
        """
        if not any(sample.labelled[1:]):
            self.num_left_out += 1
            return None
        if len(sample.tokens) > self.seq_length and self.policy == "error":
            raise RecipeError(
                "a sample is longer than seq_length",
                where=where(),
                value=f"{len(sample.tokens)} tokens, seq_length {self.seq_length}",
                hint="increase dataset.seq_length, set dataset.truncation right to truncate such samples, or "
                "remove them; without dataset.streaming all of them are counted before training",
            )
        if not any(sample.labelled[1 : self.seq_length]):
            self.num_left_out += 1
            return None
        self.num_empty += sample.is_empty
        if len(sample.tokens) <= self.seq_length:
            return sample
        self.num_cut += 1
        return TokenizedSample(sample.tokens[: self.seq_length], sample.labelled[: self.seq_length])

    def apply_to_all(
        self, samples: Sequence[TokenizedSample], where: Callable[[int], str]
    ) -> TokenizedDataset:
        """The data set of the truncated *samples*, without those that have no label left.

        ``where(n)`` is the location of sample n in the data. With the policy ``error``, one :class:`RecipeError`
        reports all samples that are too long.
        """
        if self.policy == "error":
            self._require_short(samples, where)
        remaining = []
        for number, sample in enumerate(samples):
            truncated = self.apply(sample, partial(where, number))
            if truncated is not None:
                remaining.append(truncated)
        return TokenizedDataset.of(remaining, self.num_cut, self.num_left_out, self.num_empty)

    def _require_short(
        self, samples: Sequence[TokenizedSample], where: Callable[[int], str]
    ) -> None:
        used = [number for number, sample in enumerate(samples) if any(sample.labelled[1:])]
        lengths = np.array([len(samples[number].tokens) for number in used], dtype=np.int64)
        too_long = np.flatnonzero(lengths > self.seq_length)
        if not len(too_long):
            return
        first = [f"{where(used[each])} ({lengths[each]} tokens)" for each in too_long[:_NUM_SHOWN]]
        if len(too_long) > len(first):
            first.append(f"and {len(too_long) - len(first)} more")
        longest, percentile = int(lengths.max()), int(np.percentile(lengths, 99, method="higher"))
        is_one = len(too_long) == 1
        raise RecipeError(
            "a sample is longer than seq_length"
            if is_one
            else "samples are longer than seq_length",
            where=", ".join(first),
            value=f"{len(too_long)} of {len(used)} samples; seq_length {self.seq_length}, "
            f"the longest sample {longest} tokens, the 99th percentile {percentile}",
            hint=f"increase dataset.seq_length to {longest}, set dataset.truncation right to truncate such samples, "
            "or remove them",
        )


def needed(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """Return *tokenizer*; raise :class:`RecipeError` if it is None."""
    if tokenizer is None:
        raise RecipeError(
            "text data requires a tokenizer, but the recipe has none",
            where="tokenizer",
            value="none",
            hint="set tokenizer.from_pretrained (a pretrained model provides its own)",
        )
    return tokenizer


class Encoder:
    """Tokenizes documents and pairs of texts, with the start and end tokens that the tokenizer's model expects."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        tokenizer = needed(tokenizer)
        if tokenizer.eos_token_id is None:
            raise RecipeError(
                "the tokenizer has no end-of-sequence token",
                where="tokenizer",
                value=tokenizer.name_or_path,
                hint="use a tokenizer with an eos_token, or set one",
            )
        self.tokenizer = tokenizer
        self.end = [int(tokenizer.eos_token_id)]
        begins = tokenizer.bos_token_id is not None and self._starts_with(tokenizer.bos_token_id)
        self.begin = [int(tokenizer.bos_token_id)] if begins else []

    def documents(self, texts: Sequence[str]) -> list[TokenizedSample]:
        """A sample per text, with labels on all of its tokens; without labels where the text is blank."""
        samples = []
        for text, ids in zip(texts, self._encode(texts), strict=True):
            tokens = self._with_end(self._with_begin(ids))
            is_blank = not text.strip() or self._is_only_special(ids)
            samples.append(TokenizedSample(tokens, [not is_blank] * len(tokens)))
        return samples

    def pairs(self, prompts: Sequence[str], completions: Sequence[str]) -> list[TokenizedSample]:
        """A sample per prompt and completion, tokenized separately so that no token spans both.

        Labels are on the completion and the end token.
        """
        samples = []
        parts = zip(self._encode(prompts), self._encode(completions), completions, strict=True)
        for prompt, completion, text in parts:
            has_start = self._begins(prompt + completion)
            start = prompt if has_start else self.begin + prompt
            is_empty = not text.strip() or self._is_only_special(completion)
            sample = TokenizedSample.answer(start, self._with_end(completion))
            samples.append(sample._replace(is_empty=is_empty))
        return samples

    def _with_begin(self, ids: list[int]) -> list[int]:
        """*ids* with the start token in front, unless the model expects none or *ids* already begin with it."""
        return ids if self._begins(ids) else self.begin + ids

    def _begins(self, ids: list[int]) -> bool:
        return ids[: len(self.begin)] == self.begin

    def _with_end(self, ids: list[int]) -> list[int]:
        """*ids* with the end token appended, unless *ids* already end with it."""
        return ids if ids[-1:] == self.end else ids + self.end

    def _is_only_special(self, ids: list[int]) -> bool:
        return set(ids) <= {*self.begin, *self.end}

    def _starts_with(self, token_id: int) -> bool:
        return list(self.tokenizer("a")["input_ids"])[:1] == [token_id]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded: Any = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]


def blocks(documents: Iterable[TokenizedSample], seq_length: int) -> list[TokenizedSample]:
    """Concatenate the documents and split them into blocks of *seq_length* tokens; the last one may be shorter.

    A single token at the end is dropped, because it has nothing to predict.
    """
    stream = [token for document in documents for token in document.tokens]
    starts = range(0, len(stream) - 1, seq_length)
    return [TokenizedSample.whole(stream[start : start + seq_length]) for start in starts]


def require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise :class:`RecipeError` unless *value*, the data set's argument *name*, is one of *choices*."""
    if value not in choices:
        what = f"unknown value for {name}"
        raise RecipeError(
            what, where=f"dataset.{name}", value=value, hint=f"use one of: {', '.join(choices)}"
        )


def prepared(
    name: str,
    key: tuple[object, ...],
    tokenizer: PreTrainedTokenizerBase,
    build: Callable[[], TokenizedDataset],
) -> TokenizedDataset:
    """The data set that *build* returns for *key* and *tokenizer*, read from the cache if it was prepared before.

    A slow tokenizer has no digest of its content, so the cache is not used for it.
    """
    fingerprint = _fingerprint(tokenizer)
    if fingerprint is None:
        return build()

    def save(directory: Path) -> None:
        log.info("preparing %s", name)
        build().save(directory)

    whole_key = (_FORMAT, *key, fingerprint, tokenizers.__version__)
    return TokenizedDataset.load(cached(name, whole_key, save))


def identity(key: tuple[object, ...], tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest that changes with the samples: *key* contains everything that they depend on besides the tokenizer."""
    whole_key = repr((key, _fingerprint(tokenizer)))
    return hashlib.blake2b(whole_key.encode(), digest_size=12).hexdigest()


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        return None
    special = f"{tokenizer.bos_token_id} {tokenizer.eos_token_id}"
    return hashlib.blake2b((special + backend.to_str()).encode(), digest_size=16).hexdigest()
