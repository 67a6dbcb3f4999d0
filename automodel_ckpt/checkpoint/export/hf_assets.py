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
import shlex
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.base.units import counted, some_of
from automodel_ckpt.checkpoint.export.base_identity import files_of_index
from automodel_ckpt.checkpoint.export.files import with_older_keys
from automodel_ckpt.checkpoint.export.plan import file_numbers, main_dtype
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import TORCH_NAMES
from automodel_ckpt.checkpoint.files.safetensors_header import TensorEntry, read_header
from automodel_ckpt.checkpoint.files.type_aliases import (
    FileDict,
    Files,
    Texts,
    ValueDict,
    Values,
)
from automodel_ckpt.checkpoint.parts.slices import nbytes_of
from automodel_ckpt.checkpoint.sources.model_files import (
    CODE_FILES,
    GENERATION_CONFIG,
    MODEL_FILES,
    read_files,
    tokenizer_files,
)
from automodel_ckpt.checkpoint.sources.source import (
    DTYPE_MAP,
    EXPECTED_TENSORS,
    FILE_INDEX_MAP,
    BaseMaps,
)
from automodel_ckpt.errors import TAKE_ANOTHER, CheckpointUnusable, RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.state.module_tensors import TensorSpec

log = logging.getLogger("automodel_ckpt")
_SINGLE = "model.safetensors"
_NUM_SHOWN = 5
"""How many names of tensors a line of the log shows."""


@dataclass(eq=False)
class HFAssets:
    """What an export needs in addition to the weights.

    *config* and *generation_config* are transformers' objects, *tokenizer* a tokenizer or processor (None: none).
    *base_dir* is the local directory that the model was loaded from. *tensors* are those that the model stores; *tied*
    maps each other name to the stored one it shares its memory with. *code_dir* has the Python files that define the
    model's class, if transformers does not define it. *prefix* is the prefix of the backbone's
    tensors. Names in the base can lack it, or have it in excess. *declared* are names, or globs over them, of tensors
    that differ from the base's intentionally: new, resized or omitted. *further* are other files, by relative path,
    that take precedence over the base's files. *float32_in* has the dtypes (safetensors codes) to which a tensor of the
    model is not cast, but stays float32.
    """

    config: Any
    _: KW_ONLY
    generation_config: Any = None
    tokenizer: Any = None
    base_dir: Path | str | None = None
    code_dir: Path | None = None
    architecture: str | None = None
    prefix: str = ""
    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)
    tied: Texts = field(default_factory=dict)
    declared: Iterable[str] = ()
    further: Files | None = None
    float32_in: Mapping[str, Collection[str]] = field(default_factory=dict)

    @classmethod
    def from_model(
        cls, model: Any, *, float32_in: Mapping[str, Collection[str]] | None = None, **given: Any
    ) -> Any:
        """The assets of a transformers model, sharded or not: ``AdapterAssets`` for a ``PeftModel``.

        Args:
            model: The model.
            float32_in: For a dtype, the names in memory of parameters that stay float32 in an export with it.
            given: ``tokenizer``, ``base_dir``, ``code_dir``, ``declared`` and ``further``, which become attributes.
        """
        from automodel_ckpt.checkpoint.state.module_tensors import (
            complete_state,
            is_adapted,
            stored_layout,
            tensor_specs,
            unwrap,
        )

        inner: Any = unwrap(model)
        if is_adapted(inner):
            from automodel_ckpt.checkpoint.saving.adapter_assets import AdapterAssets

            return AdapterAssets.from_model(inner, **given)
        if getattr(inner, "_hf_peft_config_loaded", False):
            raise RecipeError(
                "adapters inside a transformers model cannot be exported",
                where="HFAssets.from_model",
                value=f"{type(inner).__name__} with add_adapter or load_adapter",
                hint="use peft.get_peft_model(model, config) instead",
            )
        _, tied = complete_state(inner)
        names = stored_layout(inner)
        kept: dict[str, set[str]] = {}
        for code, fqns in (float32_in or {}).items():
            for fqn in fqns:
                for name in (names.name_of(fqn), *names.rows.get(fqn, ())):
                    kept.setdefault(name, set()).add(code)
        can_generate = inner.can_generate()
        return cls(
            inner.config,
            generation_config=getattr(inner, "generation_config", None) if can_generate else None,
            # fully_shard puts a subclass with this prefix in the place of the model's class.
            architecture=type(inner).__name__.removeprefix("FSDP"),
            prefix=inner.base_model_prefix,
            tensors=tensor_specs(inner),
            tied=tied,
            float32_in=kept,
            **given,
        )

    def validate(self) -> None:
        """Create every side file once, in memory.

        Raises :class:`RecipeError` where one cannot be created, which would otherwise fail at the first save.
        """
        try:
            _ = self.files
        except (ValueError, OSError) as error:
            raise RecipeError(
                "the side files of an export cannot be created (config, generation config or tokenizer)",
                where=self.base_dir or "the model of this recipe",
                value=str(error).strip(),
                hint="",
            ) from error

    @functools.cached_property
    def file_index_mapping(self) -> Mapping[str, int]:
        """For each tensor the number (from 1) of its file in an export: as in the base, else 5 GB a file at most."""
        if not self._base:
            return file_numbers({fqn: nbytes_of(*spec) for fqn, spec in self._exported.items()})
        names = sorted({file for file, _ in self._base.values()})
        numbers = {name: number for number, name in enumerate(names, start=1)}
        # Tensors that the base does not have go to its last file.
        in_base = {fqn: numbers[file] for fqn, (file, _) in self._base.items()}
        return {fqn: in_base.get(fqn, len(numbers)) for fqn in self._exported}

    @property
    def maps(self) -> BaseMaps:
        """The content of the maps among the side files, in the format that an export reads."""
        config = json.loads(self.files["config.json"])
        is_tied = bool(config.get("tie_word_embeddings", False))
        dtypes = {fqn: entry.dtype for fqn, (_, entry) in self._base.items()} or None
        if not self.tensors:
            return BaseMaps(None, dtypes, None, is_tied)
        shapes = {fqn: spec.shape for fqn, spec in self._exported.items()}
        float32_in = {
            fqn: frozenset(self.float32_in[fqn]) for fqn in self._exported if fqn in self.float32_in
        }
        index = dict(self.file_index_mapping)
        return BaseMaps(index, dtypes, shapes, is_tied, float32_in=float32_in)

    @property
    def nbytes(self) -> int:
        """Bytes of the side files."""
        return sum(map(len, self.files.values()))

    @functools.cached_property
    def files(self) -> Files:
        """All side files, by name: an export's own, and the base's maps."""
        # The base's own bytes take precedence, except for config.json, which describes this model.
        copied = self._copied()
        files = tokenizer_files(self.tokenizer, self.base_dir) | copied | dict(self.further or {})
        if self.generation_config is not None and GENERATION_CONFIG not in files:
            with tempfile.TemporaryDirectory(prefix="automodel_ckpt-") as directory:
                self.generation_config.save_pretrained(directory)
                files |= read_files(Path(directory), ("*",))
        files["config.json"] = self.config_json()
        if self.tensors:
            files[FILE_INDEX_MAP] = _json_bytes(self.file_index_mapping)
            # A tensor that an export must contain: its shape, and the dtypes of an export in which it stays float32.
            expected: dict[str, ValueDict] = {}
            for fqn, spec in self._exported.items():
                expected[fqn] = {"shape": list(spec.shape)}
                if fqn in self.float32_in:
                    expected[fqn]["float32_in"] = sorted(self.float32_in[fqn])
            files[EXPECTED_TENSORS] = _json_bytes(expected)
        if self._base:
            dtypes = {fqn: entry.dtype for fqn, (_, entry) in sorted(self._base.items())}
            files[DTYPE_MAP] = _json_bytes(dtypes)
            self._warn_of_differences()
        return files

    def config_json(self) -> bytes:
        """The content of config.json, with the class of the model and the dtype of its weights.

        It also has the keys that programs before transformers 5 read.
        """
        # The model still uses its config, which must not change.
        config = copy.deepcopy(self.config)
        if self.architecture is not None:
            config.architectures = [self.architecture]
        if getattr(config, "dtype", None) is None:
            code = main_dtype((spec.dtype, nbytes_of(*spec)) for spec in self.tensors.values())
            if code is not None:
                config.dtype = TORCH_NAMES[code]
        references = getattr(config, "auto_map", None)
        if isinstance(references, Mapping):
            config.auto_map = _local_references(references, self._copied())
        content = with_older_keys(json.loads(config.to_json_string()))
        return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()

    def _copied(self) -> FileDict:
        """The base's own files, unchanged, and the code of the model's class; empty without both."""
        files: FileDict = {}
        if self.code_dir is not None:
            files |= read_files(self.code_dir, CODE_FILES)
        if self.base_dir is not None:
            names = list(MODEL_FILES)
            if self.generation_config is not None:
                names.append(GENERATION_CONFIG)
            files |= read_files(Path(self.base_dir), names)
        return files

    @functools.cached_property
    def _exported(self) -> dict[str, TensorSpec]:
        """The tensors of an export. Tied tensors have the names that the base has, otherwise the stored one."""
        groups = {fqn: [fqn] for fqn in self.tensors}
        for alias, stored_name in self.tied.items():
            groups[stored_name].append(alias)
        exported = {}
        for stored_name, names in groups.items():
            in_base = [name for name in names if name in self._base]
            for name in in_base or [stored_name]:
                exported[name] = self.tensors[stored_name]
        return exported

    @functools.cached_property
    def _base(self) -> dict[str, tuple[str, TensorEntry]]:
        """The file and the description of each of the base's tensors, by its name in exports; empty where there is no
        base in safetensors format. All names in the base have or lack the prefix of the backbone."""
        found: dict[str, tuple[str, TensorEntry]] = {}
        if self.base_dir is None:
            return found
        directory = Path(self.base_dir)
        files = files_of_index(directory / layout.HF_INDEX)
        if not files and (directory / _SINGLE).is_file():
            files = [_SINGLE]
        for file in files:
            try:
                header = read_header(directory / file)
            except (OSError, CheckpointUnusable) as error:
                raise RecipeError(
                    "a file of the base model cannot be read",
                    where=directory / file,
                    value=str(error),
                    hint=TAKE_ANOTHER,
                ) from error
            for fqn, entry in header.tensors.items():
                names = (fqn, f"{self.prefix}.{fqn}", fqn.removeprefix(f"{self.prefix}."))
                here = (name for name in names if name in self.tensors or name in self.tied)
                found[next(here, fqn)] = file, entry
        return found

    def _warn_of_differences(self) -> None:
        """Warn of the tensors that differ between an export and the base, unless they are declared."""
        here = {fqn: tuple(spec.shape) for fqn, spec in self._exported.items()}
        base = {fqn: tuple(entry.shape) for fqn, (_, entry) in self._base.items()}
        names = [
            fqn
            for fqn in {**here, **base}
            if here.get(fqn) != base.get(fqn)
            and not any(fnmatchcase(fqn, pattern) for pattern in self.declared)
        ]
        if names:
            log.warning(
                "Exports will differ from the base in the names or shapes of %s: %s",
                counted(len(names), "tensor"),
                some_of(names, _NUM_SHOWN),
            )


def _local_references(references: Values, files: Iterable[str]) -> ValueDict:
    """*references* to Python classes (``auto_map``) without the name of a repository, if *files* contain the module.

    For a model of the Hub, transformers changes ``module.Class`` to ``owner/name--module.Class``.
    """
    local = {}
    for auto_class, reference in references.items():
        local[auto_class] = reference
        _, separator, name = str(reference).rpartition("--")
        if separator and f"{name.rpartition('.')[0]}.py" in files:
            local[auto_class] = name
    return local


def _json_bytes(value: Values) -> bytes:
    return json.dumps(dict(value), indent=1).encode() + b"\n"


# ---------------------------------------------------------------- consolidate.sh


# Written for bash and parseable by every POSIX shell, so that a shell that cannot run it can say so: no arrays, no [[.
# Sourced, all work is done by a child: nothing can be left behind in the caller's shell, and nothing can end it. Names
# may hold anything, a final newline too: $(...) strips those, so no directory's name is ever captured by itself.
_IN_BASH = r"""if [ -z "${BASH_VERSION-}${ZSH_VERSION-}" ]; then
  echo "consolidate.sh: this is a bash script; run it as: bash consolidate.sh" >&2
  (exit 2)
elif [ -n "${ZSH_VERSION-}" ]; then
  command bash -- "$0"
elif [ "${BASH_SOURCE-}" != "$0" ]; then
  command bash -- "${BASH_SOURCE-}"
else"""

_SCRIPT = r"""#!/usr/bin/env bash
# Export this checkpoint's model as Hugging Face files, into consolidated/ beside this script.
#   bash consolidate.sh          from anywhere, after a move or copy too; `source consolidate.sh` does the same
#   sbatch --cpus-per-task=20 --wrap='NPROC_PER_NODE=4 NUM_THREADS=5 bash /path/to/consolidate.sh'
# Environment: NPROC_PER_NODE (1) processes with NUM_THREADS (5, or as many as the CPUs allow) threads each; CAST_DTYPE
# (none; bf16, fp16, fp32 or fp64); PYTHON, the interpreter; CONSOLIDATION_TOOL, the path of an
# offline_hf_consolidation.py.
@IN_BASH@

fail() {
  printf 'consolidate.sh: %s\n' "$@" >&2
  exit 1
}

is_count() {
  case $1 in '' | *[!0-9]* | 0*) return 1 ;; esac
}

# What this job may use: Slurm's number where it gives one, never more than the affinity mask allows.
cpu_allocation() {
  cpus=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null) || cpus=
  for limit in "${SLURM_CPUS_PER_TASK-}" "${SLURM_CPUS_ON_NODE-}"; do
    if is_count "$limit"; then
      if ! is_count "$cpus" || [ "$limit" -lt "$cpus" ]; then cpus=$limit; fi
      break
    fi
  done
  printf '%s' "$cpus"
}

self=$(readlink -f -- "$0") || fail "cannot find this script's own place: $0"
model_dir=${self%/*}
output_dir=$model_dir/consolidated
if [ ! -d "$model_dir/.hf_metadata" ]; then
  hint="Run it where it was written, in the model directory of a checkpoint."
  if [ -n "${SLURM_JOB_ID-}" ]; then
    hint="Slurm runs a spooled copy that lost its place. Use: sbatch --wrap='bash /path/to/model/consolidate.sh'"
  fi
  fail "there is no checkpoint beside this script, in $model_dir (no .hf_metadata)." "$hint"
fi

num_procs=${NPROC_PER_NODE:-1}
is_count "$num_procs" || fail "NPROC_PER_NODE is not a number of processes: $num_procs"
cpus=$(cpu_allocation)
num_threads=${NUM_THREADS-}
if [ -z "$num_threads" ]; then
  # By default no more than this job may use.
  num_threads=5
  if is_count "$cpus" && [ $((num_procs * num_threads)) -gt "$cpus" ]; then num_threads=$((cpus / num_procs)); fi
  if [ "$num_threads" -lt 1 ]; then num_threads=1; fi
fi
is_count "$num_threads" || fail "NUM_THREADS is not a number of threads: $num_threads"
if is_count "$cpus" && [ $((num_procs * num_threads)) -gt "$cpus" ]; then
  echo "consolidate.sh: warning: NPROC_PER_NODE * NUM_THREADS = $((num_procs * num_threads))" \
    "exceeds the $cpus CPUs of this allocation" >&2
fi

python=${PYTHON-}
if [ -z "$python" ]; then
  python=@INTERPRETER@
  [ -x "$python" ] || python=python3
fi
command -v -- "$python" >/dev/null 2>&1 || fail "cannot run the Python interpreter: $python" \
  "Set PYTHON to one that has automodel_ckpt installed."

set -- --model-name "$model_dir/.hf_metadata" --input-dir "$model_dir" --output-dir "$output_dir" \
  --num-threads "$num_threads" --backend gloo
if [ -n "${CAST_DTYPE-}" ]; then
  set -- "$@" --cast-dtype "$CAST_DTYPE"
fi

tool=${CONSOLIDATION_TOOL-}
if [ -n "$tool" ]; then
  [ -f "$tool" ] || fail "there is no tool at CONSOLIDATION_TOOL: $tool"
elif [ -f tools/offline_hf_consolidation.py ]; then
  tool=tools/offline_hf_consolidation.py
fi
case $tool in '' | /*) ;; *) tool=./$tool ;; esac
export NPROC_PER_NODE="$num_procs"
if [ -z "$tool" ]; then
  # Safe path: a file named like a module, in the directory where this happens to run, must not be imported.
  PYTHONSAFEPATH=1 "$python" -m automodel_ckpt.consolidate "$@" >/dev/null  # it too prints the directory
elif grep -q automodel_ckpt.consolidate -- "$tool"; then
  "$python" "$tool" "$@" >/dev/null
elif [ "$num_procs" -gt 1 ] && ! grep -q NPROC_PER_NODE -- "$tool"; then
  # A tool that does not read the variable itself (NeMo AutoModel's) expects its processes from torchrun.
  # Not -m, which would search the current directory first, nor -P, which Python 3.10 does not have.
  torchrun='import sys; sys.path = [path for path in sys.path if path]; import torch.distributed.run as run; run.main()'
  "$python" -c "$torchrun" --nproc-per-node="$num_procs" "$tool" "$@" >&2
else
  "$python" "$tool" "$@" >&2
fi
status=$?
if [ "$status" -ne 0 ]; then
  if [ -z "$tool" ] && ! PYTHONSAFEPATH=1 "$python" -c 'import automodel_ckpt' >/dev/null 2>&1; then
    echo "consolidate.sh: $python has no package automodel_ckpt: set PYTHON to one that has it, or" \
      "CONSOLIDATION_TOOL to an offline_hf_consolidation.py" >&2
  fi
  echo "consolidate.sh: nothing was exported (the tool ended with status $status)" >&2
  exit "$status"
fi
printf '%s\n' "$output_dir"

fi
"""


_NO_NEED = r"""#!/usr/bin/env bash
# Nothing to consolidate: the files beside this script are the Hugging Face files (checkpoint.model_layout: hf).
#   bash consolidate.sh          says so and prints this directory; `source consolidate.sh` does the same
@IN_BASH@

self=$(readlink -f -- "$0") && model_dir=${self%/*} && [ -f "$model_dir/model.safetensors.index.json" ] || {
  echo "consolidate.sh: there is no model beside this script. Run it where it was written." >&2
  exit 1
}
if [ -n "${CAST_DTYPE-}" ]; then
  echo "consolidate.sh: these files keep the dtype of training; nothing was cast to CAST_DTYPE=$CAST_DTYPE." \
    "Load them with from_pretrained(..., dtype=...)" >&2
  exit 1
fi
echo "consolidate.sh: no need: the files here are the Hugging Face files already" >&2
printf '%s\n' "$model_dir"

fi
"""


def no_need_script() -> str:
    """``consolidate.sh`` of a model directory that needs none."""
    return _NO_NEED.replace("@IN_BASH@", _IN_BASH)


def consolidate_script(interpreter: str) -> str:
    """``consolidate.sh`` for a checkpoint that the Python at the path *interpreter* wrote."""
    return _SCRIPT.replace("@IN_BASH@", _IN_BASH).replace("@INTERPRETER@", shlex.quote(interpreter))
