"""The commands that try and serve an export, for the log. Pure text; nothing is executed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.bounded_json import parse_json

_CONFIG = "config.json"
_CHAT_TEMPLATE = "chat_template.jinja"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SEQ2SEQ = "AutoModelForSeq2SeqLM"


def try_command(directory: Path) -> str:
    """The command that tries the Hugging Face files in *directory*: a conversation if there is a chat template.

    For an encoder-decoder, it has a source text in place of the beginning of a text. For a model that gives labels to
    texts, it is a call of transformers' pipeline; for a model of text embeddings, the call that loads them.
    """
    if _is_classifier(directory):
        return f'transformers.pipeline("text-classification", model={str(directory)!r})'
    path = shlex.quote(str(directory))
    if computes_embeddings(directory):
        return f"sentence_transformers.SentenceTransformer({str(directory)!r}).encode(['a text'])"
    if _has_chat_template(directory):
        return f"ckpt chat {path}"
    prompt = "a source text" if _is_seq2seq(directory) else "Once upon a time"
    return f'ckpt generate {path} -p "{prompt}"'


def model_files_lines(directory: Path) -> list[str]:
    """Log lines for a checkpoint's own model files in *directory*, which other programs load: what they are, and how to
    try them.

    The second is missing for adapters whose model generates no text.
    """
    if (directory / layout.ADAPTER_CONFIG).is_file():
        lines = [f"adapters, as peft loads them: {directory}"]
        if _generates_text(directory):
            lines.append(f"try it: {try_command(directory)}")
        return lines
    if not (directory / _CONFIG).is_file():
        return []
    return [f"Hugging Face files: {directory}", f"try it: {try_command(directory)}"]


def _generates_text(adapter: Path) -> bool:
    """Whether ``ckpt generate`` accepts the *adapter*: it is one of a language model, maybe with images."""
    settings = _read(adapter / layout.ADAPTER_CONFIG)
    is_of_text = settings.get("task_type") in ("CAUSAL_LM", "SEQ_2_SEQ_LM", None)
    return is_of_text and not computes_embeddings(adapter)


def computes_embeddings(directory: Path) -> bool:
    """Whether the files describe how sentence-transformers computes embeddings with the model."""
    return (directory / "modules.json").is_file()


def hf_lines(directory: Path) -> list[str]:
    """The commands for the Hugging Face files in *directory*: this program, vLLM (no encoder-decoders), transformers.

    Empty if there is no config.json: then no program can load them.
    """
    if not (directory / _CONFIG).is_file():
        return []
    if _is_classifier(directory):
        return [f"try it:       {try_command(directory)}"]
    path = shlex.quote(str(directory))
    if computes_embeddings(directory):
        return [
            f"try it:       {try_command(directory)}",
            f"transformers: AutoModel.from_pretrained({str(directory)!r})",
        ]
    auto_class = _auto_class(directory)
    serve = [f"vLLM:         vllm serve {path}"] if auto_class != _SEQ2SEQ else []
    return [
        f"try it:       {try_command(directory)}",
        *serve,
        f"transformers: {auto_class}.from_pretrained({str(directory)!r})",
    ]


def gguf_lines(file: Path, modelfile: Path) -> list[str]:
    """The commands for a GGUF *file*, with the *modelfile* that Ollama reads."""
    name = re.sub(r"[^a-z0-9._-]+", "-", file.stem.lower()).strip("-") or "model"
    return [
        f"llama.cpp:    llama-server -m {shlex.quote(str(file))}",
        f"Ollama:       ollama create {name} -f {shlex.quote(str(modelfile))} && ollama run {name}",
    ]


def modelfile_text(file: Path) -> str:
    """The content of Ollama's Modelfile for a GGUF *file* in the same directory.

    Ollama reads the chat template and the end tokens from the metadata of the GGUF file.
    """
    return f"FROM ./{file.name}\n"


def _is_classifier(directory: Path) -> bool:
    return _has_architecture(_config(directory), "ForSequenceClassification")


def _is_seq2seq(directory: Path) -> bool:
    """Whether the files are a model with an encoder and a decoder for texts, or adapters of one."""
    if _read(directory / layout.ADAPTER_CONFIG).get("task_type") == "SEQ_2_SEQ_LM":
        return True
    return _auto_class(directory) == _SEQ2SEQ


def _auto_class(directory: Path) -> str:
    """The class of transformers that loads a model which generates text."""
    config = _config(directory)
    # A text model of the same family has no vision_config.
    if "vision_config" in config and _has_architecture(config, "ForConditionalGeneration"):
        return "AutoModelForImageTextToText"
    if "audio_config" in config and _has_architecture(config, "ForConditionalGeneration"):
        return "AutoModelForMultimodalLM"
    # A decoder that was saved alone has another class.
    if config.get("is_encoder_decoder") is True and not _has_architecture(config, "ForCausalLM"):
        return _SEQ2SEQ
    return "AutoModelForCausalLM"


def _has_architecture(config: Mapping[str, Any], suffix: str) -> bool:
    return any(str(name).endswith(suffix) for name in config.get("architectures") or ())


def _config(directory: Path) -> Mapping[str, Any]:
    """The content of config.json; empty if it cannot be read."""
    return _read(directory / _CONFIG)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _has_chat_template(directory: Path) -> bool:
    if (directory / _CHAT_TEMPLATE).is_file():
        return True
    return bool(_read(directory / _TOKENIZER_CONFIG).get("chat_template"))
