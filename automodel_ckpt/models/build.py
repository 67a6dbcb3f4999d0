"""Build a model from a configuration, with weights from files or from torch's random generator."""

from __future__ import annotations

import copy
import fnmatch
import logging
import os
import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from automodel_ckpt.base.hub_access import explained
from automodel_ckpt.base.other_weights import LFS_HINT
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.interface import first_line
from automodel_ckpt.models.inspect.repository import (
    RepositoryOptions,
    base_directory,
    importing_code,
    lfs_pointer,
    model_needs_code,
    quiet,
)
from automodel_ckpt.models.model_checks import note_untied
from automodel_ckpt.models.weight_matching import Verdict

log = logging.getLogger("automodel_ckpt")

_MAIN_REVISION = RepositoryOptions()
_NOISY = (
    # A table of differences, which are reported by name later.
    "transformers.modeling_utils",
    # Layers that its own tensor parallelism would not shard; versions before 5.23 have the second name.
    "transformers.distributed.tensor_parallel",
    "transformers.integrations.tensor_parallel",
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
    loading: Values | None = None,
    repository: RepositoryOptions = _MAIN_REVISION,
    not_in_model: Sequence[str] = (),
    allow_new_head: bool = False,
) -> nn.Module:
    """Build the model of *config* on the CPU, in training mode, with weights from files or from torch's generator.

    *auto_class* is the class of transformers that builds it. *dtype* is the name of a torch dtype, or ``auto``: the
    dtype of the files or of the configuration. *config* is not changed. *allow_missing* are globs of weights that the
    files may lack, *allow_unexpected* of weights that the model may lack, *not_in_model* of weights in the files that
    transformers has no module for. *loading* are further arguments of ``from_pretrained``. *repository* is how the
    config was read. With *allow_new_head*, the files may lack the head of a classification model, and may have another
    one.

    Raises :class:`RecipeError` if the weights cannot be read or do not match the model, or if transformers does not
    have such a model.
    """
    # Never None, with which transformers asks on the terminal whether to run the repository's code.
    options: ValueDict = {"trust_remote_code": uses_code(config, auto_class, repository)}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    # transformers changes the configuration that it is given.
    chosen = with_attention_caps(config)
    from automodel_ckpt.models.quantize import cast_to, dequantized

    with build_errors(from_pretrained):
        if from_pretrained is None:
            options["dtype"] = fresh_dtype(config, dtype)
            with importing_code(options["trust_remote_code"]):
                model: PreTrainedModel = auto_class.from_config(chosen, **options)
        else:
            options["dtype"] = "auto" if dtype == "auto" else getattr(torch, dtype)
            # transformers' own error would not name all tensors; differences are checked below.
            options["ignore_mismatched_sizes"] = True
            # The given one may have other settings than the file.
            options["config"] = chosen
            if repository.revision is not None:
                options["revision"] = repository.revision
            if not loading:
                options |= dequantized(chosen)
            model, differences = _read_model(
                auto_class, os.path.expanduser(from_pretrained), options | dict(loading or {})
            )
    if from_pretrained is not None:
        for pattern in not_in_model:
            others = set(fnmatch.filter(differences["unexpected"], pattern))
            differences["unexpected"] = set(differences["unexpected"]) - others
        if allow_new_head:
            missing, unexpected = differences["missing"], differences["unexpected"]
            from automodel_ckpt.models.task_head import head_differences

            heads = head_differences(model, missing=missing, unexpected=unexpected)
            differences["missing"] = set(missing) - set(heads.drawn)
            differences["unexpected"] = set(unexpected) - set(heads.ignored)
            heads.log(from_pretrained)
        verdict = Verdict.of_differences(
            **differences, allow_missing=allow_missing, allow_unexpected=allow_unexpected
        )
        verdict.check_allowed("model.from_pretrained", from_pretrained, "model")
        verdict.log_differences(f"{from_pretrained} and the model")
        note_untied(model, from_pretrained)
        if not loading and getattr(config, "quantization_config", None) is not None:
            wanted = getattr(torch, dtype, None) or model.config.dtype
            # model.dtype is the first parameter's, which may be one that stays in float32.
            cast_to(model, wanted if isinstance(wanted, torch.dtype) else model.dtype)
    # from_pretrained returns models in evaluation mode, without dropout.
    model.train()
    return model


def with_attention_caps(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of *config*, with a model that caps its attention scores where *config* has a cap.

    Models and parts of models with a cap (Gemma 2) get eager attention, unless *config* names another implementation
    than ``sdpa``: torch's ``scaled_dot_product_attention`` has no cap. transformers 5.17 chooses it for these models,
    and computes other outputs than those with which they were trained; 5.23 does so for T5Gemma 2. An argument
    ``attn_implementation`` of transformers replaces what the copy names.
    """
    chosen = copy.deepcopy(config)
    _cap_attention(chosen)
    return chosen


def restore_attention_caps(model: nn.Module) -> None:
    """Give each transformers model in *model* that has a cap of its attention scores an attention that applies it.

    For models that are built without :func:`with_attention_caps`: by the user's code, or by ``from_pretrained`` as a
    target. The layers read their attention from the config in each forward pass. It is logged which model changes,
    and which has its attention in the classes of its layers, so that it cannot be changed.
    """
    seen: set[int] = set()
    for part in model.modules():
        config = getattr(part, "config", None)
        if not isinstance(part, PreTrainedModel) or not isinstance(config, PreTrainedConfig):
            continue
        # A model and its backbone have the same config.
        if id(config) in seen or not _lacks_cap(config):
            continue
        seen.add(id(config))
        outcome = "build it with attn_implementation: eager"
        if part._can_set_attn_implementation():
            config._attn_implementation_internal = "eager"
            outcome = "it gets eager attention"
        log.warning(
            "%s caps its attention scores at %s, and sdpa has no cap: %s",
            type(part).__name__,
            config.attn_logit_softcapping,
            outcome,
        )


def _lacks_cap(config: PreTrainedConfig) -> bool:
    """Whether *config* has a cap of the attention scores, and no other attention than torch's, which has none."""
    has_cap = getattr(config, "attn_logit_softcapping", None) is not None
    return has_cap and getattr(config, "_attn_implementation", None) in (None, "sdpa")


def _cap_attention(config: PreTrainedConfig) -> None:
    if _lacks_cap(config):
        # The property would also change the parts.
        config._attn_implementation_internal = "eager"
    for name in getattr(config, "sub_configs", None) or ():
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            _cap_attention(part)


@contextmanager
def build_errors(from_pretrained: str | None) -> Iterator[None]:
    """Raise :class:`RecipeError` for errors of transformers and safetensors: damaged files, or a model they lack."""
    name = os.path.expanduser(str(from_pretrained))
    try:
        yield
    except (SafetensorError, pickle.UnpicklingError, EOFError) as error:
        pointer = lfs_pointer(name, "*.safetensors", "*.bin")
        hint = "download or copy it again, and compare its size with the original"
        raise RecipeError(
            "a file of the model's weights is damaged",
            where=pointer or _damaged_file(name),
            value=first_line(error),
            hint=hint if pointer is None else LFS_HINT,
        ) from error
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        if known := explained(error, from_pretrained or "", "model.from_pretrained"):
            raise known from error
        hint = "correct the model section; weights are read from *.safetensors beside config.json"
        if re.search("(?i)flash|att(n|ention).implementation", str(error)):
            hint = (
                "set model.attn_implementation to sdpa or eager, or leave it out: transformers then chooses one that "
                "the model supports"
            )
        elif isinstance(error, ImportError):
            hint = (
                "install the named package; or use a base that is not quantized, if quantized files need it "
                "(peft.quantize_base quantizes a base while it is read)"
            )
        raise RecipeError(
            "the model cannot be built", where="model", value=first_line(error, 3), hint=hint
        ) from error


def uses_code(config: PreTrainedConfig, auto_class: Any, repository: RepositoryOptions) -> bool:
    """Whether *auto_class* may import the class of the model from its repository, because transformers has none."""
    return repository.runs_code and model_needs_code(config, auto_class)


def _damaged_file(name: str) -> str:
    """The first file of weights with a header that cannot be read; *name* if all headers can be read."""
    for file in sorted((base_directory(name) or Path(name)).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return str(file)
    return name


def fresh_dtype(config: PreTrainedConfig, dtype: str) -> torch.dtype:
    """The dtype of a model with fresh weights: the one named *dtype*; for ``auto``, the configuration's."""
    if dtype != "auto":
        return getattr(torch, dtype)  # type: ignore[no-any-return]
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def _read_model(auto_class: Any, name: str, options: Values) -> tuple[PreTrainedModel, ValueDict]:
    """Read the model, and return it with the arguments of :meth:`Verdict.of_differences`."""
    with quiet(*_NOISY):
        model, info = auto_class.from_pretrained(name, output_loading_info=True, **options)
    misshapen = {fqn: (tuple(there), tuple(here)) for fqn, there, here in info["mismatched_keys"]}
    missing = set(info["missing_keys"]) - misshapen.keys()
    return model, {
        "missing": missing,
        "unexpected": info["unexpected_keys"],
        "misshapen": misshapen,
    }
