"""Tokenize text to samples, with the start and end tokens that the model expects."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.rows.arguments import require_tokenizer
from automodel_ckpt.data.samples.continuations import Continuations
from automodel_ckpt.data.samples.fast_encoding import encode_all
from automodel_ckpt.data.samples.tokenized import TokenizedSample
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
        self._continuations = Continuations(tokenizer)
        self.end = [int(tokenizer.eos_token_id)]
        self.begin: list[int] = []
        # Many tokenizers have a start token that their model was not trained with: only one that they add is used.
        if tokenizer.bos_token_id is not None and self._adds_at_start(tokenizer.bos_token_id):
            self.begin = [int(tokenizer.bos_token_id)]

    def documents(self, texts: Sequence[str]) -> list[TokenizedSample]:
        """Make a sample of each text, with labels on all of its tokens, or on none if the text is blank."""
        samples = []
        for text, ids in zip(texts, self._encode(texts), strict=True):
            tokens = self._with_end(self._with_begin(ids))
            is_blank = not text.strip() or self._is_only_special(ids)
            labelled = [not is_blank] * len(tokens)
            samples.append(TokenizedSample(tokens, labelled))
        return samples

    def pairs(self, prompts: Sequence[str], completions: Sequence[str]) -> list[TokenizedSample]:
        """Make a sample of each prompt and completion, tokenized separately so that no token spans both.

        Labels are on the completion and the end token.
        """
        samples = []
        prompt_ids = self._encode(prompts)
        completion_ids = self._continuations.encode(prompt_ids, completions)
        for prompt, completion, text in zip(prompt_ids, completion_ids, completions, strict=True):
            # If the prompt is empty, the completion may begin with the start token.
            has_start = self._begins(prompt + completion)
            start = prompt if has_start else self.begin + prompt
            is_empty = not text.strip() or self._is_only_special(completion)
            samples.append(TokenizedSample.answer(start, self._with_end(completion), is_empty))
        return samples

    def _with_begin(self, ids: list[int]) -> list[int]:
        """Prepend the start token, unless the model expects none or *ids* already begin with it."""
        return ids if self._begins(ids) else self.begin + ids

    def _begins(self, ids: list[int]) -> bool:
        return ids[: len(self.begin)] == self.begin

    def _with_end(self, ids: list[int]) -> list[int]:
        """Append the end token, unless *ids* already end with it."""
        return ids if ids[-1:] == self.end else ids + self.end

    def _is_only_special(self, ids: list[int]) -> bool:
        return set(ids) <= {*self.begin, *self.end}

    def _adds_at_start(self, token_id: int) -> bool:
        return list(self.tokenizer("a")["input_ids"])[:1] == [token_id]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return encode_all(self.tokenizer, texts)
