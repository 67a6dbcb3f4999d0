"""Tokenize text to samples, with the start and end tokens that the model expects.

Many texts are encoded by one call of a fast tokenizer's Rust backend, without what only inference needs. Texts that
continue others get no space that some tokenizers put before a text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerBase, TokenizersBackend

from automodel_ckpt.data.collate import Ids, require_tokenizer
from automodel_ckpt.data.samples.tokenized import Samples, TokenizedSample
from automodel_ckpt.errors import RecipeError

_CALLED = ("__call__", "_encode_plus", "_convert_encoding", "set_truncation_and_padding")
"""The methods between a call of a tokenizer and its backend."""
_MIN_BATCH = 8
_PARALLELISM = "TOKENIZERS_PARALLELISM"


def encode_all(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool = False
) -> list[Ids]:
    """Return the token ids of each text without truncation and padding, and by default without special tokens.

    The result is the same as from a call of *tokenizer*. A few texts are passed to it. More go to its backend directly,
    which then computes no offsets and no masks, unless a subclass has changed how texts are encoded.
    """
    if not texts:
        return []
    backend = _plain_backend(tokenizer)
    if backend is None or len(texts) < _MIN_BATCH:
        encoded: Any = tokenizer(list(texts), add_special_tokens=add_special_tokens, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]
    # A call disables the backend's truncation and padding, which tokenizer.json or another call may have enabled.
    tokenizer(["a"], add_special_tokens=False, verbose=False)
    encodings = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    return [encoding.ids for encoding in encodings]


@contextmanager
def one_thread() -> Iterator[None]:
    """Processes that start in the block tokenize with one thread: each process has one core."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        del os.environ[_PARALLELISM]
        if before is not None:
            os.environ[_PARALLELISM] = before


def encode_one(tokenizer: PreTrainedTokenizerBase, text: str) -> Ids:
    """Return the token ids of a text, without special tokens."""
    backend = _plain_backend(tokenizer)
    is_prepared = (
        backend is not None
        and backend.truncation is None
        and backend.padding is None
        and backend.encode_special_tokens == getattr(tokenizer, "split_special_tokens", None)
    )
    if backend is None or not is_prepared:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if os.environ.get(_PARALLELISM) == "false":
        # In the processes that prepare data. It computes no offsets, which takes a quarter less time.
        return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
    # Not encode_batch_fast: it would pass a single text to other threads.
    return list(backend.encode(text, add_special_tokens=False).ids)


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> tokenizers.Tokenizer | None:
    """Return the backend of a tokenizer that passes texts to it unchanged; None for others."""
    if not isinstance(tokenizer, TokenizersBackend):
        return None
    for name in _CALLED:
        if getattr(type(tokenizer), name) is not getattr(TokenizersBackend, name):
            return None
        # An instance may have it replaced as well.
        if name in vars(tokenizer):
            return None
    backend = tokenizer.backend_tokenizer
    return backend if isinstance(backend, tokenizers.Tokenizer) else None


def tokenize(
    tokenizer: PreTrainedTokenizerBase, columns: Sequence[Sequence[str]], **options: Any
) -> list[tuple[Ids, Ids]]:
    """Return the token ids of texts, or of pairs of texts for two *columns*, and the types of the tokens, if any.

    *options* are arguments of a call of *tokenizer*, which adds special tokens by default.
    """
    encoded: Any = tokenizer(
        *map(list, columns), return_attention_mask=False, verbose=False, **options
    )
    ids = encoded["input_ids"]
    types = encoded.get("token_type_ids") or [()] * len(ids)
    return [(list(own), list(own_types)) for own, own_types in zip(ids, types, strict=True)]


def truncated(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], limit: int, **options: Any
) -> tuple[Ids, Ids]:
    """Tokenize a text or a pair as :func:`tokenize` does, at most *limit* tokens: the special tokens remain."""
    # The setting is restored, because exports contain the tokenizer.
    side = tokenizer.truncation_side
    tokenizer.truncation_side = "right"
    try:
        columns = [[text] for text in texts]
        [found] = tokenize(tokenizer, columns, truncation=True, max_length=limit, **options)
        return found
    finally:
        tokenizer.truncation_side = side


_PROBE = "a word, and 12 (b)\nor c"
_MARKS = "\x01\n|?.:;-"
"""Characters that tokenizers rarely join with the text behind them. The first one that the tokenizer knows is used."""
_UNKNOWN = "\ue000"
"""A character that no tokenizer knows."""


class Continuations:
    """Tokenizes texts that follow others, so that both together are the concatenated text.

    The tokenizers of Llama 2, Mistral and Phi-3 put a space before a text. A sample has this space at its start, and
    not before a continuation. So a continuation is tokenized behind a mark, or behind the special token that precedes
    it, without which its tokens are used. Tokens of a text and of its continuation remain separate. Tokenizers that put
    a space before each word, or remove one behind a text, such as T5's tokenizer, are used as they are.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, Ids] = {}

    def encode(self, before: Sequence[Ids], texts: Sequence[str]) -> list[Ids]:
        """Return the token ids of each of *texts* behind the tokens *before* it, without special tokens."""
        marks = [self._mark_behind(ids) for ids in before]
        behind = [mark + text for mark, text in zip(marks, texts, strict=True)]
        found = encode_all(self._tokenizer, behind)
        for number, mark in enumerate(marks):
            others = iter(self.marks)
            # A tokenizer joins some texts with a mark, such as two line breaks.
            while mark and found[number][: len(self._ids(mark))] != self._ids(mark):
                mark = next(others, "")
                [found[number]] = encode_all(self._tokenizer, [mark + texts[number]])
            if mark:
                found[number] = found[number][len(self._ids(mark)) :]
        return found

    def _mark_behind(self, ids: Ids) -> str:
        if not ids or not self.marks:
            return ""
        special = self._tokenizer.added_tokens_decoder
        return special[ids[-1]].content if ids[-1] in special else self.marks[0]

    def _ids(self, text: str) -> Ids:
        if text not in self._known:
            [self._known[text]] = encode_all(self._tokenizer, [text])
        return self._known[text]

    @cached_property
    def marks(self) -> str:
        """The marks for continuations; empty if the tokenizer puts no space before a text, or does more than that."""
        usual, unknown = self._ids(_PROBE), self._ids(_UNKNOWN)
        if self._ids(f"{_PROBE} ") == usual:
            return ""
        found = ""
        for mark in _MARKS:
            own, behind = self._ids(mark), self._ids(mark + _PROBE)
            puts_space = behind[: len(own)] == own and behind[len(own) :] != usual
            if own != unknown and puts_space and self._ids(f"{mark} {_PROBE}") == own + usual:
                found += mark
        return found


def ends_of(tokenizer: PreTrainedTokenizerBase, *ids: int | None) -> Ids:
    """Return the *ids* of end tokens that the tokenizer has. Raises :class:`RecipeError` if it has none."""
    known = [int(each) for each in ids if each is not None]
    if not known:
        raise RecipeError(
            "the tokenizer has no end-of-sequence token",
            where="tokenizer",
            value=tokenizer.name_or_path,
            hint="use a tokenizer with an eos_token, or set one",
        )
    return known


class Encoder:
    """Tokenizes documents and pairs of texts, with the start and end tokens that the tokenizer's model expects."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        tokenizer = require_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self._continuations = Continuations(tokenizer)
        self.end = ends_of(tokenizer, tokenizer.eos_token_id)
        self.begin: Ids = []
        # Many tokenizers have a start token that their model was not trained with: only one that they add is used.
        begin = tokenizer.bos_token_id
        if begin is not None and list(tokenizer("a")["input_ids"])[:1] == [begin]:
            self.begin = [int(begin)]

    def documents(self, texts: Sequence[str]) -> Samples:
        """Make a sample of each text, with labels on all of its tokens, or on none if the text is blank."""
        samples = []
        for text, ids in zip(texts, encode_all(self.tokenizer, texts), strict=True):
            tokens = self._with_end(ids if self._begins(ids) else self.begin + ids)
            labelled = [not self._is_blank(text, ids)] * len(tokens)
            samples.append(TokenizedSample(tokens, labelled))
        return samples

    def pairs(self, prompts: Sequence[str], completions: Sequence[str]) -> Samples:
        """Make a sample of each prompt and completion, tokenized separately so that no token spans both.

        Labels are on the completion and the end token.
        """
        samples = []
        prompt_ids = encode_all(self.tokenizer, prompts)
        completion_ids = self._continuations.encode(prompt_ids, completions)
        for prompt, completion, text in zip(prompt_ids, completion_ids, completions, strict=True):
            # If the prompt is empty, the completion may begin with the start token.
            has_start = self._begins(prompt + completion)
            start = prompt if has_start else self.begin + prompt
            is_empty = self._is_blank(text, completion)
            samples.append(TokenizedSample.answer(start, self._with_end(completion), is_empty))
        return samples

    def _begins(self, ids: Ids) -> bool:
        return ids[: len(self.begin)] == self.begin

    def _with_end(self, ids: Ids) -> Ids:
        """Append the end token, unless *ids* already end with it."""
        return ids if ids[-1:] == self.end else ids + self.end

    def _is_blank(self, text: str, ids: Ids) -> bool:
        """Whether a text has no words."""
        return not text.strip() or set(ids) <= {*self.begin, *self.end}
