"""The Python code of a model card that loads the model."""

from __future__ import annotations

from collections.abc import Iterator

from automodel_ckpt.checkpoint.files.layout import ADAPTER_MODEL_CONFIG
from automodel_ckpt.hub.bundle import Bundle

_CLASSES = {
    "text-generation": "ForCausalLM",
    "image-text-to-text": "ForImageTextToText",
    "audio-text-to-text": "ForMultimodalLM",
    "text2text-generation": "ForSeq2SeqLM",
    "text-classification": "ForSequenceClassification",
    "text-ranking": "ForSequenceClassification",
    "feature-extraction": "",
    "sentence-similarity": "",
}
_PROCESSORS = ("processor_config.json", "preprocessor_config.json")


def snippet(
    bundle: Bundle, repo: str, revision: str | None, pipeline_tag: str, base: str | None
) -> Iterator[str]:
    """Yield the lines of a code block that loads the model from the repository *repo*.

    *base* is the name of an adapter's base on the Hub; None if it is a local directory.
    """
    place = f'"{repo}"' if revision is None else f'"{repo}", revision="{revision}"'
    yield "```python"
    if pipeline_tag == "sentence-similarity" and not bundle.is_adapter:
        yield "from sentence_transformers import SentenceTransformer"
        yield ""
        yield f"model = SentenceTransformer({place})"
    else:
        yield from _transformers(bundle, place, f"AutoModel{_CLASSES[pipeline_tag]}", base)
    yield "```"


def _transformers(bundle: Bundle, place: str, auto_class: str, base: str | None) -> Iterator[str]:
    preprocessor = _preprocessor(bundle)
    # The head of a classifier is among the adapter's weights. Its size is in this config, not in that of the base.
    has_config = bundle.is_adapter and ADAPTER_MODEL_CONFIG in bundle.files
    config = "AutoConfig" if has_config else None
    names = ", ".join(filter(None, (config, auto_class, preprocessor)))
    if has_config:
        yield "from huggingface_hub import hf_hub_download"
    if bundle.is_adapter:
        yield "from peft import PeftModel"
    yield f"from transformers import {names}"
    yield ""
    if bundle.is_adapter:
        origin = f'"{base or "the directory or name of the base model"}"'
        if has_config:
            repository, *revision = place.split(", ", 1)
            words = ", ".join((repository, f'"{ADAPTER_MODEL_CONFIG}"', *revision))
            yield f"config = AutoConfig.from_pretrained(hf_hub_download({words}))"
            origin += ", config=config"
        yield f"base = {auto_class}.from_pretrained({origin})"
        yield f"model = PeftModel.from_pretrained(base, {place})"
    else:
        yield f"model = {auto_class}.from_pretrained({place})"
    if preprocessor is not None:
        variable = "processor" if preprocessor == "AutoProcessor" else "tokenizer"
        yield f"{variable} = {preprocessor}.from_pretrained({place})"


def _preprocessor(bundle: Bundle) -> str | None:
    if any(name in bundle.files for name in _PROCESSORS):
        return "AutoProcessor"
    return "AutoTokenizer" if "tokenizer_config.json" in bundle.files else None
