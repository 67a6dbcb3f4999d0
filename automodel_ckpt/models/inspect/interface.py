"""What models of transformers have in common: a forward function, parts for images and audio, a vocabulary, errors."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import re
import textwrap
import warnings
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from automodel_ckpt.errors import AutomodelError, RecipeError

log = logging.getLogger(__name__)

CORRECT_FILE = "correct the value in the file, or download the model again"
# Colors and other control sequences of terminals (ECMA-48).
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def first_line(error: BaseException, num_lines: int = 1) -> str:
    """The first lines of an exception's message without control sequences, at most 400 characters; its class if the
    message is empty."""
    text = _CONTROL.sub("", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    text = textwrap.shorten(" ".join(lines[:num_lines]), 400, placeholder=" ...")
    return text or type(error).__name__


@contextmanager
def naming_files(
    what: str, files: str, *, hint: str = CORRECT_FILE, kind: type[AutomodelError] = RecipeError
) -> Iterator[None]:
    """Raise *kind* with the text *what* for any error of a library that uses the *files* of a model.

    A value in such a file that the library does not expect can make it raise anything. Errors of this program and
    exceeded memory keep their type.
    """
    try:
        yield
    except (AutomodelError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        value = f"{type(error).__name__}: {first_line(error, 5)}"
        raise kind(what, where=files, value=value, hint=hint) from error


def did_you_mean(name: str, known: set[str]) -> str:
    """A hint with the known names that are similar to *name*, or else with a few known names."""
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"there are, for example, {', '.join(sorted(known)[:5])}"


def listed(names: Sequence[object], limit: int = 5) -> str:
    """The first *limit* of *names* for a message, and how many there are besides."""
    shown = ", ".join(map(str, names[:limit]))
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def in_all_layers(name: str) -> str:
    """Return a pattern for the module or parameter *name* in all layers: ``layers.*.mlp`` for ``layers.3.mlp``."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on *device*; None while it is off."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def attention_of(model: nn.Module) -> str:
    """The name of the attention implementation; ``its own`` for a model that is not of transformers."""
    config = getattr(model, "config", None)
    return getattr(config, "_attn_implementation", None) or "its own"


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of the model's forward; of the base's if adapters or ddp wrap it, which pass everything on."""
    return inspect.signature(model_without_adapters(model).forward).parameters


def text_inputs(model: nn.Module, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of *rows* of text that *model* takes. Decoders take no ``token_type_ids``."""
    taken = forward_parameters(model)
    names = ("input_ids", "attention_mask", "token_type_ids")
    return {name: rows[name] for name in names if name in rows and name in taken}


def model_without_adapters(model: nn.Module) -> Any:
    """The base that peft's adapters and ``DistributedDataParallel`` wrap; *model* itself if neither does."""
    if isinstance(model, DistributedDataParallel):
        # Its forward takes any arguments, whatever the model takes.
        model = model.module
    get_base_model: Any = getattr(model, "get_base_model", None)
    if get_base_model is None:
        return model
    return get_base_model()


def accepts_use_cache(model: nn.Module) -> bool:
    """Whether the model's forward takes ``use_cache``, or passes it to a model inside that takes it."""
    parameters = forward_parameters(model)
    if "use_cache" in parameters:
        return True
    passes_on = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    config = getattr(model, "config", None)
    if not passes_on or not isinstance(config, PreTrainedConfig):
        return False
    if config.is_encoder_decoder:
        # T5Gemma's classifier passes use_cache itself, and fails if it gets another one.
        return False
    # Granite's mixtures of experts: only the forward of the model without the output layer names it.
    # The user's own module may have a config, and no base model.
    outer = model_without_adapters(model)
    inner = getattr(outer, "base_model", outer)
    if "use_cache" in inspect.signature(inner.forward).parameters:
        return True
    # Vision-language models such as LLaVA: only the text model's forward names it.
    return config.get_text_config() is not config and hasattr(config.get_text_config(), "use_cache")


def logits_of(output: Any) -> Tensor:
    """What a model's last layer returned: logits; hidden states of a pipeline stage; the loss of a loss head.

    transformers' models return it in a field that is named ``logits``, whatever it is; other models return it alone.
    """
    last: Tensor
    if isinstance(output, Mapping) and not hasattr(output, "logits"):
        last = output.get("logits", output)
    else:
        last = getattr(output, "logits", output)
    return last


def class_and_message(error: Exception) -> str:
    """The class of an exception and the first line of its message."""
    name, text = type(error).__name__, first_line(error)
    return name if text == name else f"{name}: {text}"


@contextmanager
def side_effect_free(model: nn.Module) -> Iterator[None]:
    """Run *model* in evaluation mode without gradients; on exit, restore its modes and the random state of the CPU."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        # A few tokens are not worth compiling for.
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            yield
    finally:
        for module, training in modes.items():
            # Not train(), which would also set all inner modules.
            module.training = training


# In order of precedence: a projector may be located inside the vision tower.
_PARTS = {
    "projector": {
        "multi_modal_projector",
        "connector",
        "merger",
        "deepstack_merger_list",
        "mm_projector",
        "projector",
        "modality_projection",
        "vision_projection",
        "embed_vision",
        "embed_audio",
        "aligner",
    },
    "vision_tower": {"vision_tower", "vision_model", "visual", "vision_encoder", "image_encoder"},
    "audio_tower": {"audio_tower", "audio_encoder", "audio_model", "audio_embed"},
    "language_model": {"language_model", "text_model", "lm_head"},
}
PARTS = ("vision_tower", "audio_tower", "projector", "language_model")

_MEDIA_IDS = (
    "image_token_id",
    "image_token_index",
    "boi_token_id",
    "boi_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "vision_start_token_id",
    "vision_end_token_id",
    "audio_token_id",
    "audio_token_index",
    "audio_start_token_id",
    "audio_end_token_id",
    "audio_bos_token_id",
    "audio_eos_token_id",
    "boa_token_id",
    "eoa_token_id",
)
_IMAGES: Any = AutoModelForImageTextToText
# Versions without it have no models of audio alone.
_ALL: Any = getattr(transformers, "AutoModelForMultimodalLM", AutoModelForImageTextToText)


def parameters_of(part: str, names: Iterable[str]) -> list[str]:
    """The parameter *names* that belong to *part*, one of :data:`PARTS`."""
    return [name for name in names if part_of(name) == part]


def part_of(name: str) -> str | None:
    """The part of :data:`PARTS` that a parameter or module with this name belongs to; None for other names."""
    components = set(name.split("."))
    for part, names in _PARTS.items():
        if names & components:
            return part
    return None


def image_token_ids(config: PreTrainedConfig | None, processor: Any) -> frozenset[int]:
    """The ids of tokens that the model replaces by features of images or audio, or that delimit them.

    They get no labels.
    """
    owners = (config, processor, getattr(processor, "tokenizer", None))
    tokens = [getattr(owner, name, None) for owner in owners for name in _MEDIA_IDS]
    return frozenset(token for token in tokens if isinstance(token, int) and token >= 0)


def image_settings(processor: Any, default: PreTrainedConfig) -> dict[str, int]:
    """The ids of tokens of images and audio, from *processor*, for the settings that a config as *default* has."""
    tokenizer = getattr(processor, "tokenizer", processor)
    image = getattr(tokenizer, "image_token_id", None) or getattr(processor, "image_token_id", None)
    audio = getattr(tokenizer, "audio_token_id", None) or getattr(processor, "audio_token_id", None)
    known = {
        "image_token_id": image,
        "image_token_index": image,
        "audio_token_id": audio,
        "audio_token_index": audio,
        "boi_token_index": getattr(tokenizer, "boi_token_id", None),
        "eoi_token_index": getattr(tokenizer, "eoi_token_id", None),
    }
    return {
        name: token
        for name, token in known.items()
        if isinstance(token, int) and hasattr(default, name)
    }


class AutoMultimodalModel(AutoModelForImageTextToText):
    """AutoModelForImageTextToText, also for the models of audio that AutoModelForMultimodalLM has."""


_OURS: Any = AutoMultimodalModel
_OURS._model_mapping = ChainMap(_IMAGES._model_mapping, _ALL._model_mapping)
# transformers registers the class of a repository with code. A ChainMap has no such method.
_OURS.register = _IMAGES.register
# Repositories with code name their class by it.
AutoMultimodalModel.__name__ = AutoModelForImageTextToText.__name__


def thinker_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of Qwen-Omni's configuration for the model that reads and writes text; other configurations unchanged.

    The files of these models also have a model that speaks, which is not trained. transformers reads the weights of the
    part from them.
    """
    thinker = getattr(config, "thinker_config", None)
    if not isinstance(thinker, PreTrainedConfig):
        return config
    thinker.name_or_path = config.name_or_path
    return thinker


def other_parts_in_files(config: PreTrainedConfig) -> list[str]:
    """Globs for the names of tensors outside the thinker in files of Qwen-Omni; empty for other models.

    transformers ignores them, but not in all versions.
    """
    is_thinker = config.model_type.endswith("_thinker")
    return ["talker.*", "token2wav.*", "code2wav.*"] if is_thinker else []


def wanted_size(option: str | int | None, tokenizer: Any) -> int | None:
    """The number of tokens that ``model.vocab_size`` sets. None when it does not change the model's vocabulary.

    Raises :class:`RecipeError` for ``tokenizer`` without a tokenizer.
    """
    if option is None:
        return None
    if option != "tokenizer":
        return int(option)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor's
    if tokenizer is None:
        raise RecipeError(
            "vocab_size tokenizer requires a tokenizer",
            where="model.vocab_size",
            value=option,
            hint="",
        )
    return len(tokenizer)


def num_embeddings(model: nn.Module) -> int | None:
    """The number of rows of the input embedding. None when the model does not declare one."""
    weight = getattr(_layer_of(model, "get_input_embeddings"), "weight", None)
    return None if weight is None else len(weight)


def _layer_of(model: nn.Module, getter: str) -> Any:
    """What the method *getter* of a transformers model returns; None without one."""
    try:
        return getattr(model, getter, lambda: None)()
    except NotImplementedError:
        # A model of transformers that does not state its embedding, such as CANINE, which hashes characters.
        return None


def context_length(config: Any) -> int | None:
    """The number of tokens up to which a text model has positions. None when its configuration states no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    # XLNet has -1: no limit.
    return limit if isinstance(limit, int) and limit > 0 else None


def check_context(config: PreTrainedConfig, seq_length: int, where: str) -> None:
    """Raise :class:`RecipeError` if samples of *seq_length* tokens are longer than the model's context."""
    limit = context_length(config)
    if limit is not None and seq_length > limit:
        raise RecipeError(
            "samples may be longer than the model's context",
            where=where,
            value=f"{seq_length} tokens; the model's max_position_embeddings is {limit}",
            hint="",
        )


def check_vocabulary(config: PreTrainedConfig, tokenizer: Any, *, size: int | None = None) -> None:
    """Raise :class:`RecipeError` if the tokenizer has ids without an embedding in the model.

    *size* is the value of ``model.vocab_size``; None is the size of the model's vocabulary.
    """
    size = size or getattr(config.get_text_config(), "vocab_size", None)
    if tokenizer is not None and isinstance(size, int) and len(tokenizer) > size:
        raise RecipeError(
            "the tokenizer has more tokens than the model's vocabulary",
            where="tokenizer",
            value=f"{len(tokenizer)} tokens; the model's vocab_size is {size}",
            hint="set model.vocab_size tokenizer, so that the model gets room for them; or use the model's own "
            "tokenizer (leave the tokenizer section out)",
        )


def check_token_ids(batches: Iterable[Mapping[str, Tensor]], size: int | None, where: str) -> None:
    """Validate that a model of *size* embeddings has a row for all tokens and labels; None does not limit the ids.

    Raises :class:`RecipeError` with the setting *where*.
    """
    for name, ignored in (("input_ids", 0), ("labels", -100)):
        for ids in (batch[name] for batch in batches if name in batch):
            unknown = ids[(ids != ignored) & ((ids < 0) | (ids >= (size or math.inf)))]
            if len(unknown):
                raise RecipeError(
                    f"a sample has {name} outside of the model's vocabulary",
                    where=where,
                    value=f"{int(unknown[0])}; the model has tokens from 0 to {size - 1 if size else '?'}",
                    hint="prepare the data with the model's own tokenizer, or set model.vocab_size",
                )


def vocabulary_names(model: nn.Module) -> list[str]:
    """The names of parameters with one row per token, of the embedding and of an output layer that is not tied."""
    return list(dict(_vocabulary(model)))


def _vocabulary(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    wanted: set[int] = set()
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        layer = _layer_of(model, getter)
        # Perceiver returns a parameter with rows that are not tokens.
        if isinstance(layer, nn.Module):
            wanted.update(id(parameter) for parameter in layer.parameters(recurse=False))
    for name, parameter in model.named_parameters():
        if id(parameter) in wanted:
            yield name, parameter


def resize_vocabulary(
    model: nn.Module, size: int, new_tokens: Literal["mean", "init"]
) -> list[str]:
    """Resize the vocabulary of a transformers model to *size* tokens. Returns the names of the changed parameters.

    The first rows are unchanged, and tied layers stay tied. New rows are drawn from torch's generator (``init``), or
    are the mean of the existing rows (``mean``). The changes are logged.
    """
    before = {name: parameter.detach() for name, parameter in _vocabulary(model)}
    if all(len(parameter) == size for parameter in before.values()):
        return []
    resizable: Any = model
    # mean_resizing draws new rows with the covariance of all rows, which no rank holds.
    resizable.resize_token_embeddings(size, mean_resizing=False)
    for name, parameter in _vocabulary(model):
        old = before[name]
        if new_tokens == "mean" and size > len(old):
            with torch.no_grad():
                parameter[len(old) :] = old.double().mean(0).to(parameter.dtype)
        log_resized(name, old.shape, parameter.shape, new_tokens)
    return list(before)


def log_resized(
    name: str, old: Sequence[int], new: Sequence[int], new_tokens: Literal["mean", "init"]
) -> None:
    """Log that the parameter *name* was resized from the shape *old* to *new*."""
    filled = "the mean of the others" if new_tokens == "mean" else "fresh"
    rows = f", new rows are {filled}" if new[0] > old[0] else ", the last rows are dropped"
    log.debug("resized %s: %s -> %s%s", name, list(old), list(new), rows)


def set_size(config: PreTrainedConfig, size: int) -> None:
    """Set the size of the vocabulary in *config*, for a model that is built later."""
    config.get_text_config().vocab_size = size
