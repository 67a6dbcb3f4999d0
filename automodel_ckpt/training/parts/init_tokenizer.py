"""The vocabulary beside the weights of ``init_from``, compared with that of the recipe's tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.convert.open import Weights
from automodel_ckpt.training.parts.init_checks import Difference, side_directories

_TOKENIZER = "tokenizer.json"
_MAX_NAMED = 3
_SHOWN_LETTERS = 40
_WITH_OTHERS = "the tokenizer beside them has other ids than that of this recipe (tokenizer)"


def other_vocabularies(tokenizer: Any, sources: Iterable[Weights]) -> Iterator[Difference]:
    """Yield each of the *sources* that has a tokenizer.json whose ids mean other tokens than those of *tokenizer*.

    The rows of the embedding then belong to other tokens, which no shape shows. Tokens that only one of them has are no
    difference as long as their ids are free in the other. *tokenizer* can be a processor, and None.
    """
    here = _vocabulary_of(tokenizer)
    if not here:
        return
    for weights in sources:
        for directory in side_directories(weights):
            there = _vocabulary_in(directory)
            lines = tuple(_lines(there, here)) if there else ()
            if lines:
                yield Difference(weights.path, _WITH_OTHERS, lines)


def _vocabulary_of(tokenizer: Any) -> Mapping[str, int] | None:
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    read = getattr(tokenizer, "get_vocab", None)
    if not callable(read):
        return None
    try:
        found = read()
    except Exception:  # code of users
        return None
    return found if isinstance(found, Mapping) else None


def _vocabulary_in(directory: Path) -> Mapping[str, int] | None:
    """Return the vocabulary of the weights in *directory*; None without a tokenizer.json that can be read."""
    for place in (directory / layout.HF_METADATA, directory):
        # The files of the Hub's cache are links.
        path = os.path.realpath(place / _TOKENIZER)
        if not os.path.isfile(path):
            continue
        from tokenizers import Tokenizer

        # A damaged one is no reason not to start: the weights are complete without it.
        try:
            found: Mapping[str, int] = Tokenizer.from_file(path).get_vocab(with_added_tokens=True)
        except Exception:  # the library raises Exception itself
            return None
        return found
    return None


def _lines(there: Mapping[str, int], here: Mapping[str, int]) -> Iterator[str]:
    """Yield the number of ids with other tokens, and examples of them."""
    tokens_there = {number: token for token, number in there.items()}
    tokens_here = {number: token for token, number in here.items()}
    common = sorted(tokens_there.keys() & tokens_here.keys())
    others = [number for number in common if tokens_there[number] != tokens_here[number]]
    moved = [
        token
        for token, number in there.items()
        if here.get(token, number) != number and number not in tokens_here
    ]
    if others:
        yield f"{len(others)} of {counted(len(common), 'id')} have other tokens"
    for number in others[:_MAX_NAMED]:
        yield f"id {number}: {_text(tokens_there[number])} there, {_text(tokens_here[number])} here"
    if moved:
        yield f"{counted(len(moved), 'token')} with ids that are free here have other ids"
    for token in moved[: 0 if others else _MAX_NAMED]:
        yield f"{_text(token)}: id {there[token]} there, {here[token]} here"


def _text(token: str) -> str:
    return json.dumps(token[:_SHOWN_LETTERS], ensure_ascii=False)
