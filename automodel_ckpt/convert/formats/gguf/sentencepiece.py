"""BPE with byte fallback, the tokenizers of Llama 2, Mistral and Gemma, as GGUF's ``llama`` tokenizer. Pure functions.

llama.cpp tokenizes as SentencePiece does: of all adjacent pairs that concatenate to a token, it merges the one with
the highest score, until there is none. tokenizer.json has a list of merges instead, in descending order of the scores.
The scores that are written are therefore the ranks of the merges. Both give the same tokens if every pair of tokens
that concatenates to a token is a merge, and the merges into one token follow each other. :func:`_deviations` counts
the tokens for which this is not so.

Source: llama.cpp's ``llm_tokenizer_spm_session`` in ``src/llama-vocab.cpp``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.type_aliases import Counts, Strings, Values
from automodel_ckpt.convert.formats.gguf.values import KeyValue, NotConvertible

# SentencePiece's character for a space.
SPACE = "\u2581"
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_SPACES_REPLACED = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
# Share of all tokens: a few odd ones are reported, and a tokenizer of another kind is rejected.
_MAX_DEVIATING = 0.01


def convert(
    model: Values,
    normalizers: Sequence[Values],
    steps: Sequence[Values],
    merges: Sequence[str],
    tokens: list[str],
    types: list[int],
) -> tuple[list[KeyValue], Strings]:
    """Return the keys of a tokenizer, and warnings. Its *model* has byte fallback in addition to its tokens.

    *normalizers* and *steps* are the steps of the normalizer and the pre_tokenizer. *merges* are pairs separated by a
    space. *tokens* and *types*, in the order of ids, become those that llama.cpp needs. Raises
    :class:`NotConvertible` for a tokenizer that llama.cpp would not follow.
    """
    if model.get("ignore_merges"):
        raise NotConvertible(
            "this tokenizer merges words otherwise than llama.cpp's of its kind",
            "ignore_merges",
        )
    bytes_of_text = {f"<0x{byte:02X}>": None for byte in range(256)}
    missing = [byte for byte in bytes_of_text if byte not in model["vocab"]]
    if missing:
        raise NotConvertible("a token for a byte is missing", missing[0])
    prefix, warnings = _space_prefix(normalizers, steps)
    deviating = _deviations(model["vocab"], merges)
    if deviating:
        example = f"{counted(len(deviating), 'token')}, for example {deviating[0]!r:.80}"
        if len(deviating) > _MAX_DEVIATING * len(model["vocab"]):
            raise NotConvertible(
                "the merges are not those of scores, which llama.cpp needs", example
            )
        warnings = (*warnings, f"llama.cpp may split text otherwise with {example}")
    keys = [
        ("tokenizer.ggml.model", "string", "llama"),
        ("tokenizer.ggml.pre", "string", "default"),
        ("tokenizer.ggml.scores", "array", _scores(merges, tokens, types)),
        ("tokenizer.ggml.add_space_prefix", "bool", prefix),
    ]
    for index, token in enumerate(tokens):
        if token in bytes_of_text:
            types[index] = _BYTE
        elif token == model.get("unk_token"):
            types[index] = _UNKNOWN
        elif types[index] == _USER_DEFINED:
            # llama.cpp finds them in the text before it replaces spaces.
            tokens[index] = token.replace(SPACE, " ")
    return keys, warnings


def _space_prefix(normalizers: Sequence[Values], steps: Sequence[Values]) -> tuple[bool, Strings]:
    """Return whether a space is put in front of the text, and warnings; validate that spaces become ``▁``."""
    kinds = [step.get("type") for step in normalizers]
    step_kinds = [step.get("type") for step in steps]
    if kinds and normalizers[-1] == _SPACES_REPLACED:
        prepended = kinds[:-1] == ["Prepend"] and normalizers[0].get("prepend") == SPACE
        # Splits at spaces find none after the normalizer.
        splits_at_space = step_kinds == ["Split"] and steps[0].get("pattern") == {"String": " "}
        if (prepended or len(kinds) == 1) and (not steps or splits_at_space):
            return prepended, ()
    if not kinds and step_kinds == ["Metaspace"] and not steps[0].get("split"):
        scheme = steps[0].get("prepend_scheme", "always")
        if steps[0].get("replacement") == SPACE and scheme in ("always", "first", "never"):
            if scheme == "never":
                return False, ()
            differs = "text that begins with a space"
            if scheme == "first":
                differs += ", or follows a special token,"
            warning = f"llama.cpp puts a space in front of {differs} where the tokenizer does not"
            return True, (warning,)
    raise NotConvertible(
        "this tokenizer changes the text before splitting it",
        f"normalizer: {kinds!r:.100}, pre_tokenizer: {step_kinds!r:.100}",
    )


def _scores(merges: Sequence[str], tokens: Sequence[str], types: Sequence[int]) -> list[float]:
    """Return the score of each token: minus the rank of the first merge that makes it."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    # float32 has 24 bits: consecutive numbers remain different, also where ranks are millions.
    order = {token: number for number, token in enumerate(ranks)}
    scores = []
    for token, kind in zip(tokens, types, strict=True):
        is_merged = kind not in (_UNUSED, _CONTROL, _USER_DEFINED)
        scores.append(-float(order.get(token, len(order)) if is_merged else len(order)))
    return scores


def _deviations(vocab: Counts, merges: Sequence[str]) -> list[str]:
    """Return the tokens that scores could make of other pairs, or at another time, than the *merges*."""
    known: Counter[str] = Counter()
    found: dict[str, None] = {}
    last = None
    for merge in merges:
        token = merge.replace(" ", "")
        if token in known and token != last:
            found[token] = None
        known[token] += 1
        last = token
    for token in vocab:
        cuts = range(1, len(token))
        if sum(1 for cut in cuts if token[:cut] in vocab and token[cut:] in vocab) != known[token]:
            found[token] = None
    return list(found)
