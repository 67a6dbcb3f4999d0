"""From text to tokenized samples, once: what was prepared before is found in the cache."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.cache import cached
from automodel_ckpt.data.tokenized import TokenizedDataset, TokenizedSample
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)

_FORMAT = 5


@dataclass
class Truncation:
    """What happens to samples of more than *seq_length* tokens: ``error`` refuses them, ``right`` cuts them.

    Counts what it cut, and what it left out because no label remained.
    """

    policy: str
    seq_length: int
    num_cut: int = field(default=0, init=False)
    num_left_out: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        require_choice("truncation", self.policy, ("error", "right"))
        if self.seq_length < 2:
            remedy = "give at least 2 (a token and the one it predicts)"
            raise RecipeError(
                "seq_length is too small", where="dataset.seq_length", value=self.seq_length, remedy=remedy
            )

    def apply(self, sample: TokenizedSample, where: Callable[[], str]) -> TokenizedSample | None:
        """The sample as it is or cut; None when nothing of it could be learnt. :class:`RecipeError` names *where*."""
        if not any(sample.labelled[1:]):
            self.num_left_out += 1
            return None
        if len(sample.tokens) <= self.seq_length:
            return sample
        if self.policy == "error":
            raise RecipeError(
                "a sample is longer than seq_length",
                where=where(),
                value=f"{len(sample.tokens)} tokens, seq_length {self.seq_length}",
                remedy="raise dataset.seq_length, cut such samples with dataset.truncation right, or leave them out",
            )
        if not any(sample.labelled[1 : self.seq_length]):
            self.num_left_out += 1
            return None
        self.num_cut += 1
        return TokenizedSample(sample.tokens[: self.seq_length], sample.labelled[: self.seq_length])

    def apply_to_all(self, samples: Sequence[TokenizedSample], where: Callable[[int], str]) -> TokenizedDataset:
        """The data set of what is left of all *samples*; *where* says the place of the n-th."""
        kept = [self.apply(sample, partial(where, number)) for number, sample in enumerate(samples)]
        return TokenizedDataset.of([sample for sample in kept if sample is not None], self.num_cut, self.num_left_out)


def needed(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """The tokenizer; :class:`RecipeError` where there is none."""
    if tokenizer is None:
        raise RecipeError(
            "text needs a tokenizer, and the recipe names none",
            where="tokenizer",
            value="none",
            remedy="name one in tokenizer.from_pretrained (a pretrained model brings its own)",
        )
    return tokenizer


class Encoder:
    """Turns documents and pairs into tokens, with the start and end tokens that the tokenizer's model expects."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        tokenizer = needed(tokenizer)
        if tokenizer.eos_token_id is None:
            raise RecipeError(
                "the tokenizer has no end-of-sequence token",
                where="tokenizer",
                value=tokenizer.name_or_path,
                remedy="use a tokenizer with an eos_token, or set one",
            )
        self.tokenizer = tokenizer
        self.end = [int(tokenizer.eos_token_id)]
        begins = tokenizer.bos_token_id is not None and self._starts_with(tokenizer.bos_token_id)
        self.begin = [int(tokenizer.bos_token_id)] if begins else []

    def documents(self, texts: Sequence[str]) -> list[TokenizedSample]:
        """Each text as a sample that is learnt from its first token on; nothing of it where it is blank."""
        samples = [TokenizedSample.whole(self.begin + ids + self.end) for ids in self._encode(texts)]
        blank = [not text.strip() for text in texts]
        return [
            TokenizedSample(each.tokens, [False] * len(each.tokens)) if nothing else each
            for each, nothing in zip(samples, blank, strict=True)
        ]

    def pairs(self, prompts: Sequence[str], completions: Sequence[str]) -> list[TokenizedSample]:
        """Each prompt with its completion, tokenized apart so that the border between them is a token border."""
        parts = zip(self._encode(prompts), self._encode(completions), strict=True)
        return [TokenizedSample.answer(self.begin + prompt, completion + self.end) for prompt, completion in parts]

    def _starts_with(self, token_id: int) -> bool:
        return list(self.tokenizer("a")["input_ids"])[:1] == [token_id]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded: Any = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]


def blocks(documents: Iterable[TokenizedSample], seq_length: int) -> list[TokenizedSample]:
    """The documents one after another, cut into blocks of *seq_length* tokens; a shorter last one is kept.

    A single token left at the end is dropped: it has nothing to predict.
    """
    stream = [token for document in documents for token in document.tokens]
    starts = range(0, len(stream) - 1, seq_length)
    return [TokenizedSample.whole(stream[start : start + seq_length]) for start in starts]


def require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """:class:`RecipeError` unless *value*, the data set's argument *name*, is one of *choices*."""
    if value not in choices:
        what = f"{name} is not one of its choices"
        raise RecipeError(what, where=f"dataset.{name}", value=value, remedy=f"use one of: {', '.join(choices)}")


def prepared(
    name: str, key: tuple[object, ...], tokenizer: PreTrainedTokenizerBase, build: Callable[[], TokenizedDataset]
) -> TokenizedDataset:
    """What *build* makes for *key* and *tokenizer*: from the cache, else built and stored there.

    Without the cache where the tokenizer, a slow one, cannot be told from others by its content.
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
    """A digest that changes with the samples: with *key*, all that they depend on but the tokenizer, and with that."""
    return hashlib.blake2b(repr((key, _fingerprint(tokenizer))).encode(), digest_size=12).hexdigest()


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        return None
    special = f"{tokenizer.bos_token_id} {tokenizer.eos_token_id}"
    return hashlib.blake2b((special + backend.to_str()).encode(), digest_size=16).hexdigest()
