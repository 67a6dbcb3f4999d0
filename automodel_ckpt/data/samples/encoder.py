"""Tokenize text to samples, with the start and end tokens that the model expects.

Many texts are encoded by one call of a fast tokenizer's Rust backend, without what only inference needs. Texts that
continue others get no space that some tokenizers put before a text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, TokenizersBackend

from automodel_ckpt.data.rows.arguments import require_tokenizer
from automodel_ckpt.data.samples.tokenized import TokenizedSample
from automodel_ckpt.errors import RecipeError

_CALLED = ("__call__", "_encode_plus", "_convert_encoding", "set_truncation_and_padding")
"""The methods between a call of a tokenizer and its backend."""
_MIN_BATCH = 8
_PARALLELISM = "TOKENIZERS_PARALLELISM"


def encode_all(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool = False
) -> list[list[int]]:
    """Return the token ids of each text without truncation and padding, and by default without special tokens.

    The result is that of a call of *tokenizer*. A few texts are passed to it. More go to its backend directly, which
    then computes no offsets and no masks, unless a subclass has changed how texts are encoded.
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
    """Start processes in the block whose tokenizers have one thread: each of them has one core."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        del os.environ[_PARALLELISM]
        if before is not None:
            os.environ[_PARALLELISM] = before


@contextmanager
def truncation_on_the_right(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Let a tokenizer keep the beginning of a text that it truncates, whatever its own setting is."""
    # The setting is restored, because exports contain the tokenizer.
    side = tokenizer.truncation_side
    tokenizer.truncation_side = "right"
    try:
        yield
    finally:
        tokenizer.truncation_side = side


def encode_one(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
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


_PROBE = "a word, and 12 (b)\nor c"


class Continuations:
    """Tokenizes texts that follow others, so that both together are the concatenated text.

    The tokenizers of Llama 2, Mistral and Phi-3 put a space before a text. A sample has this space at its start, and
    not before a continuation. Tokens of a text and of its continuation remain separate. Tokenizers that put a space
    before each word, or remove one behind a text, such as that of T5, are used as they are.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def encode(self, before: Sequence[list[int]], texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each of *texts* behind the tokens *before* it, without special tokens."""
        if self._without_space is None:
            return encode_all(self._tokenizer, texts)
        found = encode_all(self._without_space, texts)
        # Others are those that begin a part of a text, or contain a token at which the tokenizer divides it.
        others = [
            number
            for number, (start, ids) in enumerate(zip(before, found, strict=True))
            if self._begins_part(start) or self._first_division(ids) is not None
        ]
        usual = encode_all(self._tokenizer, [texts[number] for number in others])
        for number, ids in zip(others, usual, strict=True):
            found[number] = self._joined(before[number], found[number], ids)
        return found

    def _joined(self, before: list[int], continued: list[int], usual: list[int]) -> list[int]:
        """Return the tokens of a continuation, of which each part behind a special token is encoded as *usual*."""
        if self._begins_part(before):
            return usual
        first = self._first_division(continued)
        usual_first = self._first_division(usual)
        if first is None or usual_first is None:
            return continued
        return continued[:first] + usual[usual_first:]

    def _begins_part(self, before: list[int]) -> bool:
        """Whether a text behind these tokens gets the space."""
        if not before:
            return True
        return self._in_each_part and before[-1] in self._divisions

    def _first_division(self, ids: list[int]) -> int | None:
        # Most texts have none, and isdisjoint takes a fifth of the time of a loop.
        if self._divisions.isdisjoint(ids):
            return None
        return next(number for number, id in enumerate(ids) if id in self._divisions)

    @cached_property
    def _divisions(self) -> set[int]:
        """The tokens that the tokenizer looks for in a text first. It encodes the parts between them separately."""
        return set(self._tokenizer.added_tokens_decoder)

    @cached_property
    def _in_each_part(self) -> bool:
        """Whether the space is put before each part of a text; otherwise only before the first."""
        backend = self._backend
        assert backend is not None
        return "first" not in _schemes(json.loads(backend.to_str()))

    @cached_property
    def _without_space(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer without the space; None if it puts none before a text, or if that is not all that it does."""
        backend = self._backend
        if backend is None:
            return None
        document = json.loads(backend.to_str())
        if not _schemes(document):
            return None
        _remove(document)
        changed = tokenizers.Tokenizer.from_str(json.dumps(document))
        splits_special = getattr(self._tokenizer, "split_special_tokens", False)
        make: Any = PreTrainedTokenizerFast
        made: PreTrainedTokenizerBase = make(
            tokenizer_object=changed, split_special_tokens=splits_special
        )
        return made if _differs_by_space(made, self._tokenizer) else None

    @property
    def _backend(self) -> tokenizers.Tokenizer | None:
        if not isinstance(self._tokenizer, TokenizersBackend):
            return None
        backend = self._tokenizer.backend_tokenizer
        return backend if isinstance(backend, tokenizers.Tokenizer) else None


def _differs_by_space(made: PreTrainedTokenizerBase, usual: PreTrainedTokenizerBase) -> bool:
    """Whether a text with a space before it is for *made* what the text is for *usual*, and both keep spaces behind it.

    It is not so if a step before has divided the text: then each of its words gets a space from *usual*, and none from
    *made*.
    """
    begun, ended, text = encode_all(made, [f" {_PROBE}", f"{_PROBE} ", _PROBE])
    return [begun] == encode_all(usual, [_PROBE]) and ended != text


def _schemes(document: dict[str, Any]) -> list[str]:
    """Return where each step of a tokenizer.json puts a space: ``always`` or ``first``."""
    found = ["always" for step in _steps(document, "normalizer") if step["type"] == "Prepend"]
    for step in _steps(document, "pre_tokenizer"):
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            found.append(step.get("prepend_scheme", "always"))
        if step["type"] == "ByteLevel" and step.get("add_prefix_space", False):
            found.append("always")
    return found


def _remove(document: dict[str, Any]) -> None:
    """Change the steps of a tokenizer.json so that none puts a space before a text."""
    normalizers = [step for step in _steps(document, "normalizer") if step["type"] != "Prepend"]
    document["normalizer"] = (
        {"type": "Sequence", "normalizers": normalizers} if normalizers else None
    )
    for step in _steps(document, "pre_tokenizer"):
        if step["type"] == "Metaspace":
            step["prepend_scheme"] = "never"
        if step["type"] == "ByteLevel":
            step["add_prefix_space"] = False


def _steps(document: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the normalizers or pre-tokenizers of a tokenizer.json, of which a sequence can contain others."""
    pending = [document.get(kind)]
    found = []
    while pending:
        step = pending.pop(0)
        if step is None:
            continue
        if step["type"] == "Sequence":
            pending = [*step["normalizers" if kind == "normalizer" else "pretokenizers"], *pending]
        else:
            found.append(step)
    return found


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
