"""From ``from_pretrained`` or ``from_config`` to a model that is ready to be shared out among ranks.

What can be refused by the configuration alone is refused before any weight is made or read.
"""

from __future__ import annotations

import copy
import difflib
import fnmatch
import logging
import os
import pickle
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn.parameter import is_lazy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.models.forward import attention_of
from automodel_ckpt.models.quantize import cast_to, dequantized
from automodel_ckpt.models.vision import PARTS, image_settings, parameters_of
from automodel_ckpt.models.weight_matching import Verdict

log = logging.getLogger(__name__)

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_model_config(
    *,
    from_pretrained: str | None = None,
    from_config: Mapping[str, Any] | str | None = None,
    tokenizer: Any = None,
    processor: Any = None,
) -> PreTrainedConfig:
    """The transformers configuration of the model; reads no weights.

    A *from_config* mapping takes ``vocab_size`` and the special tokens' ids from *tokenizer*, and those of the image
    tokens from *processor*, where it does not give them. Raises :class:`RecipeError` for what is not there, not
    readable, or no setting of this type of model.
    """
    if from_pretrained is not None:
        return _read_config(from_pretrained, "model.from_pretrained")
    if isinstance(from_config, str):
        return _read_config(from_config, "model.from_config")
    return _config_from_mapping(dict(from_config or {}), tokenizer, processor)


def require_local(name: str, where: str) -> None:
    """Raise :class:`RecipeError` when *name* is a path rather than a Hub name, and nothing is there."""
    path = Path(name).expanduser()
    if path.exists():
        return
    looks_local = name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
    if looks_local or ("/" in name and path.parent.is_dir()):
        raise RecipeError(
            "no such directory", where=where, value=name, hint=_nearest_directory(path)
        )


def base_directory(name: str) -> Path | None:
    """The local directory of a pretrained model's files: *name* itself, or its place in the Hub's cache."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    found = cached_file(
        name, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False
    )
    return Path(found).parent if found else None


def fetched_directory(name: str) -> Path | None:
    """As :func:`base_directory`, for whoever needs the weights: those of a Hub name are fetched into its cache first.

    None where they cannot be had as safetensors. Ranks of a machine that fetch at the same time wait for each other.
    """
    if not Path(name).expanduser().is_dir():
        try:
            index = cached_file(
                name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False
            )
            if index is not None:
                get_checkpoint_shard_files(name, index)  # type: ignore[no-untyped-call]
            elif (
                cached_file(name, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
                is None
            ):
                return None
        except (OSError, ValueError):
            return None
    return base_directory(name)


def _nearest_directory(path: Path) -> str:
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    hint = f"did you mean {path.parent / near[0]}? " if near else ""
    return f"{hint}use a directory with a config.json, or a model of the Hugging Face Hub"


def _read_config(name: str, where: str) -> PreTrainedConfig:
    require_local(name, where)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            os.path.expanduser(name), trust_remote_code=False
        )
        return config
    except Exception as error:  # what damaged files make transformers raise
        raise RecipeError(
            "the model's configuration cannot be read",
            where=where,
            value=f"{name} ({first_line(error)})",
            hint="name a directory with a config.json; a Hub name needs the network or a filled cache, and for a "
            "model that asks for it a login (hf auth login)",
        ) from error


def _config_from_mapping(
    settings: dict[str, Any], tokenizer: Any, processor: Any
) -> PreTrainedConfig:
    model_type = settings.pop("model_type", None)
    config_class = _config_class(model_type)
    try:
        default = config_class()
        settings = _completed(settings, default, tokenizer, processor)
        _check_known(settings, default)
        return config_class(**copy.deepcopy(settings))
    except (ValueError, TypeError, ZeroDivisionError, StrictDataclassError) as error:
        raise RecipeError(
            f"transformers rejects this configuration of a {model_type} model",
            where="model.from_config",
            value=first_line(error, 3),
            hint="correct the value; the settings are those of the model type's config.json",
        ) from error


def _config_class(model_type: object) -> type[PreTrainedConfig]:
    known = list(CONFIG_MAPPING.keys())
    if isinstance(model_type, str) and model_type in known:
        found: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
        return found
    near = difflib.get_close_matches(str(model_type), known, n=3)
    raise RecipeError(
        "from_config requires a model_type that transformers supports",
        where="model.from_config.model_type",
        value=model_type,
        hint=f"did you mean {' or '.join(near)}?" if near else "for example llama, qwen3 or gpt2",
    )


def _completed(
    settings: dict[str, Any], default: PreTrainedConfig, tokenizer: Any, processor: Any
) -> dict[str, Any]:
    """*settings* with what follows from the tokenizer, for a model of several parts in that of its text."""
    if "text_config" not in default.sub_configs:
        return {**_settings_of(tokenizer), **settings}
    text = settings.get("text_config") or {}
    return {
        **image_settings(processor, default),
        **settings,
        "text_config": {**_settings_of(tokenizer), **text},
    }


def _settings_of(tokenizer: Any) -> dict[str, Any]:
    if tokenizer is None:
        return {}
    ids = {name: getattr(tokenizer, name, None) for name in _SPECIAL_IDS}
    return {"vocab_size": len(tokenizer), **ids}


def _check_known(settings: Mapping[str, Any], default: PreTrainedConfig) -> None:
    """transformers would keep a misspelt setting as an attribute and build the model without it."""
    known = {
        name for name in (*vars(default), *type(default).attribute_map) if not name.startswith("_")
    }
    unknown = [name for name in settings if not hasattr(default, name)]
    if unknown:
        raise RecipeError.all_of(
            [
                Problem(
                    f"{default.model_type} models have no setting {name!r}",
                    f"model.from_config.{name}",
                    settings[name],
                    did_you_mean(name, known),
                )
                for name in unknown
            ]
        )


def check_task(config: PreTrainedConfig, auto_class: Any) -> None:
    """:class:`RecipeError` for a model that *auto_class* of transformers, the recipe's, does not make."""
    made_by = getattr(auto_class, "_model_mapping", None)  # one class of models has none
    if (
        made_by is None
        or type(config) in made_by
        or auto_class.__name__ in (getattr(config, "auto_map", None) or {})
    ):
        return
    made = (
        ", ".join(getattr(config, "architectures", None) or ()) or "no class listed in its config"
    )
    raise RecipeError(
        "this recipe does not support this kind of model",
        where="model",
        value=f"a {config.model_type} model ({made}), which {auto_class.__name__} does not support",
        hint="name a causal language model, or for a vision-language model recipe: vlm_finetune; encoders and "
        "encoder-decoders need a recipe of your own",
    )


def check_attention(model: nn.Module, device: torch.device) -> None:
    """:class:`RecipeError` where the model's attention cannot be trained on *device*."""
    if device.type == "cpu" and attention_of(model) == "flex_attention":
        raise RecipeError(
            "torch's flex_attention has no backward pass on the CPU",
            where="model.attn_implementation",
            value="flex_attention",
            hint="set it to sdpa or eager, or train on a GPU",
        )


def check_context(config: PreTrainedConfig, seq_length: int, where: str) -> None:
    """Raise :class:`RecipeError` when samples of *seq_length* tokens are longer than the model's context."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and seq_length > limit:
        raise RecipeError(
            "samples may be longer than the model's context",
            where=where,
            value=f"{seq_length} tokens; the model's max_position_embeddings is {limit}",
            hint=f"set it to {limit} or less, or use a model with a longer context",
        )


def check_vocabulary(config: PreTrainedConfig, tokenizer: Any, *, size: int | None = None) -> None:
    """Raise :class:`RecipeError` when the tokenizer has ids for which the model has no embedding.

    *size* is what ``model.vocab_size`` makes of the model's own.
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


def build_model(
    config: PreTrainedConfig,
    *,
    auto_class: Any = AutoModelForCausalLM,
    from_pretrained: str | None = None,
    dtype: str = "float32",
    attn_implementation: str | None = None,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    loading: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A model by *config*, on the CPU, in training mode; weights read, or drawn from torch's generator.

    *auto_class* is the class of transformers that makes it. *dtype* is a torch dtype's name or ``auto``: that of the
    files, or of the configuration. *config* is not changed. The globs *allow_missing* and *allow_unexpected* say which
    weights of the model the files need not hold, and which of theirs the model need not have. *loading* are further
    arguments of ``from_pretrained``.
    Raises :class:`RecipeError` when the weights cannot be read, for other weights than the model's, or when
    transformers has no such model.
    """
    options: dict[str, Any] = {"trust_remote_code": False}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    try:
        if from_pretrained is None:
            options["dtype"] = fresh_dtype(config, dtype)
            model: nn.Module = auto_class.from_config(copy.deepcopy(config), **options)
        else:
            options["dtype"] = "auto" if dtype == "auto" else getattr(torch, dtype)
            options["ignore_mismatched_sizes"] = True  # they are refused by name, unless allowed
            if not loading:
                options |= dequantized(config)
            model, differences = _read_model(
                auto_class, os.path.expanduser(from_pretrained), options | dict(loading or {})
            )
    except (SafetensorError, pickle.UnpicklingError, EOFError) as error:
        raise RecipeError(
            "a file of the model's weights is damaged",
            where=_damaged_file(os.path.expanduser(str(from_pretrained))),
            value=first_line(error),
            hint="download or copy it again, and compare its size with the original",
        ) from error
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        hint = "correct the model section; weights are read from *.safetensors beside config.json"
        if attn_implementation is not None and "flash" in str(error).lower():
            hint = "install what it needs, or set model.attn_implementation to sdpa or eager, or leave it out"
        value = first_line(error, 3)
        raise RecipeError(
            "the model cannot be built", where="model", value=value, hint=hint
        ) from error
    if from_pretrained is not None:
        verdict = Verdict.of_differences(
            **differences, allow_missing=allow_missing, allow_unexpected=allow_unexpected
        )
        verdict.refuse("model.from_pretrained", from_pretrained, "model")
        verdict.tell(f"{from_pretrained} and the model")
        if dtype != "auto" and not loading:
            cast_to(model, getattr(torch, dtype))
    return model.train()


def _damaged_file(name: str) -> str:
    """The first file of weights whose header cannot be read; *name*, of which it is a part, where that says nothing."""
    for file in sorted((base_directory(name) or Path(name)).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return str(file)
    return name


def fresh_dtype(config: PreTrainedConfig, dtype: str) -> torch.dtype:
    """The type that a dtype's name, or ``auto``, gives a model of fresh weights."""
    if dtype != "auto":
        return getattr(torch, dtype)  # type: ignore[no-any-return]
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def _read_model(
    auto_class: Any, name: str, options: Mapping[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and what its tensors and those of the files differ in."""
    # What is not as it should be is refused or told by us, by name.
    with _quiet("transformers.modeling_utils"):
        model, info = auto_class.from_pretrained(name, output_loading_info=True, **options)
    misshapen = {fqn: (tuple(there), tuple(here)) for fqn, there, here in info["mismatched_keys"]}
    missing = set(info["missing_keys"]) - misshapen.keys()
    return model, {
        "missing": missing,
        "unexpected": info["unexpected_keys"],
        "misshapen": misshapen,
    }


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def freeze(model: nn.Module, patterns: Sequence[str]) -> int:
    """Exclude from training the parameters whose names match a glob; returns how many elements stay trainable.

    A part of a vision-language model has a name of its own: ``vision_tower``, ``projector``, ``language_model``.
    Raises :class:`RecipeError` for patterns that match nothing, and when nothing is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    matches = {
        pattern: parameters_of(pattern, parameters)
        if pattern in PARTS
        else fnmatch.filter(parameters, pattern)
        for pattern in patterns
    }
    parts = [part for part in PARTS if parameters_of(part, parameters)]
    problems = [
        Problem(
            "no parameter's name matches",
            "model.freeze",
            pattern,
            did_you_mean(pattern, {*parameters, *parts}),
        )
        for pattern, names in matches.items()
        if not names
    ]
    if problems:
        raise RecipeError.all_of(problems)
    for names in matches.values():
        for name in names:
            parameters[name].requires_grad_(False)
    num_trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if num_trainable == 0:
        raise RecipeError(
            "no parameter is left to train",
            where="model.freeze",
            value=list(patterns),
            hint="freeze fewer parameters",
        )
    return num_trainable


def check_complete(model: object) -> None:
    """Raise :class:`RecipeError` for what is no module, or has tensors without values, as lazy ones and those on the
    meta device are."""
    if not isinstance(model, nn.Module):
        hint = "return one from the function or class of this section"
        raise RecipeError(
            "the model is not a torch.nn.Module",
            where="model",
            value=type(model).__name__,
            hint=hint,
        )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lazy = [name for name, tensor in tensors.items() if is_lazy(tensor) or tensor.is_meta]
    if lazy:
        raise RecipeError(
            "tensors of the model are not initialized",
            where="model",
            value=f"{len(lazy)} of {len(tensors)}, the first {lazy[0]}",
            hint="let what makes the model run it once on a few tokens (lazy layers), and leave the meta device out",
        )


def check_trained_types(model: nn.Module) -> None:
    """Raise :class:`RecipeError` where parameters in float16 are to be trained."""
    short = [
        name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16
    ]
    if short:
        raise RecipeError(
            "float16 training requires a loss scaler (small gradients underflow), which is not supported",
            where="model.dtype",
            value=f"{len(short)} trainable parameters in float16, the first {short[0]}",
            hint="set it to bfloat16, which has float32's range, or to float32; adapters on a base in float16 are "
            "trained in peft.dtype float32",
        )


def checkpoint_activations(model: Any) -> None:
    """Recompute each layer's activations in the backward pass. :class:`RecipeError` where the model cannot."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise RecipeError(
            "this model cannot recompute its activations",
            where="model.activation_checkpointing",
            value=type(model).__name__,
            hint="remove activation_checkpointing",
        )
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})


def did_you_mean(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    listed = near or sorted(known)[:5]
    return (
        f"did you mean {', '.join(listed)}?"
        if near
        else f"there are, for example, {', '.join(listed)}"
    )


def first_line(error: BaseException, num_lines: int = 1) -> str:
    """The beginning of what an exception says, 400 characters at most; its class where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        textwrap.shorten(" ".join(lines[:num_lines]), 400, placeholder=" ...")
        or type(error).__name__
    )
