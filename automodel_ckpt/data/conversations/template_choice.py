"""Which chat template a recipe selects: the tokenizer's, the shipped one that replaces it, or one of the user.

A template is shipped for a model if its own template does not show which tokens the assistant generates: it drops the
thinking of earlier turns, or ends the last turn in another way than earlier turns, so that the assistant's tokens
cannot be found by rendering parts of a conversation. The files in ``chat_templates/`` write the same tokens and mark
with ``{% generation %}`` what the model has to generate: all after the header of the assistant's message, up to and
including the token that ends its turn. Where the model's own template drops thinking, the Qwen ones keep it in every
turn.

The tokenizer's template is recognized by its digest. Templates render whole conversations, and the tokenizer keeps its
own, which exports contain.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.rows.arguments import require_tokenizer
from automodel_ckpt.errors import RecipeError

CHOICES = (None, "original", "training")
"""Values of ``chat_template`` that mean the tokenizer's own, or the shipped template that replaces it."""


def template_of(tokenizer: PreTrainedTokenizerBase, given: str | None) -> str:
    """Return the chat template for *given*, the value of ``dataset.chat_template``. *tokenizer* may be a processor.

    A template or the path of a template file gives that template. None, ``original`` and ``training`` select between
    the tokenizer's template and the one that is shipped to replace it
    (:func:`select_template`). Raises :class:`RecipeError` if the tokenizer has no template or if the file cannot be
    read.
    """
    if given not in CHOICES:
        return read_template(str(given))
    tokenizer = require_tokenizer(tokenizer)
    inner = getattr(tokenizer, "tokenizer", None)
    own: Any = getattr(tokenizer, "chat_template", None) or getattr(inner, "chat_template", None)
    if isinstance(own, dict):
        own = own.get("default")
    if not isinstance(own, str):
        noun = "tokenizer" if inner is None else "processor"
        raise RecipeError(
            f"the {noun} has no chat template",
            where="dataset.chat_template",
            value=type(tokenizer).__name__,
            hint=f"set a template or the path of a template file; {noun}s of instruct models come with one",
        )
    return select_template(own, given)


def read_template(given: str) -> str:
    """Return the chat template *given*, or the content of the file with this path.

    Raises :class:`RecipeError` if the file cannot be read, or is no template: checkpoints and uploads contain it.
    """
    if "{" in given:
        return given
    try:
        text = Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = "give the path of a text file in UTF-8, or the template itself"
        value = f"{given} ({getattr(error, 'strerror', error)})"
        what = "the chat template cannot be read"
        raise RecipeError(what, where="dataset.chat_template", value=value, hint=hint) from error
    if "{{" not in text and "{%" not in text:
        raise RecipeError(
            "the file is not a chat template: it has neither {{ nor {%",
            where="dataset.chat_template",
            value=given,
            hint="give the path of a Jinja template",
        )
    return text


@dataclass(frozen=True)
class _Shipped:
    """The *file* in ``chat_templates/`` that replaces a template of *model*; *variable* is set to true in it."""

    model: str
    file: str
    variable: str | None = None


_DIGESTS = {
    _Shipped("Qwen3", "qwen3.jinja"): (
        "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8",
    ),
    _Shipped("Qwen3.5", "qwen3_5.jinja"): (
        "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715",
        "273d8e0e683b885071fb17e08d71e5f2a5ddfb5309756181681de4f5a1822d80",
    ),
    _Shipped("Qwen3.6", "qwen3_5.jinja", "json_scalars"): (
        "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259",
    ),
    _Shipped("DeepSeek-V3", "deepseek_v3.jinja"): (
        "563b1ce7d61d50a9b4c7439a912a1116f095b712df5b5e4d3e1116049874eb64",
    ),
    _Shipped("GPT-OSS", "gpt_oss.jinja"): (
        "a4c9919cbbd4acdd51ccffe22da049264b1b73e59055fa58811a99efbd7c8146",
    ),
    _Shipped("GLM-4.5", "glm_4_moe.jinja"): (
        "44f815868bf02fa458dd2f741a338046f4bf45f398eb6d067766726b9d96cce3",
    ),
    _Shipped("DeepSeek-R1-Distill", "deepseek_v3.jinja", "keeps_thinking"): (
        "56a1447ad31926fdc21fb07e56e5642bd9c850c4f52d8c8af7bbe5f079a84f5f",
    ),
    _Shipped("DiffusionGemma", "gemma_4.jinja"): (
        "9aeb7eac68ad87bba7567e9d4597ff203e5609f1b427d9e823437d0142cc61bf",
    ),
    _Shipped("Gemma 4", "gemma_4.jinja", "answers_in_turn"): (
        "33204f1acb5bd0002713e16a593847f24ceeafe711ed88bda2a352dc996a3373",
        "781d10940fbc44be40064b5d43a056fc486c84ceaa55538226368b57314132bf",
        "2f1b4d75d067bae3fe44e676721c7f077d243bc007156cb9c2f8b5836613d082",
        "603a42db292c25278e9b23d94c7abbe77453f13e26a053c43c5c2f900b4136f7",
        "43b2c64fbd2b556fd7569f1eebd9311b7ef9ccfd2dfd66acf62f6d911859fa5c",
    ),
    _Shipped("Nemotron 3", "nemotron_3.jinja"): (
        "43a92aacc2e169bb37055e4d8b0df31edfdc8657d8c387fcf98254cb246e626a",
        "3b74d76d8b903752e764cae114ae8ae2f24cd260466cf672570c745219573d28",
    ),
    _Shipped("Nemotron 3.5", "nemotron_3.jinja", "is_ultra"): (
        "58933db77d3099b4f78c55a38347a72e1ea05b97d6bd8f38775303dc0194e0a9",
    ),
    _Shipped("Nemotron 3 Ultra", "nemotron_3.jinja", "is_ultra"): (
        "82753bef5cedc4932c1ed509b5c9a12be680fd86d1adb65bc3f7398d11c8eebc",
    ),
}
"""A replacement -> SHA-256 of the models' templates that it replaces, without white space at the end."""
_BY_DIGEST = {digest: shipped for shipped, digests in _DIGESTS.items() for digest in digests}


def select_template(own: str, given: str | None) -> str:
    """Return the template for training on conversations. *own* is the tokenizer's template.

    *given* is None or ``training`` for the shipped template that replaces *own*, or ``original`` for *own* itself.
    Without a shipped one, None gives *own*, and ``training`` raises :class:`RecipeError`.
    """
    # By digest, not by the model's name: a changed template needs other labels.
    shipped = _BY_DIGEST.get(hashlib.sha256(own.rstrip().encode()).hexdigest())
    if given == "original" or (shipped is None and given is None):
        return own
    if shipped is None:
        known = ", ".join(dict.fromkeys(each.model for each in _DIGESTS))
        raise RecipeError(
            "no training template is shipped for the tokenizer's chat template",
            where="dataset.chat_template",
            value="training",
            hint=f"remove it, or set the path of a template with {{% generation %}} markers; shipped for: {known}",
        )
    return _text_of(shipped)


def model_of(template: str) -> str | None:
    """Return the model for which this template is shipped; None for other templates."""
    for shipped in _DIGESTS:
        if _text_of(shipped) == template:
            return shipped.model
    return None


@cache
def _text_of(shipped: _Shipped) -> str:
    text = (resources.files(__package__) / "chat_templates" / shipped.file).read_text(
        encoding="utf-8"
    )
    return text if shipped.variable is None else f"{{%- set {shipped.variable} = true %}}{text}"
