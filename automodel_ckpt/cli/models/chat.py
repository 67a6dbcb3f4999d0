"""``ckpt chat``: a conversation with the model of a checkpoint, an export or an adapter."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from automodel_ckpt.cli.common.terminal import coloured, print_error
from automodel_ckpt.cli.models.generate import (
    MODEL_OPTIONS,
    SAMPLING,
    load_model,
    sampling_of,
    summary,
    system_messages,
    write_text,
)
from automodel_ckpt.errors import EXIT_DONE, RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.cli.models.loading import LoadedModel
    from automodel_ckpt.models.measure.generation import Sampling

HELP = "/reset begins a new conversation, /exit or Ctrl-D ends; Ctrl-C stops an answer"
USAGE = f"""
Talk to a model, one line per message. {HELP}. Its tokenizer must have a chat template.

{MODEL_OPTIONS}
"""
TYPES = SAMPLING


def run(arguments: argparse.Namespace) -> int:
    """Run ``ckpt chat`` until the end of the input. Answers are printed on standard output."""
    loaded = load_model(arguments)
    from automodel_ckpt.models.measure.generation import has_chat_template

    if not has_chat_template(loaded.preprocessor):
        raise RecipeError(
            "the tokenizer of this model has no chat template",
            where=arguments.path,
            value="",
            hint='use `ckpt generate PATH -p "TEXT"`, which continues a text',
        )
    print_error(HELP)
    begin = system_messages(arguments.system)
    messages = list(begin)
    sampling = sampling_of(arguments)
    while (line := _next_line()) is not None:
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            messages = list(begin)
            print_error("new conversation")
        elif line.startswith("/"):
            print_error(f"unknown command {line}; {HELP}")
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(loaded, messages, sampling)
            messages.append({"role": "assistant", "content": answer})
    return EXIT_DONE


def _next_line() -> str | None:
    """The next line of the user without spaces around it; None at the end of the input, and after Ctrl-C."""
    if sys.stdin.isatty():
        # It adds a history and editing to input().
        import readline  # noqa: F401
    sys.stdout.flush()
    prompt = coloured("> ", "bold", sys.stdout) if sys.stdin.isatty() else ""
    try:
        return input(prompt).strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _answer(loaded: LoadedModel, messages: list[dict[str, Any]], sampling: Sampling) -> str:
    """Print the answer to *messages* and return it: the part before Ctrl-C if the user stops it."""
    from automodel_ckpt.models.measure.generation import generate, inputs_of

    parts: list[str] = []

    def on_text(text: str) -> None:
        parts.append(text)
        write_text(text)

    inputs = inputs_of(loaded.preprocessor, messages, loaded.model.device)
    try:
        completion = generate(loaded.model, loaded.preprocessor, inputs, sampling, on_text)
    except KeyboardInterrupt:
        print()
        print_error("[stopped]")
        return "".join(parts)
    print()
    print_error(summary(completion))
    return completion.text
