"""What a user runs next: the text of ``consolidate.sh`` in a checkpoint, and the commands that try and serve an export.

Pure text; nothing is executed.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import parse_json
from automodel_ckpt.checkpoint.files.type_aliases import Values

_CONFIG = "config.json"
_CHAT_TEMPLATE = "chat_template.jinja"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_CAUSAL = "AutoModelForCausalLM"
_SEQ2SEQ = "AutoModelForSeq2SeqLM"
_CLASSIFIER = "AutoModelForSequenceClassification"
_EMBEDDINGS = "AutoModel"
_OF_ADAPTERS = {"CAUSAL_LM": _CAUSAL, "SEQ_2_SEQ_LM": _SEQ2SEQ, "None": _CAUSAL}
"""The classes of bases that generate text, by the ``task_type`` of their adapters."""


def try_command(directory: Path) -> str:
    """The command that tries the Hugging Face files in *directory*: a conversation if there is a chat template.

    For an encoder-decoder, it has a source text in place of the beginning of a text. For a model that gives labels to
    texts, it is a call of transformers' pipeline; for a model of text embeddings, the call that loads them.
    """
    auto_class = _auto_class(directory)
    if auto_class == _CLASSIFIER:
        return f'transformers.pipeline("text-classification", model={str(directory)!r})'
    if auto_class == _EMBEDDINGS:
        return f"sentence_transformers.SentenceTransformer({str(directory)!r}).encode(['a text'])"
    path = shlex.quote(str(directory))
    is_chat = (directory / _CHAT_TEMPLATE).is_file()
    if is_chat or _read(directory / _TOKENIZER_CONFIG).get("chat_template"):
        return f"ckpt chat {path}"
    prompt = "a source text" if auto_class == _SEQ2SEQ else "Once upon a time"
    return f'ckpt generate {path} -p "{prompt}"'


def model_files_lines(directory: Path) -> list[str]:
    """Log lines for a checkpoint's own model files in *directory*, which other programs load: what they are, and how to
    try them.

    The second is missing for adapters of a model that generates no text.
    """
    if (directory / layout.ADAPTER_CONFIG).is_file():
        lines = [f"adapters, as peft loads them: {directory}"]
        generates_text = _auto_class(directory) in _OF_ADAPTERS.values()
        return [*lines, f"try it: {try_command(directory)}"] if generates_text else lines
    if not (directory / _CONFIG).is_file():
        return []
    return [f"Hugging Face files: {directory}", f"try it: {try_command(directory)}"]


def computes_embeddings(directory: Path) -> bool:
    """Whether the files describe how sentence-transformers computes embeddings with the model."""
    return (directory / "modules.json").is_file()


def hf_lines(directory: Path) -> list[str]:
    """The commands for the Hugging Face files in *directory*: this program, vLLM (no encoder-decoders), transformers.

    Empty if there is no config.json: then no program can load them.
    """
    if not (directory / _CONFIG).is_file():
        return []
    auto_class = _auto_class(directory)
    lines = [f"try it:       {try_command(directory)}"]
    if auto_class not in (_CLASSIFIER, _EMBEDDINGS, _SEQ2SEQ):
        lines.append(f"vLLM:         vllm serve {shlex.quote(str(directory))}")
    if auto_class != _CLASSIFIER:
        lines.append(f"transformers: {auto_class}.from_pretrained({str(directory)!r})")
    return lines


def gguf_lines(file: Path, modelfile: Path) -> list[str]:
    """The commands for a GGUF *file*, with the *modelfile* that Ollama reads."""
    name = re.sub(r"[^a-z0-9._-]+", "-", file.stem.lower()).strip("-") or "model"
    return [
        f"llama.cpp:    llama-server -m {shlex.quote(str(file))}",
        f"Ollama:       ollama create {name} -f {shlex.quote(str(modelfile))} && ollama run {name}",
    ]


def _auto_class(directory: Path) -> str:
    """The class of transformers that loads the model, or the base of adapters."""
    config = _read(directory / _CONFIG)
    architectures = tuple(map(str, config.get("architectures") or ()))

    def has_architecture(suffix: str) -> bool:
        return any(name.endswith(suffix) for name in architectures)

    if has_architecture("ForSequenceClassification"):
        return _CLASSIFIER
    if computes_embeddings(directory):
        return _EMBEDDINGS
    if (directory / layout.ADAPTER_CONFIG).is_file():
        # As text: in another program's file, it may be of any type.
        return _OF_ADAPTERS.get(str(_read(directory / layout.ADAPTER_CONFIG).get("task_type")), "")
    if has_architecture("ForConditionalGeneration"):
        # A text model of the same family has no vision_config.
        if "vision_config" in config:
            return "AutoModelForImageTextToText"
        if "audio_config" in config:
            return "AutoModelForMultimodalLM"
    # A decoder that was saved alone has another class.
    if config.get("is_encoder_decoder") is True and not has_architecture("ForCausalLM"):
        return _SEQ2SEQ
    return _CAUSAL


def _read(path: Path) -> Values:
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


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
