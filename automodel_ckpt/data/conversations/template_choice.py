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
import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.collate import require_tokenizer
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
    text, reason = "", "it has neither {{ nor {%"
    try:
        text = Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = str(getattr(error, "strerror", error))
    if "{{" not in text and "{%" not in text:
        raise RecipeError(
            "the chat template cannot be read",
            where="dataset.chat_template",
            value=f"{given} ({reason})",
            hint="give the path of a text file in UTF-8, or the template itself",
        )
    return text


_DIRECTORY = resources.files(__package__) / "chat_templates"


class _Shipped(NamedTuple):
    """The *file* that replaces a template of *model*, recognized by *sha256*; *variable* is set to true in it."""

    model: str
    file: str
    variable: str | None
    sha256: list[str]
    """Digests of the models' templates without white space at the end."""

    @property
    def text(self) -> str:
        """The template."""
        text = (_DIRECTORY / self.file).read_text(encoding="utf-8")
        return text if self.variable is None else f"{{%- set {self.variable} = true %}}{text}"


@cache
def shipped_templates() -> list[_Shipped]:
    """List the templates that are shipped (``models.json``)."""
    entries = json.loads((_DIRECTORY / "models.json").read_text(encoding="utf-8"))
    return [_Shipped(**entry) for entry in entries]


def select_template(own: str, given: str | None) -> str:
    """Return the template for training on conversations. *own* is the tokenizer's template.

    *given* is None or ``training`` for the shipped template that replaces *own*, or ``original`` for *own* itself.
    Without a shipped one, None gives *own*, and ``training`` raises :class:`RecipeError`.
    """
    # By digest, not by the model's name: a changed template needs other labels.
    digest = hashlib.sha256(own.rstrip().encode()).hexdigest()
    shipped = next((each for each in shipped_templates() if digest in each.sha256), None)
    if given == "original" or (shipped is None and given is None):
        return own
    if shipped is None:
        known = ", ".join(dict.fromkeys(each.model for each in shipped_templates()))
        raise RecipeError(
            "no training template is shipped for the tokenizer's chat template",
            where="dataset.chat_template",
            value="training",
            hint=f"remove it, or set the path of a template with {{% generation %}} markers; shipped for: {known}",
        )
    return shipped.text


def model_of(template: str) -> str | None:
    """Return the model for which this template is shipped; None for other templates."""
    return next((each.model for each in shipped_templates() if each.text == template), None)
