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

from automodel_ckpt.checkpoint.export.adapter_record import FORMAT_VERSION, read_peft_record
from automodel_ckpt.checkpoint.export.base_identity import BaseIdentity
from automodel_ckpt.checkpoint.export.hf_assets import TensorSpec, tokenizer_files
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Files, Values
from automodel_ckpt.checkpoint.sources.base_maps import EXPECTED_TENSORS, BaseMaps
from automodel_ckpt.errors import unusable

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
        """The side files by name: those beside adapter_model.safetensors, and the expected tensors of an export.

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


def _json(value: Values, *, sort_keys: bool = False) -> bytes:
    return json.dumps(value, indent=2, sort_keys=sort_keys).encode() + b"\n"
