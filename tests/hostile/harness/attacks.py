"""The attacks: each changes one copy of a checkpoint. A *class* is one idea, met by several readers."""

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
_OF_VALUES = {
    *("pickle_in_dataloader", "pickle_in_step_scheduler", "pickle_in_distcp_value"),
    *("zip_bomb_tensor", "zip_bomb_pickle", "zip_overlapping_records", "storage_beyond_record"),
    *("path_of_a_slice", "hostile_fqn", "special_fifo", "special_link", "special_device"),
    *("link_on_the_way", "sparse_file", "slice_values", "slices_overlap", "shape"),
    *("manifest_malformed", "recipe_tags", "recipe_text"),
}


def add(
    kind: str,
    name: str,
    change: Callable[..., object],
    readers: Iterable[str],
    refusing: Iterable[str] = (),
    form: str = "shards",
    **given: Any,
) -> None:
    """Enter an attack, and its readers into those of its class. *change* gets the case and what is *given*."""
    met = frozenset(readers) | (VALUES if kind in _OF_VALUES else frozenset())
    KINDS[kind] = KINDS.get(kind, frozenset()) | met
    ATTACKS.append(Attack(kind, name, partial(change, **given), met, frozenset(refusing), form))


def put(case: Attacked, path: str, data: bytes | Callable[[], bytes]) -> None:
    """Another content of a file of the checkpoint, with the digest that fits."""
    case.replace(path, data if isinstance(data, bytes) else data())


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

    def file(case: Attacked, path: str, state: str) -> None:
        case.replace(path, bombs.executing_state(case.marker)[state])

    def blob(case: Attacked, tree: str, state: str) -> None:
        case.replace_blob(tree, bombs.executing_state(case.marker)[state])

    def metadata(case: Attacked, state: str) -> None:
        case.replace("optim/.metadata", bombs.executing_pickles(case.marker)[state])

    for number, (label, path) in enumerate(places.items()):
        chosen = names if label == "attribute" else [names[number + 3], "archived_stack_global"]
        for name in chosen:
            readers = RESUMES if name != "archived_reduce" else ALL
            add(f"pickle_in_{label}", name, file, readers, RESUMES, path=path, state=name)
        add(f"pickle_in_{label}", "everywhere", file, ALL, RESUMES, path=path, state=chosen[-1])
    for tree, label in (("optimizer", "distcp_value"), ("model", "objects_bin")):
        for name in names:
            readers = ALL if name == "archived_reduce" else RESUMES
            add(f"pickle_in_{label}", name, blob, readers, RESUMES, tree=tree, state=name)
    for name in ("reduce", "stack_global", "build", "import"):
        readers = ALL if name == "reduce" else RESUMES | CHECKS
        add("pickle_in_metadata", name, metadata, readers, state=name)
        add("pickle_in_foreign_files", name, _foreign_pickles, ALL, pickled=name)


def _foreign_pickles(case: Attacked, pickled: str) -> None:
    data = bombs.executing_state(case.marker)["archived_" + pickled]
    in_directories = ("model/.metadata", "optim/__9_0.distcp", "model/pytorch_model.bin")
    for path in ("extra.pt", "training_args.bin", *in_directories):
        (case.checkpoint / path).write_bytes(data)


def _bombs() -> None:
    made: dict[str, Callable[[], bytes]] = {
        "zip_bomb_tensor": bombs.compressed_tensor,
        "zip_bomb_pickle": bombs.compressed_pickle,
        "zip_overlapping_records": bombs.overlapping_records,
        "storage_beyond_record": bombs.storage_beyond_its_record,
    }

    def blob(case: Attacked, tree: str, data: Callable[[], bytes]) -> None:
        case.replace_blob(tree, data())

    readers = RESUMES | CHECKS | {"consolidate", "show"}
    for kind, data in made.items():
        add(kind, "tracker", put, readers, RESUMES, path="tracker.pt", data=data)
        add(kind, "distcp_value", blob, RESUMES, RESUMES, tree="optimizer", data=data)
        add(kind, "objects_bin", blob, RESUMES | EXPORTS, RESUMES, tree="model", data=data)
    for name, program in bombs.large_allocations().items():
        refusing = RESUMES if name not in ("memo_index", "frame_stated") else ()
        add("pickle_allocations", name, put, RESUMES, refusing, path="tracker.pt", data=program)


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
        add("path_of_a_slice", name, shard, readers, refusing, path=path)
        add("path_of_a_state", name, state, readers, RESUMES | (CHECKS & readers), path=path)
    for name in ("parent", "absolute", "surrogate", "escape", "nul"):
        path = HOSTILE_PATHS[name]
        add("hostile_state_path", name, _state_path, ALL, path=path)
        add("hostile_tree_name", name, _tree_name, ALL, RESUMES, tree=path)
        add("hostile_fqn", name, _fqn, ALL, RESUMES, fqn=path)


def _state_path(case: Attacked, path: str) -> None:
    def change(document: Document) -> None:
        for record in document["state"].values():
            record["path"] = path

    case.reseal(change)


def _tree_name(case: Attacked, tree: str) -> None:
    def change(document: Document) -> None:
        document["trees"][tree] = document["trees"].pop("model")
        document["state"][tree] = document["state"].pop("model")

    case.reseal(change)


def _fqn(case: Attacked, fqn: str) -> None:
    def change(document: Document) -> None:
        tree = document["trees"]["model"]
        tree["tensors"][fqn] = tree["tensors"].pop("frozen")
        tree["tied"] = {f"{fqn}/{fqn}": "embed"}

    case.reseal(change)


# ---------------------------------------------------------------- special files


_DEVICES = {"zero": (0o020000, 1, 5), "null": (0o020000, 1, 3), "block": (0o060000, 7, 250)}


def special(path: Path, kind: str, outside: Path) -> None:
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
        mode, *numbers = _DEVICES[kind]
        os.mknod(path, mode | 0o600, os.makedev(*numbers))


def _bind(path: Path) -> None:
    """A socket; through a short name, which is all that the system takes."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{descriptor}/{path.name}")
    finally:
        os.close(descriptor)


def _sort(kind: str) -> str:
    if kind.startswith("link"):
        return "link"
    return "device" if kind in _DEVICES else kind


LINKS = ("link_outside", "link_to_zero", "link_to_itself", "link_to_fifo")
SPECIALS = ("fifo", "directory", "socket", *LINKS, *_DEVICES)
EXPORTED = (
    *("export_manifest.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"),
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("processor_config.json", "chat_template.jinja", "adapter_model.safetensors"),
    *("adapter_config.json", "automodel_peft_config.json"),
)


def _specials() -> None:
    def replaced(case: Attacked, path: str, file: str) -> None:
        special(case.checkpoint / path, file, case.outside)

    def shard(case: Attacked, file: str) -> None:
        special(case.shard, file, case.outside)

    of_all = ALL - SUMMARIES - {"drop_optimizer", "restore_from_LATEST"} | {"restore_from_path"}
    of_state, of_sides = RESUMES | CHECKS, EXPORTS | CHECKS
    of_weights = RESUMES | CHECKS | EXPORTS
    refused = {
        "MANIFEST.json": (ALL, of_all),
        **dict.fromkeys(
            ("tracker.pt", "optim/__0_0.distcp", "model/objects-00001.bin"), (of_state, of_state)
        ),
        "model/.hf_metadata/config.json": (of_sides, of_sides),
        "model/.hf_metadata/tokenizer.json": (of_sides, of_sides),
        "config.yaml": (of_state, VERIFIED | CHECKS),
    }
    for kind in SPECIALS:
        sort = f"special_{_sort(kind)}"
        add(sort, f"{kind}_shard", shard, of_weights, of_weights, file=kind)
        for path, (readers, refusing) in refused.items():
            add(sort, f"{kind}_{path}", replaced, readers, refusing, path=path, file=kind)
        for name in ("fqn_to_file_index_mapping.json", "foreign.py"):
            path = f"model/.hf_metadata/{name}"
            add("special_foreign", f"{kind}_{path}", replaced, of_sides, path=path, file=kind)
        for name in EXPORTED:
            path = f"model/consolidated/{name}"
            readers = CHECKS | EXPORTS | OF_EXPORTS
            add("special_in_export", f"{kind}_{name}", replaced, readers, path=path, file=kind)


def _links_on_the_way() -> None:
    def replaced(case: Attacked, path: str) -> None:
        """The directory itself stands outside, a link in its place."""
        directory = case.checkpoint / path
        directory.rename(case.outside / directory.name)
        directory.symlink_to(case.outside / directory.name)

    for path in ("model", "optim", "rng", "dataloader"):
        readers = RESUMES | CHECKS | (EXPORTS if path == "model" else frozenset())
        refusing = RESUMES | CHECKS | (readers & {"tool"})
        add("link_on_the_way", path, replaced, readers, refusing, path=path)
    for name, refusing in ((".hf_metadata", EXPORTS), ("consolidated", frozenset())):
        readers = EXPORTS | CHECKS
        add("link_on_the_way", name, replaced, readers, refusing, path=f"model/{name}")


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

    def manifest(case: Attacked, size: int) -> None:
        os.truncate(case.manifest, size)

    def foreign(case: Attacked, side_file: str, size: int) -> None:
        with open(case.model / ".hf_metadata" / side_file, "wb") as file:
            file.truncate(size)

    files = ("tracker.pt", "optim/__0_0.distcp", "config.yaml", "model/.hf_metadata/config.json")
    for path in files:
        readers = RESUMES | CHECKS | {"show", "ls"} | (EXPORTS if "model" in path else frozenset())
        refusing = (VERIFIED | CHECKS) & readers
        add("sparse_file", path, grown, readers, refusing, path=path, size=1 << 40)
    add("sparse_file", "consolidated", grown_export, CHECKS | EXPORTS | OF_EXPORTS)
    add("sparse_manifest", "MANIFEST.json", manifest, ALL, CHECKS, size=1 << 40)
    add("sparse_manifest", "400_MB", manifest, ALL, CHECKS, size=400 << 20)
    sizes = {"fqn_to_dtype_mapping.json": 200 << 20, "x.py": 1 << 40}
    for name, size in sizes.items():
        label = "map" if "map" in name else "side"
        of_sides = EXPORTS | CHECKS
        add("sparse_foreign_file", label, foreign, of_sides, side_file=name, size=size)


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
            column = {**tensor["slices"][0], "sizes": [count, 1], "nbytes": count, "start": 0}
            tensor["slices"] = [{**column, "offsets": [0, i]} for i in range(count)]

        case.reseal(change)

    everyone = PARSERS
    for name, value in values.items():
        refusing = everyone - PRUNES if name != "overlapping_header" else VERIFIED & {"verify_deep"}
        add("slice_values", name, change, everyone, refusing, value=value)
    add("slices_overlap", "twice", twice, everyone, everyone - PRUNES)
    add("slices_many", "empty", many, everyone)
    add("slices_many", "quadratic", quadratic, everyone, everyone - PRUNES)
    shapes = {"giant": [10**4200, 10**4200], "many_dimensions": [1] * 100_000}
    shapes |= {"zero": [0, 2**62], "product": [2**62] * 50}
    for name, shape in shapes.items():
        add("shape", name, shaped, everyone, everyone - PRUNES, shape=shape)


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
        kind = f"manifest_{sort}"
        for key in ("step", "epoch", "created", "world_size", "dp_size"):
            readers = ALL if key == "created" else LISTS
            add(kind, f"{name}_{key}", _set, readers, key=key, value=value)
        for key in ("losses", "progress", "environment", "lineage"):
            readers = ALL if key in ("losses", "lineage") else LISTS
            add(kind, f"{name}_{key}_is", _set, LISTS, key=key, value=value)
            add(kind, f"{name}_in_{key}", _set_in, readers, key=key, value=value)
        readers = RESUMES | CHECKS | EXPORTS
        add(kind, f"{name}_size", _set_of_file, ALL, key="size", value=value)
        add(kind, f"{name}_digest", _set_of_file, readers, key="digest", value=value)
    for key in ("state", "trees", "files"):
        for value in ([], {"a": 1}, {"a": []}, None, "text", {"a": {"size": {}}}):
            name = f"{key}_{value!r}".replace(" ", "")
            add("manifest_section", name, _set, ALL, key=key, value=value)


def _set(case: Attacked, key: str, value: Any) -> None:
    case.reseal(lambda document: document.update({key: value}))


def _set_in(case: Attacked, key: str, value: Any) -> None:
    names = ("val_loss", "train_loss", "restore_from", "consumed_samples", "git_commit")
    case.reseal(lambda document: document[key].update(dict.fromkeys(names, value)))


def _set_of_file(case: Attacked, key: str, value: Any) -> None:
    case.reseal(lambda document: document["files"]["tracker.pt"].update({key: value}))


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

    def seal(case: Attacked, text: Callable[[], bytes]) -> None:
        case.seal(text())

    refusing = CHECKS | LISTS - {"ls", "ls_json"}
    for name, text in texts.items():
        sort = "bombs" if name.startswith(("deep", "many", "long", "digits")) else "malformed"
        add(f"manifest_{sort}", name, seal, ALL, refusing, text=text)


def entries() -> None:
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
