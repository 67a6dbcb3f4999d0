"""Callables of the libraries as ``_target_`` of a recipe: their names, harmful arguments, and calling them."""

import importlib.util
import itertools
import json
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import yaml

from automodel_ckpt.config.callables import allowlist
from automodel_ckpt.config.callables.plugins import build, signature_of
from automodel_ckpt.config.callables.prepare import check_targets
from automodel_ckpt.config.callables.trust import Rejected, Trust, resolve
from automodel_ckpt.config.load import load_recipe
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.errors import RecipeError

PACKAGES = ("torch.optim", "torch.nn", "transformers", "datasets", "peft", "automodel_ckpt")
SUPPLIED = ("tokenizer", "processor", "params", "reduction")
_DEFINED = re.compile(
    r"^([ ]*)(?:async )?(def|class) (\w+)|^(?:from \S+ )?import \(?([\w\s,.]+)", re.MULTILINE
)
DEEP = {
    "datasets.load_dataset",
    "datasets.load_from_disk",
    "transformers.AutoConfig.from_pretrained",
    "transformers.AutoModelForCausalLM.from_config",
    "transformers.AutoModelForCausalLM.from_pretrained",
    "transformers.AutoProcessor.from_pretrained",
    "transformers.AutoTokenizer.from_pretrained",
}
"""Callables that get each canary as each argument; of hundreds that are alike each gets some pairs."""


@dataclass
class AnySection:
    """A custom recipe's section, which may name everything that is on the list for some section.

    Those of a whole recipe are left out: binding them takes most of the time of an attempt.
    """

    extra: Target | None = field(default=None, metadata={"supplied": SUPPLIED})


def exported_names() -> set[str]:
    """``package.name`` of what each package exports at its top."""
    return {
        f"{package}.{name}"
        for package in PACKAGES
        for name in dir(importlib.import_module(package))
    }


def all_names() -> set[str]:
    """Dotted names of every function, class, method and import of the packages, read from their source."""
    names = exported_names()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        root = Path(spec.origin).parent
        for path in root.rglob("*.py"):
            parts = [package, *path.relative_to(root).with_suffix("").parts]
            names.update(_names_in(path, ".".join(part for part in parts if part != "__init__")))
    return names


def _names_in(path: Path, module: str) -> Iterator[str]:
    """By the lines of a file, which takes a hundredth of the time of parsing it."""
    owner = ""
    for indent, kind, name, imported in _DEFINED.findall(path.read_text()):
        if imported:
            words = [
                part.split()[-1].partition(".")[0] for part in imported.split(",") if part.strip()
            ]
            yield from (f"{module}.{word}" for word in words if word.isidentifier())
        elif not indent:
            owner = name if kind == "class" else ""
            yield f"{module}.{name}"
        elif owner and len(indent) == 4:
            yield f"{module}.{owner}.{name}"


def purposes_of(name: str) -> list[str]:
    """The purposes for which a recipe may name it without trust."""
    found = []
    for purpose in allowlist.ALLOWED:
        with suppress(Rejected):
            resolve(name, Trust(), purpose)
            found.append(purpose)
    return found


@dataclass(frozen=True)
class Place:
    """A run directory with everything that a hostile recipe may bring along, and what must stay as it is beside it."""

    top: Path

    @property
    def run(self) -> Path:
        return self.top / "run"

    @property
    def outside(self) -> Path:
        return self.top / "outside"

    @property
    def marker(self) -> Path:
        """What a command, a pickle, a script or remote code writes if it runs."""
        return self.outside / "ran"

    def make(self) -> None:
        for directory in (self.run, self.outside):
            directory.mkdir(parents=True)
        (self.outside / "victim").write_text("still here")
        code = f"open({str(self.marker)!r}, 'w').close()\nclass Evil: pass\ndef run(*args, **keywords): return Evil()\n"
        (self.run / "hostile_module.py").write_text(code)
        self._write_tables()
        self._write_model("remote", {"model_type": "hostile"}, code)
        self._write_model(
            "local", {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}, code
        )

    def _write_tables(self) -> None:
        (self.run / "rows.jsonl").write_text('{"text": "a b"}\n' * 4)
        data = self.run / "hostile_data"
        data.mkdir()
        (data / "hostile_data.py").write_text((self.run / "hostile_module.py").read_text())
        (data / "data.pkl").write_bytes(self.pickle())
        (data / "README.md").write_text(
            "---\nconfigs:\n- config_name: default\n  data_files: data.pkl\n---\n"
        )
        saved = self.run / "saved"
        saved.mkdir()
        state = {
            "_data_files": [{"filename": "data.pkl"}],
            "_fingerprint": "x",
            "_format_type": "hostile_module",
            "_format_columns": None,
            "_format_kwargs": {},
            "_output_all_columns": False,
        }
        (saved / "state.json").write_text(json.dumps(state))
        (saved / "dataset_info.json").write_text(
            '{"builder_name": "hostile_module", "features": {}}'
        )
        (saved / "data.pkl").write_bytes(self.pickle())

    def _write_model(self, name: str, config: dict[str, Any], code: str) -> None:
        directory = self.run / name
        (directory / "custom_generate").mkdir(parents=True)
        kinds = (
            "AutoConfig",
            "AutoModel",
            "AutoModelForCausalLM",
            "AutoProcessor",
            "AutoImageProcessor",
        )
        remote: dict[str, Any] = dict.fromkeys(kinds, "modeling_hostile.Evil")
        remote["AutoTokenizer"] = ["modeling_hostile.Evil", "modeling_hostile.Evil"]
        settings = {
            **config,
            "architectures": ["Evil"],
            "auto_map": remote,
            "tokenizer_class": "Evil",
            "processor_class": "Evil",
            "attn_implementation": "sdpa",
        }
        for file in (
            "config.json",
            "tokenizer_config.json",
            "processor_config.json",
            "preprocessor_config.json",
        ):
            (directory / file).write_text(json.dumps(settings))
        for file in ("modeling_hostile.py", "custom_generate/generate.py"):
            (directory / file).write_text(code)
        for file in ("pytorch_model.bin", "training_args.bin", "vocab.pkl", "adapter_model.bin"):
            (directory / file).write_bytes(self.pickle())

    def pickle(self) -> bytes:
        """A pickle that writes the marker when it is read."""
        return pickle.dumps(_Opens(str(self.marker)))

    def canaries(self) -> list[Any]:
        """Values for an argument: each would show if a callable ran, imported, read or wrote what it names."""
        return [
            f"touch {self.marker}",
            str(self.outside / "written"),
            str(self.outside / "victim"),
            str(self.run / "remote/pytorch_model.bin"),
            str(self.run / "hostile_module.py"),
            str(self.run / "remote"),
            str(self.run / "local"),
            str(self.run / "hostile_data"),
            str(self.run / "saved"),
            "hostile_module.run",
            "os.system",
            "pandas",
            True,
            False,
            {
                "trust_remote_code": False,
                "path": str(self.run / "remote"),
                "weights_only": False,
                "loader": "pickle",
            },
            [str(self.outside / "victim"), "hostile_module.run"],
            {"_target_": "hostile_module.run"},
            {
                "_target_": "transformers.PreTrainedConfig",
                "auto_map": {"AutoModel": "hostile_module.Evil"},
            },
        ]

    def attempts(self, name: str) -> Iterator[dict[str, Any]]:
        """Arguments for the callable *name*: each canary as all arguments, and as single ones."""
        function = resolve(name, Trust())
        entry = allowlist.entry_of(allowlist.CUSTOM, name, function)
        parameters = signature_of(function).required
        listed = entry.arguments if entry is not None and entry.arguments is not None else ()
        keywords = sorted({*parameters, *listed} - {*SUPPLIED})
        values = self.canaries()
        pairs = list(itertools.product(keywords, values))
        for base in self._bases(name, parameters):
            yield base
            for value in values:
                yield dict.fromkeys([key for key in keywords if key not in base], value) | base
            for keyword, value in pairs if name in DEEP else pairs[:: len(pairs) // 12 | 1]:
                yield base | {keyword: value}

    def _bases(self, name: str, parameters: dict[str, bool]) -> list[dict[str, Any]]:
        """Arguments with which a callable gets far enough to look at others."""
        rows = {"path": str(self.run / "rows.jsonl")}
        if name == "datasets.load_dataset":
            return [
                {"path": "json", "data_files": rows["path"]},
                {"path": str(self.run / "hostile_data")},
            ]
        if name == "datasets.load_from_disk":
            return [{"dataset_path": str(self.run / "saved")}]
        if name.endswith(".from_pretrained"):
            return [
                {"pretrained_model_name_or_path": str(self.run / kind)}
                for kind in ("remote", "local")
            ]
        if name.endswith(".from_config"):
            return [
                {
                    "config": {
                        "_target_": "transformers.GPT2Config",
                        "n_layer": 1,
                        "n_embd": 8,
                        "n_head": 1,
                    }
                }
            ]
        if name.startswith("automodel_ckpt.data.") and "path" in parameters:
            return [rows]
        return [{key: 2 for key, needed in parameters.items() if needed and key not in SUPPLIED}]


class _Opens:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def call(
    place: Place,
    name: str,
    attempts: list[dict[str, Any]],
    tokenizer: Any = None,
) -> int:
    """Give a recipe's ``extra`` section each of the *attempts*, as a run would; how many were not rejected."""
    num_called = 0
    recipe = place.run / "recipe.yaml"
    for arguments in attempts:
        recipe.write_text(yaml.safe_dump({"extra": {"_target_": name, **arguments}}))
        try:
            loaded = load_recipe(recipe, schema=cast(type[RecipeConfig], AnySection))
            loaded = check_targets(loaded, Trust())
        except RecipeError:
            continue
        num_called += 1
        with suppress(Exception):
            parameter = torch.nn.Parameter(torch.ones(2, 2))
            made = build(
                loaded.config.extra,
                tokenizer=tokenizer,
                processor=None,
                params=[parameter],
                reduction="sum",
            )
            use(made, parameter)
    return num_called


def use(made: Any, parameter: torch.nn.Parameter) -> None:
    rows = [{"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 1]}] * 2
    if isinstance(made, torch.optim.Optimizer):
        parameter.grad = torch.ones(2, 2)
        made.step()
    elif isinstance(made, torch.nn.Module):
        made(torch.zeros(2, 3), torch.tensor([1, 2]))
    elif hasattr(made, "to_dict"):
        made.to_dict()
    elif callable(made):
        made(rows)
    else:
        table = next(iter(made.values())) if isinstance(made, dict) else made
        next(iter(table))


def changed(place: Place) -> list[str]:
    """What is not as :meth:`Place.make` left it outside of the run directory."""
    there = sorted(os.listdir(place.outside))
    wrong = [] if there == ["victim"] else [f"outside: {there}"]
    victim = place.outside / "victim"
    if not victim.is_file() or victim.read_text() != "still here":
        wrong.append("the victim was changed")
    return wrong
