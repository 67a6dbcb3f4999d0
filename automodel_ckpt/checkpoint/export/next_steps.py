"""What a user runs next: the commands that try and serve an export. Pure text; nothing is executed."""

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
