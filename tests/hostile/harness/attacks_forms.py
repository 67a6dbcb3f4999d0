"""Attacks on what only other forms of a checkpoint have: adapters and their base, Hugging Face files in its place."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from tests.hostile.harness.attacks import SPECIALS, put, special
from tests.hostile.harness.attacks_export import TEXTS, _of
from tests.hostile.harness.readers import CHECKS, EXPORTS, GGUF, LISTS, MERGES, RESUMES
from tests.hostile.harness.victim import BASE, Attacked

Add = Callable[..., None]
_SIDE = "model/.hf_metadata"
RECORD, CONFIG = f"{_SIDE}/automodel_peft_config.json", f"{_SIDE}/adapter_config.json"
INDEX = "model.safetensors.index.json"
# What a tokenizer or processor leaves is copied into exports, and not read.
COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "processor_config.json"),
    *("chat_template.jinja", "generation_config.json"),
)
_OF_ADAPTERS = MERGES | EXPORTS


def _values() -> dict[str, Any]:
    deep: Any = 0
    for _ in range(900):
        deep = [deep]
    return {
        "digits": 10**4200,
        "nan": float("nan"),
        "infinite": float("inf"),
        "negative": -1,
        "zero": 0,
        "null": None,
        "text": "\x1b[31m\ud800",
        "nul": "a\0b",
        "parent": "../../outside",
        "device": "/dev/zero",
        "deep": deep,
        "list": [1],
        "mapping": {"a": {"b": 1e308}},
        "long": "x" * 10**6,
        "true": True,
    }


_OPTIONS_OF_PEFT = (
    *("r", "lora_alpha", "use_dora", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "modules_to_save", "fan_in_fan_out", "base_model_name_or_path"),
    *("peft_type", "bias"),
)
_ADAPTER_KEYS = (
    ("adapter_base", RECORD, "base", ("name", "relative_to_run", "digest", "files")),
    ("adapter_record", RECORD, "", ("base", "adapter", "format", "format_version")),
    ("adapter_values", CONFIG, "", _OPTIONS_OF_PEFT),
)
_SIZES = ("num_hidden_layers", "vocab_size", "num_attention_heads", "head_dim")
_PARTS = ("added_tokens", "model", "pre_tokenizer", "post_processor", "normalizer")
_SETTINGS = ("bos_token", "eos_token", "chat_template")
_GGUF_KEYS = (
    ("gguf_config", "config.json", "", "", (*_SIZES, "rope_parameters", "architectures")),
    ("gguf_tokenizer", "tokenizer.json", "", "", _PARTS),
    ("gguf_tokenizer", "tokenizer.json", "model", "model_", ("merges", "vocab", "dropout", "type")),
    ("gguf_tokenizer", "tokenizer_config.json", "", "settings_", _SETTINGS),
)
"""Kinds of attacks, the file and the section in it, prefixes of names, and the keys that get other values."""


def _changed(case: Attacked, path: str, inside: str, key: str, value: Any) -> None:
    """Another value of a key in a JSON file, or in the section *inside* of it."""
    document = json.loads((case.checkpoint / path).read_bytes())
    (document[inside] if inside else document)[key] = value
    case.replace(path, json.dumps(document).encode())


def _adapters(add: Add) -> None:
    add = partial(add, form="adapter")
    for name, data in TEXTS.items():
        for path in (RECORD, CONFIG):
            given = {"path": path, "data": data}
            add("adapter_text", f"{name}_{path}", put, _OF_ADAPTERS, MERGES, **given)
        for file in COPIED:
            given = {"path": f"{_SIDE}/{file}", "data": data}
            add("copied_text", f"{name}_{file}", put, _OF_ADAPTERS, **given)
            add("copied_text", f"{name}_{file}_full", put, EXPORTS, form="shards", **given)
    for name, value in _values().items():
        for kind, path, inside, keys in _ADAPTER_KEYS:
            for key in keys:
                given = {"path": path, "inside": inside, "key": key, "value": value}
                add(kind, f"{key}_{name}", _changed, MERGES, **given)
        add("base_index", f"map_{name}", _index, MERGES, content={"weight_map": value})
        add("base_index", f"file_{name}", _index, MERGES, content={"weight_map": {"x": value}})
        weights = _of({"shape": value})
        add("adapter_layout", f"weights_{name}", _laid_out, MERGES, MERGES, data=weights)
    for name, data in TEXTS.items():
        for file in (layout.ADAPTER_CONFIG, layout.AUTOMODEL_PEFT_CONFIG, *COPIED[:4]):
            refusing = frozenset() if file in COPIED else MERGES
            given = {"data": _of({}) + b"\0", "file": file, "text": data}
            add("adapter_layout", f"{name}_{file}", _laid_out, MERGES, refusing, **given)
    for path in (RECORD, CONFIG):
        add("adapter_lacks", path, _without, _OF_ADAPTERS, MERGES, path=path)


def _index(case: Attacked, content: Any) -> None:
    """The base that the checkpoint names is the attacker's too."""
    (case.run / BASE / INDEX).write_text(json.dumps(content))


def _without(case: Attacked, path: str) -> None:
    (case.checkpoint / path).unlink()
    case.reseal(lambda document: document["files"].pop(path))


def _laid_out(
    case: Attacked, data: bytes, file: str = "", text: Callable[[], bytes] = bytes
) -> None:
    """The adapter as peft has it: its files in the model's directory itself."""
    side = {path: (case.checkpoint / path).read_bytes() for path in (RECORD, CONFIG)}
    for path, content in side.items():
        case.replace(f"model/{path.rsplit('/')[-1]}", content)
    case.replace(f"model/{layout.ADAPTER_MODEL}", len(data).to_bytes(8, "little") + data)
    if file:
        case.replace(f"model/{file}", text())


def _llamas(add: Add) -> None:
    add = partial(add, form="llama")
    for name, data in TEXTS.items():
        for file in ("config.json", *COPIED[:2], COPIED[3]):
            given = {"path": f"{_SIDE}/{file}", "data": data}
            add("gguf_text", f"{name}_{file}", put, GGUF, **given)
    values = _values() | {
        "many": 2**31 - 1,
        "number": 5,
        "empty": [],
        "mappings": [{}],
        "surrogates": ["\ud800"],
    }
    for name, value in values.items():
        for kind, file, inside, prefix, keys in _GGUF_KEYS:
            for key in keys:
                given = {"path": f"{_SIDE}/{file}", "inside": inside, "key": key, "value": value}
                refusing = GGUF if key == "num_hidden_layers" else frozenset()
                add(kind, f"{prefix}{key}_{name}", _changed, GGUF, refusing, **given)


def _hugging_face(add: Add) -> None:
    add = partial(add, form="hf")
    readers = RESUMES | CHECKS | EXPORTS | LISTS
    for name, data in TEXTS.items():
        for file in (INDEX, "config.json"):
            add("hf_text", f"{name}_{file}", put, readers, path=f"model/{file}", data=data)
        for file in COPIED:
            given = {"path": f"model/{file}", "data": data}
            add("hf_copied_text", f"{name}_{file}", put, CHECKS | EXPORTS, **given)
    of_weights = RESUMES | CHECKS | EXPORTS
    for by in SPECIALS:
        add("hf_special", by, _special_weights, of_weights, of_weights, by=by)
    for name, value in _values().items():
        for content in ({"weight_map": value}, {"weight_map": {"embed": value}}):
            given = {"path": f"model/{INDEX}", "data": json.dumps(content).encode()}
            sort = type(content["weight_map"]).__name__
            add("hf_index", f"{name}_{len(str(content)) % 97}_{sort}", put, readers, **given)


def _special_weights(case: Attacked, by: str) -> None:
    special(next(case.model.glob("model-*.safetensors")), by, case.outside)


def entries(add: Add) -> None:
    _adapters(add)
    _hugging_face(add)
    _llamas(add)


__all__ = ["entries"]
