"""The ways of splitting text into words that are built into llama.cpp, by its names (``tokenizer.ggml.pre``).

Source: llama.cpp's ``src/llama-vocab.cpp``, which quotes for each name the expressions of tokenizer.json. They are
compared as text: another expression splits text in another way. A new way is an entry in ``PRE_TOKENIZERS``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from automodel_ckpt.checkpoint.files.type_aliases import Strings, Values

# Parts that several expressions share.
_ANY_CASE_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MIXED_CASE = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_UPPER_CASE = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_PUNCTUATION_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

LLAMA_3 = (
    rf"{_ANY_CASE_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
)
QWEN_2 = rf"{_ANY_CASE_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
QWEN_3_5 = (
    rf"{_ANY_CASE_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
TEKKEN = rf"{_MIXED_CASE}|{_UPPER_CASE}|\p{{N}}|{_PUNCTUATION_OR_SLASH}|{_SPACES}"
GPT_4O = (
    rf"{_MIXED_CASE}{_ANY_CASE_SUFFIX}?|{_UPPER_CASE}{_ANY_CASE_SUFFIX}?|\p{{N}}{{1,3}}"
    rf"|{_PUNCTUATION_OR_SLASH}|{_SPACES}"
)
# The last step of tokenizers that split before it: bytes only, no splitting.
BYTES = "bytes"
# The step of GPT-2: its own expression splits the text.
BYTES_AND_WORDS = "bytes and words of GPT-2"
SINGLE_DIGITS = "single digits"


@dataclass(frozen=True)
class PreTokenizer:
    """A way of splitting text: the *name* of llama.cpp, and the steps in tokenizer.json.

    A step is one of the words above, or the regular expression of a ``Split`` into isolated pieces. With
    *ignore_merges*, llama.cpp looks a whole word up before it merges.
    """

    name: str
    steps: Strings
    ignore_merges: bool = False


PRE_TOKENIZERS: tuple[PreTokenizer, ...] = (
    PreTokenizer("gpt-2", (BYTES_AND_WORDS,)),
    PreTokenizer("smollm", (SINGLE_DIGITS, BYTES_AND_WORDS)),
    PreTokenizer("llama-bpe", (LLAMA_3, BYTES), ignore_merges=True),
    PreTokenizer("smaug-bpe", (LLAMA_3, BYTES)),
    PreTokenizer("qwen2", (QWEN_2, BYTES)),
    PreTokenizer("qwen35", (QWEN_3_5, BYTES)),
    PreTokenizer("tekken", (TEKKEN, BYTES), ignore_merges=True),
    PreTokenizer("gpt-4o", (GPT_4O, BYTES)),
)


def find_pre_tokenizer(steps: Sequence[Values], *, ignore_merges: bool) -> PreTokenizer | None:
    """Return the entry for the *steps* of a pre_tokenizer in tokenizer.json, or None when llama.cpp has none."""
    words = tuple(map(_word, steps))
    matching = (
        known
        for known in PRE_TOKENIZERS
        if known.steps == words and known.ignore_merges == ignore_merges
    )
    return next(matching, None)


def _word(step: Values) -> str | None:
    """Return a step as in :class:`PreTokenizer`, or None for any other step."""
    kind = step.get("type")
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return BYTES_AND_WORDS if step.get("use_regex", True) else BYTES
    if kind == "Digits" and step.get("individual_digits") is True:
        return SINGLE_DIGITS
    if kind != "Split" or step.get("behavior") != "Isolated" or step.get("invert"):
        return None
    pattern = step.get("pattern")
    expression = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    return expression if isinstance(expression, str) else None
