"""Attacks on what only other forms of a checkpoint have: adapters and their base, Hugging Face files in its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from tests.hostile.harness.attacks import SPECIALS, _special
from tests.hostile.harness.attacks_export import TEXTS, _of
from tests.hostile.harness.readers import CHECKS, EXPORTS, GGUF, LISTS, MERGES, RESUMES
from tests.hostile.harness.victim import BASE, Attacked

Add = Callable[..., None]
_SIDE = "model/.hf_metadata"
RECORD, CONFIG = f"{_SIDE}/automodel_peft_config.json", f"{_SIDE}/adapter_config.json"
INDEX = "model.safetensors.index.json"
# What a tokenizer or processor leaves is copied into exports, and not read.
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "processor_config.json",
    "chat_template.jinja",
    "generation_config.json",
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


def _changed(case: Attacked, path: str, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((case.checkpoint / path).read_bytes())
    change(document)
    case.replace(path, json.dumps(document).encode())


def _adapters(add: Add) -> None:
    for name, data in TEXTS.items():
        for path in (RECORD, CONFIG):
            change = partial(
                lambda case, path, data: case.replace(path, data()), path=path, data=data
            )
            add("adapter_text", f"{name}_{path}", change, _OF_ADAPTERS, MERGES, form="adapter")
        for file in COPIED:
            change = partial(
                lambda case, path, data: case.replace(path, data()),
                path=f"{_SIDE}/{file}",
                data=data,
            )
            add("copied_text", f"{name}_{file}", change, _OF_ADAPTERS, form="adapter")
            add("copied_text", f"{name}_{file}_full", change, EXPORTS)
    for name, value in _values().items():
        for key in ("name", "relative_to_run", "digest", "files"):
            set_base = partial(
                lambda document, key, value: document["base"].update({key: value}),
                key=key,
                value=value,
            )
            add(
                "adapter_base",
                f"{key}_{name}",
                partial(_changed, path=RECORD, change=set_base),
                MERGES,
                form="adapter",
            )
        for key in ("base", "adapter", "format", "format_version"):
            change = partial(_changed, path=RECORD, change=partial(_set, key=key, value=value))
            add("adapter_record", f"{key}_{name}", change, MERGES, form="adapter")
        for key in (
            "r",
            "lora_alpha",
            "use_dora",
            "use_rslora",
            "rank_pattern",
            "alpha_pattern",
            "target_modules",
            "modules_to_save",
            "fan_in_fan_out",
            "base_model_name_or_path",
            "peft_type",
            "bias",
        ):
            change = partial(_changed, path=CONFIG, change=partial(_set, key=key, value=value))
            add("adapter_values", f"{key}_{name}", change, MERGES, form="adapter")
        add(
            "base_index",
            f"map_{name}",
            partial(_index, content={"weight_map": value}),
            MERGES,
            form="adapter",
        )
        add(
            "base_index",
            f"file_{name}",
            partial(_index, content={"weight_map": {"x": value}}),
            MERGES,
            form="adapter",
        )
        add(
            "adapter_layout",
            f"weights_{name}",
            partial(_laid_out, data=_of({"shape": value})),
            MERGES,
            MERGES,
            form="adapter",
        )
    for name, data in TEXTS.items():
        for file in (layout.ADAPTER_CONFIG, layout.AUTOMODEL_PEFT_CONFIG):
            change = partial(_laid_out, data=_of({}) + b"\0", file=file, text=data)
            add("adapter_layout", f"{name}_{file}", change, MERGES, MERGES, form="adapter")
        for file in COPIED[:4]:
            change = partial(_laid_out, data=_of({}) + b"\0", file=file, text=data)
            add("adapter_layout", f"{name}_{file}", change, MERGES, form="adapter")
    for path in (RECORD, CONFIG):
        add(
            "adapter_lacks",
            path,
            partial(_without, path=path),
            _OF_ADAPTERS,
            MERGES,
            form="adapter",
        )


def _set(document: dict[str, Any], key: str, value: Any) -> None:
    document[key] = value


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
    for name, data in TEXTS.items():
        for file in ("config.json", *COPIED[:2], COPIED[3]):
            change = partial(
                lambda case, path, data: case.replace(path, data()),
                path=f"{_SIDE}/{file}",
                data=data,
            )
            add("gguf_text", f"{name}_{file}", change, GGUF, form="llama")
    values = _values() | {
        "many": 2**31 - 1,
        "number": 5,
        "empty": [],
        "mappings": [{}],
        "surrogates": ["\ud800"],
    }
    for name, value in values.items():
        for key in (
            "num_hidden_layers",
            "vocab_size",
            "num_attention_heads",
            "head_dim",
            "rope_parameters",
            "architectures",
        ):
            change = partial(
                _changed, path=f"{_SIDE}/config.json", change=partial(_set, key=key, value=value)
            )
            refusing = GGUF if key == "num_hidden_layers" else frozenset()
            add("gguf_config", f"{key}_{name}", change, GGUF, refusing, form="llama")
        for key in ("added_tokens", "model", "pre_tokenizer", "post_processor", "normalizer"):
            change = partial(
                _changed, path=f"{_SIDE}/tokenizer.json", change=partial(_set, key=key, value=value)
            )
            add("gguf_tokenizer", f"{key}_{name}", change, GGUF, form="llama")
        for key in ("merges", "vocab", "dropout", "type"):
            inner = partial(
                lambda document, key, value: document["model"].update({key: value}),
                key=key,
                value=value,
            )
            change = partial(_changed, path=f"{_SIDE}/tokenizer.json", change=inner)
            add("gguf_tokenizer", f"model_{key}_{name}", change, GGUF, form="llama")
        for key in ("bos_token", "eos_token", "chat_template"):
            change = partial(
                _changed,
                path=f"{_SIDE}/tokenizer_config.json",
                change=partial(_set, key=key, value=value),
            )
            add("gguf_tokenizer", f"settings_{key}_{name}", change, GGUF, form="llama")


def _hugging_face(add: Add) -> None:
    readers = RESUMES | CHECKS | EXPORTS | LISTS
    for name, data in TEXTS.items():
        for file in (INDEX, "config.json"):
            change = partial(
                lambda case, path, data: case.replace(path, data()), path=f"model/{file}", data=data
            )
            add("hf_text", f"{name}_{file}", change, readers, form="hf")
        for file in COPIED:
            change = partial(
                lambda case, path, data: case.replace(path, data()), path=f"model/{file}", data=data
            )
            add("hf_copied_text", f"{name}_{file}", change, CHECKS | EXPORTS, form="hf")
    for kind in SPECIALS:
        change = partial(_special_weights, kind=kind)
        add(
            "hf_special",
            kind,
            change,
            RESUMES | CHECKS | EXPORTS,
            RESUMES | CHECKS | EXPORTS,
            form="hf",
        )
    for name, value in _values().items():
        for content in ({"weight_map": value}, {"weight_map": {"embed": value}}):
            data = json.dumps(content).encode()
            change = partial(lambda case, data: case.replace(f"model/{INDEX}", data), data=data)
            add(
                "hf_index",
                f"{name}_{len(str(content)) % 97}_{type(content['weight_map']).__name__}",
                change,
                readers,
                form="hf",
            )


def _special_weights(case: Attacked, kind: str) -> None:
    _special(next(case.model.glob("model-*.safetensors")), kind, case.outside)


def entries(add: Add) -> None:
    """Enter these attacks into the table."""
    _adapters(add)
    _hugging_face(add)
    _llamas(add)


__all__ = ["entries"]
