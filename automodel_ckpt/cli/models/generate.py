"""``ckpt generate`` and ``ckpt chat``: use the model of a checkpoint, an export or an adapter."""

from __future__ import annotations

import math
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from automodel_ckpt.base.terminal import colored, print_error, printable_lines
from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.cli.common.output import json_text
from automodel_ckpt.cli.common.paths import local_model
from automodel_ckpt.cli.entry import ending_on_interrupt
from automodel_ckpt.errors import EXIT_DONE, TO_UTF8, RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.cli.models.loading import LoadedModel
    from automodel_ckpt.models.measure.generation import Completion, Sampling

_NO_TEMPLATE = "the tokenizer of this model has no chat template"
_PATH = "a run directory, a checkpoint, an export, an adapter, or a model of the Hub"


def _number(is_valid: Callable[[float], bool], what: str) -> Callable[[str], float]:
    def number(text: str) -> float:
        with suppress(ValueError):
            if is_valid(float(text)):
                return float(text)
        # argparse would name the function.
        raise ArgumentTypeError(f"{text} is not {what}")

    return number


SOURCE_OPTIONS = f"""
path PATH       | {_PATH}
--base DIR      | directory of the base model of an adapter, if it was moved
--device DEVICE | cpu, cuda or cuda:N (default: a GPU if there is one)
--dtype {{auto,float32,bfloat16,float16}} =auto | data type of the weights (default: auto, as in the files)
"""
"""Which model is loaded, and where to."""
MODEL_OPTIONS = f"""
{SOURCE_OPTIONS}
--system TEXT   | the system message
--max-new-tokens >=1 =256 N | maximum number of generated tokens (default: 256)
--temperature T | 0: always the most probable token; default: as the model's generation_config.json states, else 0
--top-p P       | sample from the tokens with this probability
--top-k >=1 K   | sample from the K best tokens
--seed >=0 N    | seed for sampling
"""
"""What ``ckpt generate`` and ``ckpt chat`` have in common."""
SAMPLING = {
    "--temperature": _number(lambda value: 0 <= value < math.inf, "a number of 0 or more"),
    "--top-p": _number(lambda value: 0 < value <= 1, "above 0 and at most 1"),
}
TYPES = SAMPLING
USAGE = f"""
Complete prompts with a model. A prompt is rendered as a message of the user by the chat template of the tokenizer, if
it has one. Text is printed while it is generated.

{MODEL_OPTIONS}
--prompt -p required repeat TEXT | a prompt; can be repeated; - reads standard input
--image repeat FILE     | an image before the prompt, for models that take images; can be repeated
--raw                   | continue the text itself, without a chat template
"""


def run(arguments: Namespace) -> int:
    """Run ``ckpt generate``. Generated text is printed on standard output, messages on standard error."""
    _check(arguments)
    prompts = [_prompt(text) for text in arguments.prompt]
    loaded = load_model(arguments)
    sampling = sampling_of(arguments)
    completions = []
    for number, prompt in enumerate(prompts):
        if number and not arguments.json:
            print("\n---")
        on_text = None if arguments.json else write_text
        completion = _complete(loaded, arguments, prompt, sampling, on_text)
        if not arguments.json:
            print()
            print_error(summary(completion))
        completions.append(
            {
                "prompt": prompt,
                "text": completion.text,
                "prompt_tokens": completion.num_prompt_tokens,
                "tokens": completion.num_tokens,
                "finish": completion.finish,
                "seconds": completion.seconds,
            }
        )
    if arguments.json:
        print(json_text({"model": loaded.name, "completions": completions}))
    return EXIT_DONE


def _prompt(text: str) -> str:
    """Return a prompt of the command line, or the standard input for ``-``.

    Raises :class:`RecipeError` for text that is not valid UTF-8.
    """
    try:
        prompt = sys.stdin.read().rstrip("\n") if text == "-" else text
        prompt.encode()
    except UnicodeError as error:
        raise RecipeError("the prompt is not valid UTF-8", "--prompt", error, TO_UTF8) from error
    return prompt


def _check(arguments: Namespace) -> None:
    """Raise :class:`RecipeError` for arguments that do not fit together, before the model is loaded."""
    if arguments.prompt.count("-") > 1:
        raise RecipeError("standard input can be only one prompt", "--prompt", "-")
    for option, value in (("--image", arguments.image), ("--system", arguments.system)):
        if arguments.raw and value:
            raise RecipeError(
                f"{option} needs a chat template, which --raw does not use", option, value
            )
    for name in arguments.image:
        _check_image(name)


def _check_image(name: str) -> None:
    """Raise :class:`RecipeError` if *name* is no image file."""
    try:
        from PIL import Image
    except ImportError:
        # The processor of the model reports this.
        return
    try:
        with Image.open(name) as image:
            image.load()
    # Which one, depends on the format.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RecipeError("the image cannot be read", name, str(error)[:200]) from error


def load_model(arguments: Namespace) -> LoadedModel:
    """Load the model of the command line, and seed the random generator."""
    local_model(arguments.path)  # without torch, an error comes at once
    with ending_on_interrupt():
        import torch

        from automodel_ckpt.cli.models.loading import load

    device = arguments.device
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RecipeError(
            "there is no such device", "--device", f"{device} ({str(error).splitlines()[0][:100]})"
        ) from error
    seed = getattr(arguments, "seed", None)
    if seed is not None:
        torch.manual_seed(seed)
    return load(arguments.path, base=arguments.base, device=device, dtype=arguments.dtype)


def sampling_of(arguments: Namespace) -> Sampling:
    """The sampling that the command line describes."""
    from automodel_ckpt.models.measure.generation import Sampling

    return Sampling(
        arguments.max_new_tokens, arguments.temperature, arguments.top_p, arguments.top_k
    )


def _complete(
    loaded: LoadedModel,
    arguments: Namespace,
    prompt: str,
    sampling: Sampling,
    on_text: Any,
) -> Completion:
    from automodel_ckpt.models.measure.generation import generate, has_chat_template, inputs_of

    is_chat = has_chat_template(loaded.preprocessor) and not arguments.raw
    given: Any = prompt
    if is_chat:
        content: Any = prompt
        if arguments.image:
            parts = [{"type": "image", "path": image} for image in arguments.image]
            content = [*parts, {"type": "text", "text": prompt}]
        given = [*system_messages(arguments.system), {"role": "user", "content": content}]
    elif arguments.system or arguments.image:
        option = "--system" if arguments.system else "--image"
        raise RecipeError(_NO_TEMPLATE, option, arguments.system or arguments.image[0])
    inputs = inputs_of(loaded.preprocessor, given, loaded.model.device)
    return generate(loaded.model, loaded.preprocessor, inputs, sampling, on_text)


def system_messages(text: str | None) -> list[ValueDict]:
    """The system message as a list of messages; empty without one."""
    return [{"role": "system", "content": text}] if text else []


def write_text(text: str) -> None:
    """Print a part of generated text. Characters that control a terminal are escaped."""
    sys.stdout.write(printable_lines(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def summary(completion: Completion) -> str:
    """One line about a completion: tokens, speed, and why it ended."""
    rate = completion.num_tokens / max(completion.seconds, 1e-9)
    tokens = counted(completion.num_tokens, "token")
    reason = "end token" if completion.finish == "stop" else "limit of tokens reached"
    return f"[{tokens}, {rate:.1f} tokens/s, {reason}]"


HELP = "/reset begins a new conversation, /exit or Ctrl-D ends; Ctrl-C stops an answer"
USAGE_CHAT = f"""
Talk to a model, one line per message. {HELP}. Its tokenizer must have a chat template.

{MODEL_OPTIONS}
"""


def run_chat(arguments: Namespace) -> int:
    """Run ``ckpt chat`` until the end of the input. Answers are printed on standard output."""
    loaded = load_model(arguments)
    from automodel_ckpt.models.measure.generation import has_chat_template

    if not has_chat_template(loaded.preprocessor):
        raise RecipeError(
            _NO_TEMPLATE,
            arguments.path,
            "",
            'use `ckpt generate PATH -p "TEXT"`, which continues a text',
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
            messages.append({"role": "assistant", "content": _answer(loaded, messages, sampling)})
    return EXIT_DONE


def _next_line() -> str | None:
    """The next line of the user without spaces around it; None at the end of the input, and after Ctrl-C."""
    if sys.stdin.isatty():
        # It adds a history and editing to input().
        import readline  # noqa: F401
    sys.stdout.flush()
    prompt = colored("> ", "bold", sys.stdout) if sys.stdin.isatty() else ""
    try:
        return input(prompt).strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _answer(loaded: LoadedModel, messages: list[ValueDict], sampling: Sampling) -> str:
    """Print the answer to *messages* and return it: the part before Ctrl-C if the user stops it."""
    from automodel_ckpt.models.measure.generation import generate, inputs_of

    parts = []

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
