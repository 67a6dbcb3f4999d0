"""Token ids of texts that continue other texts, without the space that some tokenizers put before a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, TokenizersBackend

from automodel_ckpt.data.samples.fast_encoding import encode_all

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
