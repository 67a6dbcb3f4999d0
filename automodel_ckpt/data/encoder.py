"""Tokenize text to samples, with the start and end tokens that the model expects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.arguments import require_tokenizer
from automodel_ckpt.data.tokenized import TokenizedSample
from automodel_ckpt.errors import RecipeError


class Encoder:
    """Tokenizes documents and pairs of texts, with the start and end tokens that the tokenizer's model expects."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        tokenizer = require_tokenizer(tokenizer)
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
