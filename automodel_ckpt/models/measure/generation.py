"""Text that a transformers model generates from a prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer

from automodel_ckpt.base.bounded_templates import bound_chat_templates, template_errors
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.interface import context_length, naming_files

Message = Values
"""A message of a conversation, with the keys that a chat template reads: role, content, and others."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are selected. None: as the model's generation_config.json states, which is greedy without one."""

    max_new_tokens: int = 256
    temperature: float | None = None
    """0: always the most probable token (greedy)."""
    top_p: float | None = None
    top_k: int | None = None

    def arguments(self) -> ValueDict:
        """Keyword arguments of ``model.generate``."""
        arguments = {"max_new_tokens": self.max_new_tokens}
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        if self.temperature == 0:
            # The config's values would be reported as unused.
            return {**arguments, **dict.fromkeys(given), "do_sample": False}
        given = {name: value for name, value in given.items() if value is not None}
        return arguments | given | ({"do_sample": True} if given else {})


@dataclass(frozen=True)
class Completion:
    """The generated *text*. *finish* is ``stop`` if the model ended it, and ``length`` at the limit of tokens.

    The *tokens* include the special ones, which are not in the text.
    """

    text: str
    num_prompt_tokens: int
    num_tokens: int
    finish: str
    seconds: float
    tokens: Sequence[int] = ()


class _Callback(TextStreamer):
    """Passes generated text to a function as soon as it is complete, without the prompt."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._on_text(text)


def has_chat_template(preprocessor: Any) -> bool:
    """Whether a tokenizer or processor can render conversations."""
    return bool(getattr(preprocessor, "chat_template", None))


def inputs_of(
    preprocessor: Any, prompt: str | Sequence[Message], device: torch.device
) -> dict[str, Tensor]:
    """Return the model's inputs for *prompt*, on *device*: ``input_ids`` [1, T] and others.

    Text is tokenized as it is; messages are rendered by the chat template, up to the answer of the assistant. Raises
    :class:`RecipeError` if there are no tokens, and if the template fails.
    """
    if isinstance(prompt, str):
        encoded = getattr(preprocessor, "tokenizer", preprocessor)(prompt, return_tensors="pt")
    else:
        bound_chat_templates()
        # Separately, because a processor also reads images, which is no error of the template.
        with template_errors(str(getattr(preprocessor, "name_or_path", "") or "the chat template")):
            preprocessor.apply_chat_template(
                list(prompt), add_generation_prompt=True, tokenize=False
            )
        encoded = preprocessor.apply_chat_template(
            list(prompt),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    inputs = {
        name: value.to(device)
        for name, value in encoded.items()
        # Tokenizers of some models return types of tokens that their model does not take.
        if isinstance(value, Tensor) and name != "token_type_ids"
    }
    if not inputs["input_ids"].shape[1]:
        raise RecipeError(
            "the prompt has no tokens",
            where="prompt",
            value=repr(prompt),
            hint="give a text that is not empty: the tokenizer of this model adds no token before a text",
        )
    return inputs


@torch.no_grad()
def generate(
    model: Any,
    preprocessor: Any,
    inputs: Mapping[str, Tensor],
    sampling: Sampling,
    on_text: Callable[[str], None] | None = None,
    *,
    synced: bool = False,
    end: int | None = None,
) -> Completion:
    """Generate one completion with ``model.generate``. *on_text* gets the text in parts while it is generated.

    The prompt and the completion have at most as many tokens as the model's context. With *synced*, all ranks make as
    many forward passes as the rank that needs the most. The token *end* ends a completion, as the model's end tokens
    do.
    """
    tokenizer = getattr(preprocessor, "tokenizer", preprocessor)
    started = time.perf_counter()
    num_prompt_tokens = inputs["input_ids"].shape[1]
    arguments: ValueDict = {"return_dict_in_generate": False, "num_return_sequences": 1}
    arguments |= sampling.arguments()
    # transformers streams no text of beam search.
    streams = (getattr(model.generation_config, "num_beams", None) or 1) == 1
    context = context_length(model.config)
    # The encoder reads the prompt, and the output of a decoder with an encoder begins with its start token.
    num_before = 1 if getattr(model.config, "is_encoder_decoder", False) else num_prompt_tokens
    if context is not None:
        # Beyond it, learned positions are an error, and others are of low quality.
        arguments["max_new_tokens"] = min(sampling.max_new_tokens, max(1, context - num_before))
    own_ends = model.generation_config.eos_token_id
    ends = {end, *(own_ends if isinstance(own_ends, list) else [own_ends])} - {None}
    if end is not None:
        arguments["eos_token_id"] = sorted(ends)
    where = f"generation_config.json and config.json of {model.config.name_or_path or 'the model'}"
    with naming_files("transformers cannot generate text with this model", where):
        # transformers asks for the padding token although one sequence needs none.
        candidates = (
            model.generation_config.pad_token_id,
            tokenizer.pad_token_id,
            *ends,
        )
        padding = next((int(each) for each in candidates if each is not None), None)
        output = model.generate(
            **inputs,
            **arguments,
            streamer=_Callback(tokenizer, on_text) if on_text is not None and streams else None,
            pad_token_id=padding,
            synced_gpus=synced,
        )
    tokens = output[0, num_before:].tolist()
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    if on_text is not None and not streams:
        on_text(text)
    ended = bool(tokens) and tokens[-1] in ends
    return Completion(
        text,
        num_prompt_tokens,
        len(tokens),
        "stop" if ended else "length",
        time.perf_counter() - started,
        tokens,
    )
