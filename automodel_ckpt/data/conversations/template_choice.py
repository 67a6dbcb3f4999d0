"""Which chat template a recipe selects: the tokenizer's, the shipped one that replaces it, or one of the user."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.conversations.training_templates import select_template
from automodel_ckpt.data.rows.arguments import require_tokenizer
from automodel_ckpt.errors import RecipeError

CHOICES = (None, "original", "training")
"""Values of ``chat_template`` that mean the tokenizer's own, or the shipped template that replaces it."""


def template_of(tokenizer: PreTrainedTokenizerBase, given: str | None) -> str:
    """Return the chat template for *given*, the value of ``dataset.chat_template``.

    A template or the path of a template file gives that template. None, ``original`` and ``training`` select between
    the tokenizer's template and the one that is shipped to replace it
    (:func:`~automodel_ckpt.data.conversations.training_templates.select_template`). Raises :class:`RecipeError` if the
    tokenizer has
    no template or if the file cannot be read.
    """
    if given in CHOICES:
        try:
            return select_template(str(require_tokenizer(tokenizer).get_chat_template()), given)
        except ValueError as error:
            raise RecipeError(
                "the tokenizer has no chat template",
                where="dataset.chat_template",
                value=tokenizer.name_or_path,
                hint="set a template or the path of a template file; tokenizers of instruct models come with one",
            ) from error
    return read_template(given)


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
