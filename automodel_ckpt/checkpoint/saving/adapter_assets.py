"""The side files of an adapter: those that peft reads, a description of the adapter, and the tokenizer's files.

``adapter_config.json`` is peft's own. ``automodel_peft_config.json`` contains the recipe's ``peft`` section, the layers
that it selected, and the base's identity (``export/base_identity.py``), which prevents a resume on another base.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from automodel_ckpt.base.store_url import cache_directory
from automodel_ckpt.checkpoint.export.base_identity import (
    FORMAT_VERSION,
    BaseIdentity,
    identify_base,
    read_peft_record,
)
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Files, Values
from automodel_ckpt.checkpoint.sources.model_files import tokenizer_files
from automodel_ckpt.checkpoint.sources.source import EXPECTED_TENSORS, BaseMaps
from automodel_ckpt.checkpoint.state.module_tensors import TensorSpec, is_adapted, tensor_specs
from automodel_ckpt.errors import RecipeError, unusable

# Settings that decide which function an adapter computes. Others affect only training, or the shapes of tensors.
_BINDING = (
    "r",
    "alpha",
    "ranks",
    "alphas",
    "use_dora",
    "use_rslora",
    "targets",
    "parameters",
    "saved",
)
_NEW_SETTINGS: Values = {"parameters": [], "ranks": {}, "alphas": {}}
"""The values of settings that checkpoints of earlier versions do not have."""


class AdapterAssets:
    """The side files of an adapter's weights.

    *peft_config* is the content of adapter_config.json without the base's name, *description* the recipe's settings,
    *tensors* the tensors of the adapter file by peft's keys, *base* the identity of the base (None on ranks that write
    nothing), *tokenizer* a tokenizer or processor, *base_dir* the directory of the base's files. *further* are other
    files, by relative path, such as the model's config where it is not the base's.
    """

    def __init__(
        self,
        peft_config: Values,
        description: Values,
        *,
        tensors: Mapping[str, TensorSpec],
        base: BaseIdentity | None = None,
        tokenizer: Any = None,
        base_dir: Path | str | None = None,
        further: Files | None = None,
    ) -> None:
        self._further = dict(further or {})
        self._peft_config, self._description = dict(peft_config), dict(description)
        self._tensors, self._base = dict(tensors), base
        self._tokenizer_files = tokenizer_files(tokenizer, base_dir)

    @classmethod
    def from_model(
        cls,
        model: Any,
        *,
        tokenizer: Any = None,
        base_dir: Path | str | None = None,
        run: Path | str | None = None,
        rank: int | None = None,
    ) -> AdapterAssets:
        """The side files of a ``PeftModel``, as a recipe with a section ``peft`` writes them.

        Args:
            model: The model with one adapter that is active or trained. Frozen ones, such as a reference, are left out.
            tokenizer: A tokenizer or processor. None: none.
            base_dir: The directory of the base's files. None: the one that the model was loaded from.
            run: The run directory, from which a base that was moved with it is found.
            rank: The rank among those that save. None: the one among all.

        Raises:
            RecipeError: for several adapters that train, for those that are no weights of layers, and for a base
                without files, on which nothing could load the adapter.
        """
        (adapter, *others) = model.active_adapters
        config = model.peft_config[adapter]
        for name, parameter in model.named_parameters():
            parts = {*name.split(".")} & (model.peft_config.keys() - {adapter})
            others += parts if parameter.requires_grad else ()
        if others:
            names = ", ".join(model.peft_config)
            raise _not_exportable("several of its adapters train", names, "freeze all but one")
        if config.is_prompt_learning or config.peft_type == "ADALORA":
            value, hint = type(config).__name__, "use LoRA, or another method that adapts layers"
            raise _not_exportable("its tensors depend on more than its layers", value, hint)
        if not is_exportable(model):
            value = type(model.get_base_model()).__name__
            raise _not_exportable(
                "its base is no model of transformers", value, "save it without assets"
            )
        base = str(base_dir or config.base_model_name_or_path or model.config.name_or_path)
        directory = _directory_of(base, config.revision)
        if directory is None:
            hint = (
                "save the base with save_pretrained, and load it from there before get_peft_model"
            )
            raise _not_exportable("its base has no files", base or "a base without a name", hint)
        # As in save_pretrained: the rows of new tokens are nowhere else.
        of_base = type(model.config).from_pretrained(directory).get_text_config()
        if of_base.vocab_size != model.config.get_text_config().vocab_size:
            model.save_embedding_layers = True
        if rank is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
        return cls(
            peft_document(config),
            _description(model, adapter, config),
            tensors=tensor_specs(model),
            base=identify_base(base, directory, run=run, cache=cache_directory())
            if rank == 0
            else None,
            tokenizer=tokenizer,
            base_dir=directory,
        )

    @property
    def file_index_mapping(self) -> Mapping[str, int]:
        """An adapter is one file."""
        return dict.fromkeys(self._tensors, 1)

    @property
    def maps(self) -> BaseMaps:
        """The tensors of the adapter, in the format that an export reads."""
        return BaseMaps(
            shape={key: spec.shape for key, spec in self._tensors.items()}, is_adapter=True
        )

    @functools.cached_property
    def files(self) -> Files:
        """The side files by name: the files next to adapter_model.safetensors, and the expected tensors of an export.

        Computed only on rank 0.
        """
        assert self._base is not None
        expected = {key: {"shape": list(spec.shape)} for key, spec in self._tensors.items()}
        peft_config = self._peft_config | {"base_model_name_or_path": self._base.name}
        description = {
            "format": "automodel_ckpt.peft",
            "format_version": FORMAT_VERSION,
            "base": self._base.to_dict(),
            "adapter": self._description,
        }
        return {
            **self._tokenizer_files,
            **self._further,
            layout.ADAPTER_CONFIG: _json(peft_config, sort_keys=True),
            layout.AUTOMODEL_PEFT_CONFIG: _json(description),
            EXPECTED_TENSORS: _json(expected),
        }

    @property
    def nbytes(self) -> int:
        """Approximate bytes of the side files; available also where the base was not read."""
        records = (_json(self._peft_config), _json(self._description))
        files = (*self._tokenizer_files.values(), *self._further.values(), *records)
        return sum(map(len, files))

    def check_base(self, checkpoint: Path, directory: str) -> None:
        """Check on rank 0 that the adapters in *directory* of *checkpoint* belong to this base and configuration.

        Raises :class:`CheckpointUnusable` where the base or a setting that changes the function differs.
        """
        if self._base is None:
            return
        recorded = read_peft_record(checkpoint, directory)
        base, where = recorded["base"], str(checkpoint / directory)
        if base.get("digest") != self._base.digest:
            moved = base.get("relative_to_run")
            raise unusable(
                "the adapters of this checkpoint were trained on another base model",
                where,
                f"saved with {base.get('name')}, now {self._base.name}; the files differ",
                "set model.from_pretrained to the base they were trained on"
                + (f" (relative to the run it was {moved})" if moved else "")
                + "; or start a new run in another checkpoint.checkpoint_dir",
            )
        # Through JSON, as the saved settings: tuples are lists there.
        saved, here = recorded["adapter"], json.loads(_json(self._description))
        lines = []
        for key in _BINDING:
            before = saved.get(key, _NEW_SETTINGS.get(key))
            if before != here[key]:
                lines.append(f"{key}: saved {before}, here {here[key]}")
        if lines:
            raise unusable(
                "the checkpoint's adapters do not match this run",
                where,
                "\n    " + "\n    ".join(lines),
                "resume with the peft section that wrote it (its config.yaml is in the checkpoint), "
                "or start a new run in another checkpoint.checkpoint_dir",
            )


_OLD_OPTIONS = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "task_type",
        "use_dora",
        "use_rslora",
    }
)
"""The options of LoRA that peft had in early 2024."""


def peft_document(peft_config: Any) -> dict[str, Any]:
    """Return the fields of adapter_config.json as ``save_pretrained`` writes them, in a reproducible order.

    Options that peft got later, and the adapter does not use, are left out: earlier versions reject a file with them.
    """
    fields: dict[str, Any] = peft_config.to_dict()
    unused = type(peft_config)().to_dict()
    for key in fields.keys() - _OLD_OPTIONS:
        if fields[key] == unused.get(key):
            del fields[key]
    for key, value in fields.items():
        if isinstance(value, set):
            # The order of a set of strings differs between processes (PYTHONHASHSEED).
            fields[key] = sorted(value)
    # save_pretrained writes true also after training, so that a loaded adapter is frozen.
    fields["inference_mode"] = True
    return fields


def is_exportable(model: object) -> bool:
    """Return whether *model* is a ``PeftModel`` of a transformers model: peft loads adapters of no other from files."""
    if not is_adapted(model):
        return False
    from transformers import PreTrainedModel

    return isinstance(model.get_base_model(), PreTrainedModel)


def _not_exportable(why: str, value: str, hint: str) -> RecipeError:
    return RecipeError(
        f"the adapter of a PeftModel cannot be exported: {why}",
        where="model",
        value=value,
        hint=hint,
    )


def _directory_of(base: str, revision: str | None) -> Path | None:
    """Return the directory of a base: a path, or a downloaded name on the Hub. Returns None when there is none."""
    if not base or Path(base).is_dir():
        return Path(base) if base else None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(base, revision=revision, local_files_only=True))
    except (ValueError, OSError):
        return None


def _description(model: Any, adapter: str, config: Any) -> dict[str, Any]:
    """Return the settings of an adapter by which a resume recognizes it."""
    found: dict[str, Any] = {"alpha": getattr(config, "lora_alpha", None)}
    for name in ("r", "use_dora", "use_rslora"):
        found[name] = getattr(config, name, None)
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if adapter in getattr(module, "lora_alpha", ())
    }
    found["targets"] = list(layers)
    found["ranks"] = {name: layer.r[adapter] for name, layer in layers.items()}
    found["alphas"] = {name: layer.lora_alpha[adapter] for name, layer in layers.items()}
    # Sorted: the order of a set of text differs between processes.
    found["parameters"] = sorted(getattr(config, "target_parameters", None) or ())
    found["saved"] = sorted(getattr(config, "modules_to_save", None) or ())
    return found


def _json(value: Values, *, sort_keys: bool = False) -> bytes:
    return json.dumps(value, indent=2, sort_keys=sort_keys).encode() + b"\n"
