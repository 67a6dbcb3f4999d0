"""The side files of an export, stored in each checkpoint so that it can be exported without the base model.

``.hf_metadata/`` holds config.json, the generation config, the tokenizer's or processor's files and custom code (the
base's own bytes where there is a base and nothing was changed), the base's maps under their usual names
(``fqn_to_file_index_mapping.json``, ``fqn_to_dtype_mapping.json``: safetensors codes), and ``expected_tensors.json``:
the name and shape of every tensor that an export must contain.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import tempfile
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.export.older_config import with_older_keys
from automodel_ckpt.checkpoint.export.plan import MAX_FILE_BYTES
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import TORCH_NAMES, dtype_code, main_dtype
from automodel_ckpt.checkpoint.files.safetensors_header import TensorEntry, read_header
from automodel_ckpt.checkpoint.files.weight_map import read_weight_map
from automodel_ckpt.checkpoint.parts.slices import nbytes_of
from automodel_ckpt.checkpoint.sources.base_maps import (
    DTYPE_MAP,
    EXPECTED_TENSORS,
    FILE_INDEX_MAP,
    BaseMaps,
)
from automodel_ckpt.checkpoint.sources.model_files import (
    CODE_FILES,
    GENERATION_CONFIG,
    MODEL_FILES,
    TOKENIZER_FILES,
    read_files,
    save_preprocessor,
)
from automodel_ckpt.errors import CheckpointUnusable, RecipeError

log = logging.getLogger("automodel_ckpt")
_TOKENIZER_CONFIG = "tokenizer_config.json"
_NUM_SHOWN = 5
"""How many names of tensors a line of the log shows."""


class TensorSpec(NamedTuple):
    """A tensor of the model: safetensors dtype code and global shape."""

    dtype: str
    shape: tuple[int, ...]


def tensor_specs(model: Any) -> dict[str, TensorSpec]:
    """The tensors that a checkpoint stores of a *model*, sharded or not, by FQN."""
    from torch import Tensor

    from automodel_ckpt.checkpoint.state.module_tensors import complete_state

    state, _ = complete_state(model)
    specs: dict[str, TensorSpec] = {}
    for fqn, value in state.items():
        if isinstance(value, Tensor):
            specs[fqn] = TensorSpec(dtype_code(str(value.dtype)), tuple(value.shape))
    return specs


class HFAssets:
    """What an export needs beside the weights.

    *config* and *generation_config* are transformers' objects, *tokenizer* a tokenizer or processor (None: none).
    *base_dir* is the local directory that the model was loaded from. *tensors* are those that the model stores; *tied*
    maps each other name to the stored one it shares its memory with. *code_dir* has the Python files that define the
    model's class, if transformers does not define it. *prefix* is that of the backbone's tensors, which the names of
    the base can lack, or have in excess. *declared* are names, or globs over them, of
    tensors that differ from the base's intentionally: new, resized or omitted. *further* are other files, by relative
    path, that take precedence over those of the base. *float32_in* has the names of tensors that the model keeps in
    float32 if the others are cast to a dtype (by its safetensors code).
    """

    def __init__(
        self,
        config: Any,
        *,
        generation_config: Any = None,
        tokenizer: Any = None,
        base_dir: Path | str | None = None,
        code_dir: Path | None = None,
        architecture: str | None = None,
        prefix: str = "",
        tensors: Mapping[str, TensorSpec] | None = None,
        tied: Mapping[str, str] | None = None,
        declared: Iterable[str] = (),
        further: Mapping[str, bytes] | None = None,
        float32_in: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._further = dict(further or {})
        self._float32_in = dict(float32_in or {})
        self._config, self._generation_config = config, generation_config
        self._tokenizer = tokenizer
        self._base_dir = Path(base_dir) if base_dir is not None else None
        self._code_dir = code_dir
        self._architecture = architecture
        self._prefix = prefix
        self._tensors = dict(tensors or {})
        self._tied = dict(tied or {})
        self._declared = tuple(declared)

    @classmethod
    def from_model(
        cls,
        model: Any,
        *,
        tokenizer: Any = None,
        base_dir: Path | str | None = None,
        code_dir: Path | None = None,
        declared: Iterable[str] = (),
        further: Mapping[str, bytes] | None = None,
        float32_in: Mapping[str, Collection[str]] | None = None,
    ) -> HFAssets:
        """The assets of a transformers model, sharded or not; *base_dir* None: not from a local directory.

        *code_dir* has the Python files of a class that transformers does not define. The names in *float32_in* are
        those in memory.
        """
        from automodel_ckpt.checkpoint.state.module_tensors import (
            complete_state,
            stored_layout,
            unwrap,
        )

        inner: Any = unwrap(model)
        _, tied = complete_state(inner)
        names = stored_layout(inner)
        kept: dict[str, set[str]] = {}
        for code, fqns in (float32_in or {}).items():
            for fqn in fqns:
                kept.setdefault(code, set()).update((names.name_of(fqn), *names.rows.get(fqn, ())))
        generation_config = None
        if inner.can_generate():
            generation_config = getattr(inner, "generation_config", None)
        return cls(
            inner.config,
            generation_config=generation_config,
            tokenizer=tokenizer,
            base_dir=base_dir,
            code_dir=code_dir,
            # fully_shard puts a subclass with this prefix in the place of the model's class.
            architecture=type(inner).__name__.removeprefix("FSDP"),
            prefix=inner.base_model_prefix,
            tensors=tensor_specs(inner),
            tied=tied,
            declared=declared,
            further=further,
            float32_in=kept,
        )

    def validate(self) -> None:
        """Create every side file once, in memory.

        Raises :class:`RecipeError` where one cannot be created, which would otherwise fail at the first save.
        """
        try:
            _ = self._files
        except (ValueError, OSError) as error:
            raise RecipeError(
                "the side files of an export cannot be created (config, generation config or tokenizer)",
                where=str(self._base_dir or "the model of this recipe"),
                value=str(error).strip(),
                hint="fix the model's generation config or its tokenizer",
            ) from error

    @functools.cached_property
    def file_index_mapping(self) -> Mapping[str, int]:
        """For each tensor the number (from 1) of its file in an export: as in the base, else 5 GB a file at most."""
        if not self._base_files:
            return _split_by_size(self._exported)
        names = sorted(set(self._base_files.values()))
        numbers = {name: number for number, name in enumerate(names, start=1)}
        mapping: dict[str, int] = {}
        for fqn in self._exported:
            # Tensors that the base does not have go to its last file.
            mapping[fqn] = numbers.get(self._base_files.get(fqn, ""), len(numbers))
        return mapping

    @property
    def maps(self) -> BaseMaps:
        """The content of the maps among the side files, in the format that an export reads."""
        config = json.loads(self._files["config.json"])
        is_tied = bool(config.get("tie_word_embeddings", False))
        dtypes = {fqn: entry.dtype for fqn, entry in self._base_tensors.items()}
        if not self._tensors:
            return BaseMaps(None, dtypes or None, None, is_tied)
        shapes = {fqn: spec.shape for fqn, spec in self._exported.items()}
        float32_in = {fqn: codes for fqn in self._exported if (codes := self._float32_of(fqn))}
        return BaseMaps(
            dict(self.file_index_mapping), dtypes or None, shapes, is_tied, float32_in=float32_in
        )

    @property
    def files(self) -> Mapping[str, bytes]:
        """All side files, by name: an export's own, and the base's maps."""
        return self._files

    @property
    def nbytes(self) -> int:
        """Bytes of the side files."""
        return sum(map(len, self._files.values()))

    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's or processor's files: its own bytes where it was read from files and is unchanged."""
        if self._tokenizer is None:
            return {}
        if files := self._unchanged_tokenizer_files():
            return files
        with tempfile.TemporaryDirectory(prefix="automodel_ckpt-") as directory:
            save_preprocessor(self._tokenizer, Path(directory))
            return read_files(Path(directory), ("*", "additional_chat_templates/*"))

    @functools.cached_property
    def _files(self) -> dict[str, bytes]:
        # The base's own bytes take precedence, except for config.json, which describes this model.
        files = self._generated() | self._copied() | self._further
        files["config.json"] = self.config_json()
        if self._tensors:
            files[FILE_INDEX_MAP] = _json_bytes(self.file_index_mapping)
            expected = {fqn: self._expected(fqn) for fqn in self._exported}
            files[EXPECTED_TENSORS] = _json_bytes(expected)
        if self._base_tensors:
            dtypes = {fqn: entry.dtype for fqn, entry in sorted(self._base_tensors.items())}
            files[DTYPE_MAP] = _json_bytes(dtypes)
            self._log_differences()
        return files

    def config_json(self) -> bytes:
        """The content of config.json, with the class of the model and the dtype of its weights.

        It also has the keys that programs before transformers 5 read.
        """
        # The model still uses its config, which must not change.
        config = copy.deepcopy(self._config)
        if self._architecture is not None:
            config.architectures = [self._architecture]
        if getattr(config, "dtype", None) is None:
            sizes = [(spec.dtype, nbytes_of(*spec)) for spec in self._tensors.values()]
            code = main_dtype(sizes)
            if code is not None:
                config.dtype = TORCH_NAMES[code]
        references = getattr(config, "auto_map", None)
        if isinstance(references, Mapping):
            config.auto_map = _local_references(references, self._copied())
        content = with_older_keys(json.loads(config.to_json_string()))
        return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()

    def _generated(self) -> dict[str, bytes]:
        """The generation config as transformers writes it, where the base has none, and the tokenizer's files."""
        with tempfile.TemporaryDirectory(prefix="automodel_ckpt-") as directory:
            if self._generation_config is not None and GENERATION_CONFIG not in self._copied():
                self._generation_config.save_pretrained(directory)
            return read_files(Path(directory), ("*",)) | self.tokenizer_files()

    def _copied(self) -> dict[str, bytes]:
        """The base's own files, unchanged, and the code of the model's class; empty without both."""
        files: dict[str, bytes] = {}
        if self._code_dir is not None:
            files |= read_files(self._code_dir, CODE_FILES)
        if self._base_dir is not None:
            names = list(MODEL_FILES)
            if self._generation_config is not None:
                names.append(GENERATION_CONFIG)
            files |= read_files(self._base_dir, names)
        return files

    def _unchanged_tokenizer_files(self) -> dict[str, bytes]:
        """The files that the tokenizer was read from, with its chat template; empty if it has changed otherwise."""
        name = getattr(_tokenizer_of(self._tokenizer), "name_or_path", "")
        origin = Path(name) if name and Path(name).is_dir() else self._base_dir
        files = read_files(origin, _files_of(self._tokenizer)) if origin is not None else {}
        if origin is None or not files:
            return {}
        before = _read_unchanged(self._tokenizer, origin)
        if before is None or before.chat_template == self._tokenizer.chat_template:
            return files if before is not None else {}
        return _with_template(files, self._tokenizer.chat_template)

    @functools.cached_property
    def _exported(self) -> dict[str, TensorSpec]:
        """The tensors of an export. Tied tensors have the names that the base has, otherwise the stored one."""
        groups: dict[str, list[str]] = {fqn: [fqn] for fqn in self._tensors}
        for alias, stored_name in self._tied.items():
            groups[stored_name].append(alias)
        exported: dict[str, TensorSpec] = {}
        for stored_name, names in groups.items():
            in_base = [name for name in names if name in self._base_tensors]
            for name in in_base or [stored_name]:
                exported[name] = self._tensors[stored_name]
        return exported

    @functools.cached_property
    def _base_names(self) -> dict[str, str]:
        """{name in the base: name in exports}, which have or lack the prefix of the backbone for all tensors."""
        known = {*self._tensors, *self._tied}
        names: dict[str, str] = {}
        for name in self._files_of_base:
            candidates = (name, f"{self._prefix}.{name}", name.removeprefix(f"{self._prefix}."))
            names[name] = next((each for each in candidates if each in known), name)
        return names

    @functools.cached_property
    def _base_files(self) -> dict[str, str]:
        """The base's file of each of its tensors, by the name in exports."""
        return {self._base_names[name]: file for name, file in self._files_of_base.items()}

    @functools.cached_property
    def _files_of_base(self) -> dict[str, str]:
        """The base's file of each of its tensors; empty where there is no base in safetensors format."""
        if self._base_dir is None:
            return {}
        index = self._base_dir / layout.HF_INDEX
        weight_map = read_weight_map(index, follow_links=True, kind=RecipeError)
        if weight_map is not None:
            return weight_map
        single = self._base_dir / "model.safetensors"
        if not single.is_file():
            return {}
        return dict.fromkeys(read_header(single).tensors, single.name)

    @functools.cached_property
    def _base_tensors(self) -> dict[str, TensorEntry]:
        """The tensors of the base by the name in exports; empty without a base in safetensors format."""
        tensors: dict[str, TensorEntry] = {}
        if self._base_dir is None:
            return tensors
        for name in sorted(set(self._base_files.values())):
            try:
                header = read_header(self._base_dir / name)
            except (OSError, CheckpointUnusable) as error:
                raise RecipeError(
                    "a file of the base model cannot be read",
                    where=str(self._base_dir / name),
                    value=str(error),
                    hint="download the base model again",
                ) from error
            for fqn, entry in header.tensors.items():
                tensors[self._base_names.get(fqn, fqn)] = entry
        return tensors

    def _expected(self, fqn: str) -> dict[str, Any]:
        """A tensor that an export must contain: its shape, the declared difference from the base, if any, and the
        dtypes of an export in which it stays float32.
        """
        expected: dict[str, Any] = {"shape": list(self._exported[fqn].shape)}
        if codes := self._float32_of(fqn):
            expected["float32_in"] = sorted(codes)
        for difference, names in self._differences.items():
            if fqn in names and self._is_declared(fqn):
                expected["declared"] = difference
                break
        return expected

    def _float32_of(self, fqn: str) -> frozenset[str]:
        return frozenset(code for code, names in self._float32_in.items() if fqn in names)

    def _is_declared(self, fqn: str) -> bool:
        return any(fnmatchcase(fqn, pattern) for pattern in self._declared)

    @functools.cached_property
    def _differences(self) -> dict[str, list[str]]:
        """The names of the tensors that differ between an export and the base, by kind of difference."""
        base = self._base_tensors
        if not base:
            return {}
        return {
            "not in the base": [fqn for fqn in self._exported if fqn not in base],
            "in the base only": [fqn for fqn in base if fqn not in self._exported],
            "of another shape than in the base": [
                fqn
                for fqn, spec in self._exported.items()
                if fqn in base and base[fqn].shape != spec.shape
            ],
        }

    def _log_differences(self) -> None:
        renamed = {new: old for old, new in self._base_names.items() if new != old}
        for new, old in list(renamed.items())[:1]:
            with_prefix, prefix = "without", old.removesuffix(new)
            if prefix == old:
                with_prefix, prefix = "with", new.removesuffix(old)
            message = "Exports have the names of the base %s the prefix %r: %s"
            log.info(message, with_prefix, prefix, counted(len(renamed), "tensor"))
        for kind, names in self._differences.items():
            declared = [fqn for fqn in names if self._is_declared(fqn)]
            others = [fqn for fqn in names if fqn not in declared]
            if declared:
                message = "Expected difference between exports and the base: %s %s: %s"
                shown = ", ".join(declared[:_NUM_SHOWN])
                more = ", ..." if len(declared) > _NUM_SHOWN else ""
                log.info(message, counted(len(declared), "tensor"), kind, shown + more)
            if others:
                message = "Exports will differ from the base: %s %s: %s"
                log.warning(message, counted(len(others), "tensor"), kind, others[:_NUM_SHOWN])


def _local_references(references: Mapping[str, Any], files: Iterable[str]) -> dict[str, Any]:
    """*references* to Python classes (``auto_map``) without the name of a repository, if *files* contain the module.

    For a model of the Hub, transformers changes ``module.Class`` to ``owner/name--module.Class``.
    """
    local: dict[str, Any] = {}
    for auto_class, reference in references.items():
        local[auto_class] = reference
        _, separator, name = str(reference).rpartition("--")
        if separator and f"{name.rpartition('.')[0]}.py" in files:
            local[auto_class] = name
    return local


def _split_by_size(tensors: Mapping[str, TensorSpec]) -> dict[str, int]:
    """The number (from 1) of each tensor's file, for files of at most MAX_FILE_BYTES."""
    number, nbytes = 1, 0
    result: dict[str, int] = {}
    for fqn, spec in tensors.items():
        size = nbytes_of(spec.dtype, spec.shape)
        if nbytes and nbytes + size > MAX_FILE_BYTES:
            number, nbytes = number + 1, 0
        result[fqn] = number
        nbytes += size
    return result


def _read_unchanged(tokenizer: Any, directory: Path) -> Any:
    """Read the tokenizer or processor in *directory*, if it has the vocabulary and the settings of *tokenizer*.

    Returns None if it differs. A tokenizer may have another chat template, a text.
    """
    inner = _tokenizer_of(tokenizer)
    try:
        read = type(inner).from_pretrained(directory)
        # A classifier's tokenizer can have got a pad token.
        is_same = read.get_vocab() == inner.get_vocab() and read.pad_token == inner.pad_token
        if inner is tokenizer:
            has_text = isinstance(inner.chat_template, str)
            is_same = is_same and (has_text or read.chat_template == inner.chat_template)
        else:
            is_same = is_same and read.chat_template == inner.chat_template
            read = type(tokenizer).from_pretrained(directory)
            is_same = is_same and read.to_dict() == tokenizer.to_dict()
            is_same = is_same and read.chat_template == tokenizer.chat_template
    except (OSError, ValueError, AttributeError, TypeError, ImportError):
        # The files of another class, or damaged ones: the tokenizer is saved anew.
        return None
    return read if is_same else None


def _with_template(files: Mapping[str, bytes], template: str) -> dict[str, bytes]:
    """Return the *files* of a tokenizer with another chat template, in all places that programs read it from."""
    changed = {name: content for name, content in files.items() if "chat_template" not in name}
    changed["chat_template.jinja"] = template.encode()
    if _TOKENIZER_CONFIG in changed:
        settings = json.loads(changed[_TOKENIZER_CONFIG])
        if settings.pop("chat_template", None) is not None:
            changed[_TOKENIZER_CONFIG] = _json_bytes(settings)
    return changed


def _tokenizer_of(tokenizer: Any) -> Any:
    """A processor's tokenizer, or the tokenizer itself."""
    return getattr(tokenizer, "tokenizer", tokenizer)


def _files_of(tokenizer: Any) -> tuple[str, ...]:
    """The names of a tokenizer's or processor's files, also those of a class that transformers does not have."""
    stated: list[Any] = []
    for attribute in ("vocab_files_names", "resource_files_names"):
        stated += (getattr(_tokenizer_of(tokenizer), attribute, None) or {}).values()
    return (*TOKENIZER_FILES, *(name for name in stated if isinstance(name, str)))


def _json_bytes(value: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(value), indent=1).encode() + b"\n"
