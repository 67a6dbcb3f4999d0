"""The attacks: each changes one copy of a checkpoint. A *class* is one idea, met by several readers."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from tests.hostile.harness import bombs
from tests.hostile.harness.readers import (
    ALL,
    CHECKS,
    EXPORTS,
    LISTS,
    OF_EXPORTS,
    PRUNES,
    RESUMES,
    VALUES,
)
from tests.hostile.harness.victim import NAME, Attacked, Document

Change = Callable[[Attacked], object]


@dataclass(frozen=True)
class Attack:
    """*readers* meet it, of them *refusing* must end with exit code 2 or 3; the others may, or be untouched by it. It
    changes a checkpoint of that *form* (:func:`tests.hostile.harness.victim.pristine`)."""

    kind: str
    name: str
    change: Change
    readers: frozenset[str]
    refusing: frozenset[str] = frozenset()
    form: str = "shards"


ATTACKS: list[Attack] = []

# Every class, and the readers that it applies to: those that come near the file or the value in question.
KINDS: dict[str, frozenset[str]] = {}
# Those that concern who reads tensors, recipes and small state.
_OF_VALUES = frozenset(
    {
        "pickle_in_dataloader",
        "pickle_in_step_scheduler",
        "pickle_in_distcp_value",
        "zip_bomb_tensor",
        "zip_bomb_pickle",
        "zip_overlapping_records",
        "storage_beyond_record",
        "path_of_a_slice",
        "hostile_fqn",
        "special_fifo",
        "special_link",
        "special_device",
        "link_on_the_way",
        "sparse_file",
        "slice_values",
        "slices_overlap",
        "shape",
        "manifest_malformed",
        "recipe_tags",
        "recipe_text",
    }
)


def add(
    kind: str,
    name: str,
    change: Change,
    readers: Iterable[str],
    refusing: Iterable[str] = (),
    form: str = "shards",
) -> None:
    """Enter an attack, and its readers into those of its class."""
    met = frozenset(readers) | (VALUES if kind in _OF_VALUES else frozenset())
    KINDS[kind] = KINDS.get(kind, frozenset()) | met
    ATTACKS.append(Attack(kind, name, change, met, frozenset(refusing), form))


VERIFIED = RESUMES - {"resume_unverified"}
PARSERS = ALL - {"ls", "ls_json", "prune", "restore_from_LATEST"}
SUMMARIES = frozenset({"ls", "ls_json", "prune"})


# ---------------------------------------------------------------- pickles


def _pickles() -> None:
    names = list(bombs.executing_state(Path("x")))
    places = {
        "dataloader": "dataloader/dataloader_dp_rank_0.pt",
        "rng": "rng/rng_dp_rank_0.pt",
        "step_scheduler": "step_scheduler.pt",
        "attribute": "tracker.pt",
    }

    def state(case: Attacked, name: str) -> bytes:
        return bombs.executing_state(case.marker)[name]

    for number, (label, path) in enumerate(places.items()):
        chosen = names if label == "attribute" else [names[number + 3], "archived_stack_global"]
        for name in chosen:
            readers = RESUMES if name != "archived_reduce" else ALL
            change = partial(
                lambda case, path, name: case.replace(path, state(case, name)), path=path, name=name
            )
            add(f"pickle_in_{label}", name, change, readers, RESUMES)
        add(f"pickle_in_{label}", "everywhere", change, ALL, RESUMES)
    for tree, label in (("optimizer", "distcp_value"), ("model", "objects_bin")):
        for name in names:
            readers = ALL if name == "archived_reduce" else RESUMES
            change = partial(
                lambda case, tree, name: case.replace_blob(tree, state(case, name)),
                tree=tree,
                name=name,
            )
            add(f"pickle_in_{label}", name, change, readers, RESUMES)
    for name in ("reduce", "stack_global", "build", "import"):
        readers = ALL if name == "reduce" else RESUMES | CHECKS
        change = partial(
            lambda case, name: case.replace(
                "optim/.metadata", bombs.executing_pickles(case.marker)[name]
            ),
            name=name,
        )
        add("pickle_in_metadata", name, change, readers)
        add("pickle_in_foreign_files", name, partial(_foreign_pickles, name=name), ALL)


def _foreign_pickles(case: Attacked, name: str) -> None:
    data = bombs.executing_state(case.marker)["archived_" + name]
    for path in (
        "extra.pt",
        "model/.metadata",
        "optim/__9_0.distcp",
        "model/pytorch_model.bin",
        "training_args.bin",
    ):
        (case.checkpoint / path).write_bytes(data)


def _bombs() -> None:
    made: dict[str, Callable[[], bytes]] = {
        "zip_bomb_tensor": bombs.compressed_tensor,
        "zip_bomb_pickle": bombs.compressed_pickle,
        "zip_overlapping_records": bombs.overlapping_records,
        "storage_beyond_record": bombs.storage_beyond_its_record,
    }
    for kind, data in made.items():
        add(
            kind,
            "tracker",
            partial(lambda case, data: case.replace("tracker.pt", data()), data=data),
            RESUMES | CHECKS | {"consolidate", "show"},
            RESUMES,
        )
        add(
            kind,
            "distcp_value",
            partial(lambda case, data: case.replace_blob("optimizer", data()), data=data),
            RESUMES,
            RESUMES,
        )
        add(
            kind,
            "objects_bin",
            partial(lambda case, data: case.replace_blob("model", data()), data=data),
            RESUMES | EXPORTS,
            RESUMES,
        )
    for name, program in bombs.large_allocations().items():
        change = partial(lambda case, program: case.replace("tracker.pt", program), program=program)
        refusing = RESUMES if name not in ("memo_index", "frame_stated") else ()
        add("pickle_allocations", name, change, RESUMES, refusing)


# ---------------------------------------------------------------- paths

HOSTILE_PATHS = {
    "parent": "../../outside/secret.json",
    "deep_parent": "model/../../../outside/secret.json",
    "absolute": "/etc/passwd",
    "nul": "model/a\0b",
    "backslash": "..\\..\\outside\\secret.json",
    "empty": "",
    "dot": "./tracker.pt",
    "double_slash": "model//a",
    "trailing_slash": "model/",
    "device": "/dev/zero",
    "surrogate": "model/\ud800.safetensors",
    "escape": "model/\x1b]0;owned\x07\x1b[31m",
    "newline": "a\nb",
    "long": "a" * 5000,
    "proc": "/proc/self/environ",
    "home": "~/.bashrc",
    "variable": "$HOME/x",
    "right_to_left": "model/\u202egnp.bin",
}


def _rename_file(document: Document, old: str, new: str) -> None:
    """The same manifest with another name for a file, everywhere."""
    document["files"][new] = document["files"].pop(old)
    for tree in document["trees"].values():
        pieces = [piece for tensor in tree["tensors"].values() for piece in tensor["slices"]]
        for piece in [*pieces, *tree["objects"].values()]:
            piece["file"] = new if piece["file"] == old else piece["file"]
    for record in document["state"].values():
        record["files"] = [new if file == old else file for file in record["files"]]


def _paths() -> None:
    def shard(case: Attacked, path: str) -> None:
        old = case.shard.relative_to(case.checkpoint).as_posix()
        case.reseal(lambda document: _rename_file(document, old, path))

    def state(case: Attacked, path: str) -> None:
        case.reseal(lambda document: _rename_file(document, "tracker.pt", path))

    for name, path in HOSTILE_PATHS.items():
        readers = (
            ALL
            if name in ("parent", "absolute", "nul", "surrogate", "escape")
            else RESUMES | EXPORTS | CHECKS
        )
        refusing = (PARSERS | RESUMES) & (readers - LISTS - PRUNES)
        add("path_of_a_slice", name, partial(shard, path=path), readers, refusing)
        add(
            "path_of_a_state",
            name,
            partial(state, path=path),
            readers,
            RESUMES | (CHECKS & readers),
        )
    for name in ("parent", "absolute", "surrogate", "escape", "nul"):
        add("hostile_state_path", name, partial(_state_path, path=HOSTILE_PATHS[name]), ALL)
        add("hostile_tree_name", name, partial(_tree_name, name=HOSTILE_PATHS[name]), ALL, RESUMES)
        add("hostile_fqn", name, partial(_fqn, name=HOSTILE_PATHS[name]), ALL, RESUMES)


def _state_path(case: Attacked, path: str) -> None:
    def change(document: Document) -> None:
        for record in document["state"].values():
            record["path"] = path

    case.reseal(change)


def _tree_name(case: Attacked, name: str) -> None:
    def change(document: Document) -> None:
        document["trees"][name] = document["trees"].pop("model")
        document["state"][name] = document["state"].pop("model")

    case.reseal(change)


def _fqn(case: Attacked, name: str) -> None:
    def change(document: Document) -> None:
        tree = document["trees"]["model"]
        tree["tensors"][name] = tree["tensors"].pop("frozen")
        tree["tied"] = {f"{name}/{name}": "embed"}

    case.reseal(change)


# ---------------------------------------------------------------- special files


def _special(path: Path, kind: str, outside: Path) -> None:
    """Put a file that is none in the place of *path*."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    path.parent.mkdir(exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        _bind(path)
    elif kind == "link_outside":
        path.symlink_to(outside / "secret.json")
    elif kind == "link_to_zero":
        path.symlink_to("/dev/zero")
    elif kind == "link_to_itself":
        path.symlink_to(path.name)
    elif kind == "link_to_fifo":
        os.mkfifo(outside / "pipe")
        path.symlink_to(outside / "pipe")
    else:
        device = {"zero": (0o020000, 1, 5), "null": (0o020000, 1, 3), "block": (0o060000, 7, 250)}[
            kind
        ]
        os.mknod(path, device[0] | 0o600, os.makedev(*device[1:]))


def _bind(path: Path) -> None:
    """A socket; through a short name, which is all that the system takes."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{descriptor}/{path.name}")
    finally:
        os.close(descriptor)


def _sort(kind: str) -> str:
    return (
        "link"
        if kind.startswith("link")
        else "device"
        if kind in ("zero", "null", "block")
        else kind
    )


SPECIALS = (
    "fifo",
    "directory",
    "socket",
    "link_outside",
    "link_to_zero",
    "link_to_itself",
    "link_to_fifo",
    "zero",
    "null",
    "block",
)


EXPORTED = (
    "export_manifest.json",
    "model-00001-of-00001.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "processor_config.json",
    "chat_template.jinja",
    "adapter_model.safetensors",
    "adapter_config.json",
    "automodel_peft_config.json",
)


def _specials() -> None:
    def in_checkpoint(case: Attacked, path: str, kind: str) -> None:
        _special(case.checkpoint / path, kind, case.outside)

    def shard(case: Attacked, kind: str) -> None:
        _special(case.shard, kind, case.outside)

    for kind in SPECIALS:
        add(
            f"special_{_sort(kind)}",
            f"{kind}_MANIFEST.json",
            partial(in_checkpoint, path="MANIFEST.json", kind=kind),
            ALL,
            ALL - SUMMARIES - {"drop_optimizer", "restore_from_LATEST"} | {"restore_from_path"},
        )
        add(
            f"special_{_sort(kind)}",
            f"{kind}_shard",
            partial(shard, kind=kind),
            RESUMES | CHECKS | EXPORTS,
            RESUMES | CHECKS | EXPORTS,
        )
        for path in ("tracker.pt", "optim/__0_0.distcp", "model/objects-00001.bin"):
            add(
                f"special_{_sort(kind)}",
                f"{kind}_{path}",
                partial(in_checkpoint, path=path, kind=kind),
                RESUMES | CHECKS,
                RESUMES | CHECKS,
            )
        for path in ("model/.hf_metadata/config.json", "model/.hf_metadata/tokenizer.json"):
            add(
                f"special_{_sort(kind)}",
                f"{kind}_{path}",
                partial(in_checkpoint, path=path, kind=kind),
                EXPORTS | CHECKS,
                EXPORTS | CHECKS,
            )
        for path in (
            "model/.hf_metadata/fqn_to_file_index_mapping.json",
            "model/.hf_metadata/foreign.py",
        ):
            add(
                "special_foreign",
                f"{kind}_{path}",
                partial(in_checkpoint, path=path, kind=kind),
                EXPORTS | CHECKS,
            )
        add(
            f"special_{_sort(kind)}",
            f"{kind}_config.yaml",
            partial(in_checkpoint, path="config.yaml", kind=kind),
            RESUMES | CHECKS,
            VERIFIED | CHECKS,
        )
        for path in EXPORTED:
            add(
                "special_in_export",
                f"{kind}_{path}",
                partial(in_checkpoint, path=f"model/consolidated/{path}", kind=kind),
                CHECKS | EXPORTS | OF_EXPORTS,
            )


def _links_on_the_way() -> None:
    def replaced(case: Attacked, path: str) -> None:
        """The directory itself stands outside, a link in its place."""
        directory = case.checkpoint / path
        directory.rename(case.outside / directory.name)
        directory.symlink_to(case.outside / directory.name)

    for path in ("model", "optim", "rng", "dataloader"):
        readers = RESUMES | CHECKS | (EXPORTS if path == "model" else frozenset())
        add(
            "link_on_the_way",
            path,
            partial(replaced, path=path),
            readers,
            RESUMES | CHECKS | (readers & {"tool"}),
        )
    add(
        "link_on_the_way",
        ".hf_metadata",
        partial(replaced, path="model/.hf_metadata"),
        EXPORTS | CHECKS,
        EXPORTS,
    )
    add(
        "link_on_the_way",
        "consolidated",
        partial(replaced, path="model/consolidated"),
        EXPORTS | CHECKS,
    )


def _sparse() -> None:
    def grown(case: Attacked, path: str, size: int) -> None:
        os.truncate(case.checkpoint / path, size)
        case.reseal(lambda document: document["files"][path].update(size=size))

    def grown_export(case: Attacked) -> None:
        path = case.model / "consolidated" / "config.json"
        os.truncate(path, 1 << 40)
        text = (
            (path.parent / "export_manifest.json")
            .read_text()
            .replace('"size": ', '"size": 1099511627776, "s": ')
        )
        (path.parent / "export_manifest.json").write_text(text)

    for path in (
        "tracker.pt",
        "optim/__0_0.distcp",
        "config.yaml",
        "model/.hf_metadata/config.json",
    ):
        readers = RESUMES | CHECKS | {"show", "ls"} | (EXPORTS if "model" in path else frozenset())
        add(
            "sparse_file",
            path,
            partial(grown, path=path, size=1 << 40),
            readers,
            (VERIFIED | CHECKS) & readers,
        )
    add("sparse_file", "consolidated", grown_export, CHECKS | EXPORTS | OF_EXPORTS)
    add(
        "sparse_manifest",
        "MANIFEST.json",
        lambda case: os.truncate(case.manifest, 1 << 40),
        ALL,
        CHECKS,
    )
    add(
        "sparse_manifest", "400_MB", lambda case: os.truncate(case.manifest, 400 << 20), ALL, CHECKS
    )
    foreign = "model/.hf_metadata/fqn_to_dtype_mapping.json"
    add("sparse_foreign_file", "map", partial(_sparse_foreign, path=foreign), EXPORTS | CHECKS)
    add(
        "sparse_foreign_file",
        "side",
        partial(_sparse_foreign, path="model/.hf_metadata/x.py"),
        EXPORTS | CHECKS,
    )


def _sparse_foreign(case: Attacked, path: str) -> None:
    with open(case.checkpoint / path, "wb") as file:
        file.truncate(200 << 20 if path.endswith("json") else 1 << 40)


# ---------------------------------------------------------------- values in the manifest


def _slices() -> None:
    values: dict[str, dict[str, Any]] = {
        "out_of_file": {"start": 10**6},
        "negative_start": {"start": -1},
        "negative_size": {"sizes": [-7, 4]},
        "giant_start": {"start": 2**63},
        "giant_bytes": {"nbytes": 2**62},
        "giant_offsets": {"offsets": [2**62, 0]},
        "giant_sizes": {"sizes": [2**40, 2**40]},
        "float": {"start": 8.0},
        "boolean": {"start": True},
        "text": {"nbytes": "112"},
        "null": {"file": None},
        "list": {"file": ["a"]},
        "too_few": {"offsets": [0]},
        "overlapping_header": {"start": 0},
        "hundreds_of_digits": {"start": 10**4200},
    }

    def change(case: Attacked, value: dict[str, Any]) -> None:
        case.reseal(lambda document: case.slice_of(document).update(value))

    def shaped(case: Attacked, shape: list[int]) -> None:
        def grow(document: Document) -> None:
            tensor = document["trees"]["model"]["tensors"]["embed"]
            tensor["shape"] = shape
            tensor["slices"][0].update(offsets=[0] * len(shape), sizes=shape)

        case.reseal(grow)

    def twice(case: Attacked) -> None:
        case.reseal(
            lambda document: document["trees"]["model"]["tensors"]["embed"]["slices"].append(
                case.slice_of(document)
            )
        )

    def many(case: Attacked) -> None:
        """An empty tensor may have any number of empty slices; a full one of a hundred thousand that share a row."""

        def change(document: Document) -> None:
            tensor = document["trees"]["model"]["tensors"]["embed"]
            piece = {**tensor["slices"][0], "sizes": [7, 0], "nbytes": 0}
            tensor["slices"] = [tensor["slices"][0]] + [piece] * 30_000

        case.reseal(change)

    def quadratic(case: Attacked) -> None:
        def change(document: Document) -> None:
            tensor = document["trees"]["model"]["tensors"]["embed"]
            count = 20_000
            tensor["shape"], tensor["dtype"] = [count, count], "BOOL"
            tensor["slices"] = [
                {
                    **tensor["slices"][0],
                    "offsets": [0, i],
                    "sizes": [count, 1],
                    "nbytes": count,
                    "start": 0,
                }
                for i in range(count)
            ]

        case.reseal(change)

    everyone = PARSERS
    for name, value in values.items():
        refusing = everyone - PRUNES if name != "overlapping_header" else VERIFIED & {"verify_deep"}
        add("slice_values", name, partial(change, value=value), everyone, refusing)
    add("slices_overlap", "twice", twice, everyone, everyone - PRUNES)
    add("slices_many", "empty", many, everyone)
    add("slices_many", "quadratic", quadratic, everyone, everyone - PRUNES)
    for name, shape in {
        "giant": [10**4200, 10**4200],
        "many_dimensions": [1] * 100_000,
        "zero": [0, 2**62],
        "product": [2**62] * 50,
    }.items():
        add("shape", name, partial(shaped, shape=shape), everyone, everyone - PRUNES)


def _values() -> None:
    deep: Any = 0
    for _ in range(900):
        deep = [deep]
    values = {
        "digits": 10**4200,
        "nan": float("nan"),
        "infinite": float("inf"),
        "negative": -1,
        "text": "\x1b[31m\ud800",
        "deep": deep,
        "null": None,
        "long": "x" * 10**6,
        "mapping": {"\x1b[2J": {"\ud800": 1e308}},
        "huge": 2**70,
    }
    for name, value in values.items():
        sort = {int: "numbers", float: "numbers", str: "texts"}.get(type(value), "nesting")
        for key in ("step", "epoch", "created", "world_size", "dp_size"):
            add(
                f"manifest_{sort}",
                f"{name}_{key}",
                partial(_set, key=key, value=value),
                ALL if key == "created" else LISTS,
            )
        for key in ("losses", "progress", "environment", "lineage"):
            add(f"manifest_{sort}", f"{name}_{key}_is", partial(_set, key=key, value=value), LISTS)
            add(
                f"manifest_{sort}",
                f"{name}_in_{key}",
                partial(_set_in, key=key, value=value),
                ALL if key in ("losses", "lineage") else LISTS,
            )
        add(f"manifest_{sort}", f"{name}_size", partial(_set_size, value=value), ALL)
        add(
            f"manifest_{sort}",
            f"{name}_digest",
            partial(_set_digest, value=value),
            RESUMES | CHECKS | EXPORTS,
        )
    for key in ("state", "trees", "files"):
        for value in ([], {"a": 1}, {"a": []}, None, "text", {"a": {"size": {}}}):
            add(
                "manifest_section",
                f"{key}_{value!r}".replace(" ", ""),
                partial(_set, key=key, value=value),
                ALL,
            )


def _set(case: Attacked, key: str, value: Any) -> None:
    case.reseal(lambda document: document.update({key: value}))


def _set_in(case: Attacked, key: str, value: Any) -> None:
    names = ("val_loss", "train_loss", "restore_from", "consumed_samples", "git_commit")
    case.reseal(lambda document: document[key].update(dict.fromkeys(names, value)))


def _set_size(case: Attacked, value: Any) -> None:
    case.reseal(lambda document: document["files"]["tracker.pt"].update(size=value))


def _set_digest(case: Attacked, value: Any) -> None:
    case.reseal(lambda document: document["files"]["tracker.pt"].update(digest=value))


def _texts() -> None:
    part = 1 if bombs.EVERY else 5
    texts: dict[str, Callable[[], bytes]] = {
        "deep_lists": lambda: b'{"a":' + b"[" * 3_000_000,
        "deep_mappings": lambda: b'{"a":' * 1_000_000,
        "many_mappings": lambda: b'{"a":[' + b"{}," * (30_000_000 // part) + b"{}]",
        "many_lists": lambda: b'{"a":[' + b"[]," * (5_000_000 // part) + b"[]]",
        "many_keys": lambda: (
            b'{"a":{' + b",".join(b'"%d":[]' % i for i in range(1_000_000 // part)) + b"}"
        ),
        "many_numbers": lambda: b'{"a":[' + b"1e9," * (20_000_000 // part) + b"1]",
        "long_text": lambda: b'{"a":"' + b"x" * (100_000_000 // part) + b'"',
        "digits": lambda: b'{"a":' + b"9" * 10_000_000,
        "invalid_utf8": lambda: b'{"format":"automodel_ckpt","a":"\xff\xfe\xc0"',
        "utf16": lambda: '{"format":"automodel_ckpt"'.encode("utf-16"),
        "surrogate_key": lambda: b'{"format":"automodel_ckpt","\\ud800":1',
        "not_a_mapping": lambda: b'["automodel_ckpt"',
        "nothing": lambda: b"",
        "zeros": lambda: bytes(1000),
        "version_of_digits": lambda: b'{"format":"automodel_ckpt","format_version":' + b"1" * 1000,
        "version_zero": lambda: b'{"format":"automodel_ckpt","format_version":0',
        "version_superscript": lambda: (
            '{"format":"automodel_ckpt","format_version":²,"a":1'.encode()
        ),
        "duplicate_keys": lambda: (
            b'{"format":"automodel_ckpt","format":"automodel_ckpt","step":1,"step":2'
        ),
    }
    for name, text in texts.items():
        sort = "bombs" if name.startswith(("deep", "many", "long", "digits")) else "malformed"
        add(
            f"manifest_{sort}",
            name,
            partial(lambda case, text: case.seal(text()), text=text),
            ALL,
            CHECKS | LISTS - {"ls", "ls_json"},
        )


def entries() -> None:
    """Fill the table."""
    from tests.hostile.harness import attacks_export, attacks_forms, attacks_run, attacks_tables

    _pickles()
    _bombs()
    _paths()
    _specials()
    _links_on_the_way()
    _sparse()
    _slices()
    _values()
    _texts()
    attacks_export.entries(add)
    attacks_run.entries(add)
    attacks_forms.entries(add)
    attacks_tables.entries(add)


__all__ = ["ATTACKS", "KINDS", "NAME", "Attack", "add", "entries", "layout"]
