"""Build a model from ``from_pretrained`` or ``from_config``, and validate it.

Everything that the configuration alone shows is validated before weights are created or read.
"""

from __future__ import annotations

import copy
import difflib
import fnmatch
import logging
import os
import pickle
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn.parameter import is_lazy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.hub_access import explained
from automodel_ckpt.models.config_overrides import merged_config
from automodel_ckpt.models.config_values import context_length
from automodel_ckpt.models.forward import attention_of
from automodel_ckpt.models.quantize import cast_to, dequantized
from automodel_ckpt.models.repository import (
    RepositoryOptions,
    base_directory,
    check_code,
    check_revision,
    config_needs_code,
    damaged_config,
    importing_code,
    model_needs_code,
)
from automodel_ckpt.models.task_head import head_differences
from automodel_ckpt.models.vision import PARTS, image_settings, parameters_of
from automodel_ckpt.models.weight_matching import Verdict

log = logging.getLogger(__name__)

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MAIN_REVISION = RepositoryOptions()


def load_model_config(
    *,
    from_pretrained: str | None = None,
    from_config: Mapping[str, Any] | str | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    overrides: Mapping[str, Any] | None = None,
    repository: RepositoryOptions = _MAIN_REVISION,
    auto_class: Any = None,
) -> PreTrainedConfig:
    """Read or create the transformers configuration of the model, without reading weights.

    If a *from_config* mapping does not set them, ``vocab_size`` and the ids of special tokens come from *tokenizer*,
    and the ids of image tokens from *processor*. *overrides* are settings that replace those of the config; they may be
    nested. *auto_class* is the class of transformers that will build the model; None: no check of its code.

    Raises :class:`RecipeError` for a missing or unreadable configuration, for settings that this type of model does not
    have, and for a model whose code is in its repository, unless *repository* allows to run it.
    """
    changes = overrides or {}
    if from_pretrained is not None:
        where = "model.from_pretrained"
        return _read_config(from_pretrained, where, changes, repository, auto_class)
    if isinstance(from_config, str):
        return _read_config(from_config, "model.from_config", changes, repository, auto_class)
    return _config_from_mapping(dict(from_config or {}), tokenizer, processor, changes)


def require_local(name: str, where: str) -> None:
    """Raise :class:`RecipeError` if *name* looks like a path, not like a name of the Hub, and does not exist."""
    path = Path(name).expanduser()
    if path.exists():
        return
    looks_local = name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
    if looks_local or ("/" in name and path.parent.is_dir()):
        raise RecipeError(
            "no such directory", where=where, value=name, hint=_nearest_directory(path)
        )


def fetched_directory(name: str, revision: str | None = None) -> Path | None:
    """Fetch the weights of a Hub name into the cache, if necessary, and return their local directory.

    *revision* is a branch, tag or commit of a Hub name; None: the main branch. Returns None if they are not
    available as safetensors. If several ranks of a node fetch, they wait for each other.
    """
    if Path(name).expanduser().is_dir():
        return base_directory(name, revision)
    try:
        # If the files are not in the cache, they cannot be read in parts, and each rank would build
        # the complete model.
        index = _fetched(name, SAFE_WEIGHTS_INDEX_NAME, revision)
        if index is not None:
            get_files: Any = get_checkpoint_shard_files
            get_files(name, index, revision=revision)
        elif _fetched(name, SAFE_WEIGHTS_NAME, revision) is None:
            return None
    except (OSError, ValueError):
        return None
    return base_directory(name, revision)


def _fetched(name: str, file: str, revision: str | None) -> str | None:
    """The path of a *file* of a Hub name in the cache, fetched if necessary; None if the model has no such file."""
    return cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)


def _nearest_directory(path: Path) -> str:
    siblings = []
    if path.parent.is_dir():
        siblings = [sibling.name for sibling in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, siblings, n=1)
    hint = f"did you mean {path.parent / near[0]}? " if near else ""
    return f"{hint}use a directory with a config.json, or a model of the Hugging Face Hub"


def _read_config(
    name: str,
    where: str,
    overrides: Mapping[str, Any],
    repository: RepositoryOptions,
    auto_class: Any,
) -> PreTrainedConfig:
    require_local(name, where)
    check_revision(name, repository.revision)
    config, content = _config_of(name, where, repository)
    if overrides:
        merged = merged_config(content, config, overrides)
        try:
            changed = type(config).from_dict(merged)
        except (ValueError, TypeError, ZeroDivisionError, StrictDataclassError) as error:
            raise _rejected(config.model_type, "model.config_overrides", error) from error
        changed.name_or_path = config.name_or_path
        config = changed
    needs_code = config_needs_code(content) or model_needs_code(config, auto_class)
    references = content.get("auto_map")
    check_code(
        name, where, references, repository, is_needed=needs_code, kind=content.get("model_type")
    )
    return config


def _config_of(
    name: str, where: str, repository: RepositoryOptions
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The config of a directory or Hub name, and the content of its config.json."""
    path = os.path.expanduser(name)
    try:
        content, _ = PreTrainedConfig.get_config_dict(path, revision=repository.revision)
        needs_code = config_needs_code(content)
        if needs_code and not repository.runs_code:
            kind = content.get("model_type")
            check_code(name, where, None, repository, is_needed=True, kind=kind)
        with importing_code(needs_code):
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                path, trust_remote_code=needs_code, revision=repository.revision
            )
        return config, content
    except RecipeError:
        raise
    except Exception as error:  # transformers raises many classes for damaged files
        revision = repository.revision
        if known := explained(error, name, where) or damaged_config(name, where, revision):
            raise known from error
        raise RecipeError(
            "the model's configuration cannot be read",
            where=where,
            value=f"{name} ({first_line(error)})",
            hint="name a directory with a config.json; a Hub name needs the network or a filled cache, and for a "
            "model that asks for it a login (hf auth login)",
        ) from error


def _config_from_mapping(
    settings: dict[str, Any], tokenizer: Any, processor: Any, overrides: Mapping[str, Any]
) -> PreTrainedConfig:
    model_type = settings.pop("model_type", None)
    config_class = _config_class(model_type)
    try:
        default = config_class()
        settings = _completed(settings, default, tokenizer, processor)
        _check_known(settings, default)
        settings = merged_config(settings, default, overrides)
        return config_class(**copy.deepcopy(settings))
    except (ValueError, TypeError, ZeroDivisionError, StrictDataclassError) as error:
        raise _rejected(model_type, "model.from_config", error) from error


def _rejected(model_type: object, where: str, error: Exception) -> RecipeError:
    return RecipeError(
        f"transformers rejects this configuration of a {model_type} model",
        where=where,
        value=first_line(error, 3),
        hint="correct the value; the settings are those of the model type's config.json",
    )


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
    """Complete *settings* from the tokenizer and the processor; a model of several parts has a section for text."""
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
    """Raise :class:`RecipeError` for unknown settings.

    transformers would store them as attributes and build the model without them.
    """
    names = {*vars(default), *type(default).attribute_map}
    known = {name for name in names if not name.startswith("_")}
    problems = []
    for name, value in settings.items():
        if not hasattr(default, name):
            what = f"{default.model_type} models have no setting {name!r}"
            where = f"model.from_config.{name}"
            problems.append(Problem(what, where, value, did_you_mean(name, known)))
    if problems:
        raise RecipeError.all_of(problems)


def check_task(config: PreTrainedConfig, auto_class: Any) -> None:
    """Raise :class:`RecipeError` if the recipe's *auto_class* of transformers does not support the model."""
    # Private in transformers 5.17 to 5.23. Custom classes may have no mapping.
    mapping = getattr(auto_class, "_model_mapping", None)
    remote_classes = getattr(config, "auto_map", None) or {}
    if mapping is None or type(config) in mapping or auto_class.__name__ in remote_classes:
        _check_causality(config, auto_class)
        return
    architectures = getattr(config, "architectures", None) or ()
    listed = ", ".join(architectures) or "no class listed in its config"
    raise RecipeError(
        "this recipe does not support this kind of model",
        where="model",
        value=f"a {config.model_type} model ({listed}), which {auto_class.__name__} does not support",
        hint="name a causal language model, or for a vision-language model recipe: vlm_finetune; encoders and "
        "encoder-decoders need a recipe of your own",
    )


def _check_causality(config: PreTrainedConfig, auto_class: Any) -> None:
    """Raise :class:`RecipeError` for an encoder such as BERT, which sees the tokens that it would learn to predict."""
    setting = _setting_of_encoder(config.get_text_config())
    if auto_class is not AutoModelForCausalLM or setting is None:
        return
    name, value, causal = setting
    hint = "name a causal language model; recipe: sequence_classification and recipe: embedding train encoders"
    if causal:
        override = f"model.config_overrides: {{{name}: {causal}}}"
        hint += f"; or let tokens see only earlier ones with {override}"
    raise RecipeError(
        "this model is an encoder: each token sees the later ones, which it would learn to predict",
        where="model",
        value=f"a {config.model_type} model with {name}: {value}",
        hint=hint,
    )


def _setting_of_encoder(config: PreTrainedConfig) -> tuple[str, str, str] | None:
    """Return the setting that lets tokens see later ones, or None if the model is causal.

    The setting is its name, its value, and the value with which the model is causal. That one is empty if the model
    would differ in more than that.
    """
    # Some decoders have an is_decoder of False too, but no class for masked tokens. BertGeneration has none either.
    is_encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not config.is_encoder_decoder
    is_encoder = is_encoder or config.model_type == "bert-generation"
    if is_encoder and not getattr(config, "is_decoder", True):
        return "is_decoder", "false", "true"
    # XLM and FlauBERT.
    if is_encoder and not getattr(config, "causal", True):
        return "causal", "false", "true"
    # XLNet learns permutations of a sequence, with masks that a recipe does not have.
    if config.model_type == "xlnet" and config.attn_type == "bi":
        return "attn_type", "bi", "uni"
    # Gemma, as in EmbeddingGemma; "vision" concerns the tokens of an image only. Its config has already halved the
    # sliding window when overrides are applied.
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    if bidirectional in (True, "all"):
        return "use_bidirectional_attention", str(bidirectional).lower(), ""
    # transformers' masks follow it for any model.
    if getattr(config, "is_causal", True) is False:
        return "is_causal", "false", "true"
    return None


def check_attention(model: nn.Module, device: torch.device) -> None:
    """Raise :class:`RecipeError` if *device* does not support training with the model's attention implementation."""
    if device.type == "cpu" and attention_of(model) == "flex_attention":
        raise RecipeError(
            "torch's flex_attention has no backward pass on the CPU",
            where="model.attn_implementation",
            value="flex_attention",
            hint="set it to sdpa or eager, or train on a GPU",
        )


def check_context(config: PreTrainedConfig, seq_length: int, where: str) -> None:
    """Raise :class:`RecipeError` if samples of *seq_length* tokens are longer than the model's context."""
    limit = context_length(config)
    if limit is not None and seq_length > limit:
        raise RecipeError(
            "samples may be longer than the model's context",
            where=where,
            value=f"{seq_length} tokens; the model's max_position_embeddings is {limit}",
            hint=f"set it to {limit} or less, or use a model with a longer context",
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
    repository: RepositoryOptions = _MAIN_REVISION,
    not_in_model: Sequence[str] = (),
    allow_new_head: bool = False,
) -> nn.Module:
    """Build the model of *config* on the CPU, in training mode, with weights from files or from torch's generator.

    *auto_class* is the class of transformers that builds it. *dtype* is the name of a torch dtype, or ``auto``: that of
    the files or of the configuration. *config* is not changed. *allow_missing* and *allow_unexpected* are globs of
    weights that the files, or the model, may lack. *loading* are further arguments of ``from_pretrained``. *repository*
    is how the config was read. *not_in_model* are globs of weights in the files that
    transformers has no module for. With *allow_new_head*, the files may lack the head of a classification model, and
    may have another one.

    Raises :class:`RecipeError` if the weights cannot be read or do not match the model, or if transformers does not
    have such a model.
    """
    # Never None, with which transformers asks on the terminal whether to run the repository's code.
    options: dict[str, Any] = {"trust_remote_code": uses_code(config, auto_class, repository)}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    with _build_errors(from_pretrained, attn_implementation):
        if from_pretrained is None:
            options["dtype"] = fresh_dtype(config, dtype)
            # from_config changes the configuration that it is given.
            with importing_code(options["trust_remote_code"]):
                model: nn.Module = auto_class.from_config(copy.deepcopy(config), **options)
        else:
            options["dtype"] = "auto" if dtype == "auto" else getattr(torch, dtype)
            # transformers' own error would not name all tensors; differences are checked below.
            options["ignore_mismatched_sizes"] = True
            # The given one may have other settings than the file.
            options["config"] = copy.deepcopy(config)
            if repository.revision is not None:
                options["revision"] = repository.revision
            if not loading:
                options |= dequantized(config)
            model, differences = _read_model(
                auto_class, os.path.expanduser(from_pretrained), options | dict(loading or {})
            )
    if from_pretrained is not None:
        for pattern in not_in_model:
            others = set(fnmatch.filter(differences["unexpected"], pattern))
            differences["unexpected"] = set(differences["unexpected"]) - others
        if allow_new_head:
            missing, unexpected = differences["missing"], differences["unexpected"]
            heads = head_differences(model, missing=missing, unexpected=unexpected)
            differences["missing"] = set(missing) - set(heads.drawn)
            differences["unexpected"] = set(unexpected) - set(heads.ignored)
            heads.log(from_pretrained)
        verdict = Verdict.of_differences(
            **differences, allow_missing=allow_missing, allow_unexpected=allow_unexpected
        )
        verdict.check_allowed("model.from_pretrained", from_pretrained, "model")
        verdict.log_differences(f"{from_pretrained} and the model")
        if dtype != "auto" and not loading:
            cast_to(model, getattr(torch, dtype))
    # from_pretrained returns models in evaluation mode, without dropout.
    return model.train()


@contextmanager
def _build_errors(from_pretrained: str | None, attn_implementation: str | None) -> Iterator[None]:
    """Raise :class:`RecipeError` for errors of transformers and safetensors: damaged files, or a model they lack."""
    try:
        yield
    except (SafetensorError, pickle.UnpicklingError, EOFError) as error:
        raise RecipeError(
            "a file of the model's weights is damaged",
            where=_damaged_file(os.path.expanduser(str(from_pretrained))),
            value=first_line(error),
            hint="download or copy it again, and compare its size with the original",
        ) from error
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        if known := explained(error, from_pretrained or "", "model.from_pretrained"):
            raise known from error
        hint = "correct the model section; weights are read from *.safetensors beside config.json"
        if isinstance(error, ImportError) and attn_implementation is None:
            hint = (
                "install the named package; or use a base that is not quantized, if quantized files need it "
                "(peft.quantize_base quantizes a base while it is read)"
            )
        if attn_implementation is not None and "flash" in str(error).lower():
            hint = "install what it needs, or set model.attn_implementation to sdpa or eager, or leave it out"
        elif attn_implementation is not None and "attention implementation" in str(error).lower():
            hint = "leave model.attn_implementation out: transformers then chooses one that the model supports"
        value = first_line(error, 3)
        raise RecipeError(
            "the model cannot be built", where="model", value=value, hint=hint
        ) from error


def uses_code(config: PreTrainedConfig, auto_class: Any, repository: RepositoryOptions) -> bool:
    """Whether *auto_class* may import the class of the model from its repository, because transformers has none."""
    return repository.runs_code and model_needs_code(config, auto_class)


def _damaged_file(name: str) -> str:
    """The first file of weights whose header cannot be read; *name* if all headers can be read."""
    for file in sorted((base_directory(name) or Path(name)).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return str(file)
    return name


def fresh_dtype(config: PreTrainedConfig, dtype: str) -> torch.dtype:
    """The dtype of a model with fresh weights: the one named *dtype*; for ``auto``, that of the configuration."""
    if dtype != "auto":
        return getattr(torch, dtype)  # type: ignore[no-any-return]
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def _read_model(
    auto_class: Any, name: str, options: Mapping[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """Read the model, and return it with the arguments of :meth:`Verdict.of_differences`."""
    with _quiet(*_NOISY), _bars_on_terminals_only():
        model, info = auto_class.from_pretrained(name, output_loading_info=True, **options)
    misshapen = {fqn: (tuple(there), tuple(here)) for fqn, there, here in info["mismatched_keys"]}
    missing = set(info["missing_keys"]) - misshapen.keys()
    return model, {
        "missing": missing,
        "unexpected": info["unexpected_keys"],
        "misshapen": misshapen,
    }


_NOISY = (
    # A table of differences, which are reported by name later.
    "transformers.modeling_utils",
    # Layers that its own tensor parallelism would not shard; the second name is that of versions before 5.23.
    "transformers.distributed.tensor_parallel",
    "transformers.integrations.tensor_parallel",
)


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Hide the progress bars of transformers if standard error is not a terminal: a file would get each state."""
    library: Any = transformers.utils.logging
    if sys.stderr.isatty() or not library.is_progress_bar_enabled():
        yield
        return
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.enable_progress_bar()


def freeze(model: nn.Module, patterns: Sequence[str], if_present: Sequence[str] = ()) -> int:
    """Exclude from training the parameters whose names match a glob. Returns the number of trainable elements.

    The parts of a vision-language model are also patterns: ``vision_tower``, ``projector``, ``language_model``. Raises
    :class:`RecipeError` for *patterns* without a match, and if no parameter is left to train. The patterns
    *if_present* may match nothing, which is logged.
    """
    # With duplicates, because a pattern may match only the second name of a tied parameter.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parts = [part for part in PARTS if parameters_of(part, parameters)]
    frozen: set[str] = set()
    problems = []
    for pattern in (*patterns, *if_present):
        names = fnmatch.filter(parameters, pattern)
        if pattern in PARTS:
            names = parameters_of(pattern, parameters)
        frozen.update(names)
        if not names and pattern not in patterns:
            log.info("model.freeze_if_present: the model has no parameters %s", pattern)
        elif not names:
            hint = did_you_mean(pattern, {*parameters, *parts})
            problems.append(Problem("no parameter's name matches", "model.freeze", pattern, hint))
    if problems:
        raise RecipeError.all_of(problems)
    for name in frozen:
        parameters[name].requires_grad_(False)
    num_trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if num_trainable == 0:
        raise RecipeError(
            "no parameter is left to train",
            where="model.freeze",
            value=[*patterns, *if_present],
            hint="freeze fewer parameters",
        )
    return num_trainable


def check_complete(model: object) -> None:
    """Raise :class:`RecipeError` if *model* is not a module, or has lazy tensors or tensors on the meta device."""
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
    """Raise :class:`RecipeError` for trainable parameters in float16."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    short = [name for name, p in trained if p.dtype == torch.float16]
    if short:
        raise RecipeError(
            "float16 training requires a loss scaler (small gradients underflow), which is not supported",
            where="model.dtype",
            value=f"{len(short)} trainable parameters in float16, the first {short[0]}",
            hint="set it to bfloat16, which has float32's range, or to float32; adapters on a base in float16 are "
            "trained in peft.dtype float32",
        )


def did_you_mean(name: str, known: set[str]) -> str:
    """A hint with the known names that are similar to *name*, or else with a few known names."""
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"there are, for example, {', '.join(sorted(known)[:5])}"


def first_line(error: BaseException, num_lines: int = 1) -> str:
    """The first lines of an exception's message, at most 400 characters; its class if the message is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = textwrap.shorten(" ".join(lines[:num_lines]), 400, placeholder=" ...")
    return text or type(error).__name__
