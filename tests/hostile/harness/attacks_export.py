"""Attacks on what an export reads: side files, shards without a manifest, and an earlier export's own manifest."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files.durable_file import digest_of
from tests.hostile.harness import attacks_dcp, bombs
from tests.hostile.harness.readers import ALL, CHECKS, EXPORTS, IMPORTS, OF_EXPORTS, RESUMES
from tests.hostile.harness.victim import Attacked

Add = Callable[..., None]
Texts = dict[str, Callable[[], bytes]]
HEADERS = EXPORTS
_SHOWS = frozenset({"ls", "show", "show_stats"})
_CODE = b"import os; os.system('touch marker')"
_SIDE = "model/.hf_metadata"
_NAMES = (
    *("../../../outside/x", "/etc/cron.d/x", "a\0b", "..", "\x1b[2J"),
    "model-00001-of-00001.safetensors/../../x",
)


def _deep(count: int = 2_000_000) -> bytes:
    return b'{"a":' + b"[" * count


TEXTS: Texts = {
    "deep": _deep,
    "digits": lambda: b'{"embed":' + b"9" * 100_000 + b"}",
    "negative": lambda: b'{"embed":-1}',
    "giant": lambda: b'{"embed":%d}' % 10**4000,
    "float": lambda: b'{"embed":1e999}',
    "not_a_mapping": lambda: b"[1]",
    "invalid_utf8": lambda: b'{"\xff":1}',
    "surrogate": lambda: b'{"\\ud800":1}',
    "nothing": lambda: b"",
    "nan": lambda: b'{"embed":NaN}',
    "null": lambda: b"null",
    "many_mappings": lambda: (
        b'{"a":[' + b"{}," * (30_000_000 if bombs.EVERY else 6_000_000) + b"{}]}"
    ),
    "pickle": lambda: b"cos\nsystem\n(S'touch marker'\ntR.",
    "yaml": lambda: b"!!python/object/apply:os.system ['touch marker']\n",
}


def _replace_side(case: Attacked, file: str, data: bytes | Callable[[], bytes]) -> None:
    case.replace(f"{_SIDE}/{file}", data if isinstance(data, bytes) else data())


def _write_side(case: Attacked, file: str, data: bytes) -> None:
    (case.checkpoint / _SIDE / file).write_bytes(data)


def _maps(add: Add) -> None:
    from tests.hostile.harness.attacks import put

    names: dict[str, Any] = {
        "fqn_to_file_index_mapping.json": lambda name: {"embed": name, "head": name},
        "fqn_to_dtype_mapping.json": lambda name: {"embed": name},
        "expected_tensors.json": lambda name: {name: {"shape": [1]}},
        "config.json": lambda name: {
            "auto_map": {"AutoModel": name},
            "dtype": name,
            "tie_word_embeddings": name,
        },
    }
    takers = EXPORTS | IMPORTS
    for file, content in names.items():
        for text, data in TEXTS.items():
            sort = "bombs" if text in ("deep", "digits", "many_mappings") else "texts"
            name = f"{text}_{file}"
            add(f"side_file_{sort}", name, _replace_side, takers, file=file, data=data)
        for path in _NAMES:
            value = json.dumps(content(path)).encode()
            name = f"{file}_{path!r}"
            add("hostile_name_in_side_files", name, _replace_side, takers, file=file, data=value)
    for shape in ([10**4000], [-1], [2**62] * 60, "text", [1.5], [[1]]):
        given = {
            "file": "expected_tensors.json",
            "data": json.dumps({"embed": {"shape": shape}}).encode(),
        }
        name = str(shape)[:20].replace(" ", "")
        add("expected_shape", name, _replace_side, EXPORTS, EXPORTS, **given)
    readers = EXPORTS | CHECKS | IMPORTS
    for file in (
        *("modeling_hostile.py", "tokenizer.py", "hostile.pth", "sitecustomize.py", "json.py"),
        *("model-00001-of-00001.safetensors", "export_manifest.json", "pytorch_model.bin"),
    ):
        given = {"file": file, "data": _CODE}
        add("side_file_with_code", f"{file}_named", _replace_side, readers, **given)
        add("side_file_with_code", f"{file}_foreign", _write_side, readers, EXPORTS, **given)

    def unsealed(case: Attacked) -> None:
        (case.model / "consolidate.sh").write_text("exit 3")

    script = {"path": "model/consolidate.sh", "data": b"touch marker"}
    add("consolidate_sh_replaced", "sealed", put, ALL, **script)
    refusing = CHECKS | {"resume", "restore_from_path"}
    add("consolidate_sh_replaced", "unsealed", unsealed, ALL, refusing)


def _bare(case: Attacked) -> Path:
    """Shards without a manifest, as other programs leave them."""
    case.manifest.unlink()
    (case.model / "objects-00001.bin").unlink()
    return case.shard


def _header(
    case: Attacked, text: bytes, length: int | None = None, data: bytes = b"", sealed: bool = False
) -> None:
    header = (len(text) if length is None else length).to_bytes(8, "little") + text + data
    if sealed:
        path = case.shard.relative_to(case.checkpoint).as_posix()
        content = header + case.shard.read_bytes()[len(header) :]
        case.shard.write_bytes(content)
        record = {"size": len(content), "digest": digest_of(content)}
        case.reseal(lambda document: document["files"].update({path: record}))
    else:
        _bare(case).write_bytes(header)


def _of(entry: dict[str, Any], info: Any = None, name: str = "w") -> bytes:
    sharding = {name: {"saved_offsets": [0], "global_shape": [1]}} if info is None else info
    metadata = {
        "DCP_SHARDING_INFO": sharding if isinstance(sharding, str) else json.dumps(sharding)
    }
    base = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    return json.dumps({"__metadata__": metadata, name: {**base, **entry}}).encode()


def _headers(add: Add) -> None:
    entry = b'"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    texts: dict[str, tuple[bytes, int | None]] = {
        "giant_length": (b"{}", 2**63),
        "length_of_file": (b"{}", 99_000_000),
        "largest_length": (b"{}", 2**64 - 1),
        "duplicate_keys": (b"{%s,%s}" % (entry, entry), None),
        "deep": (b'{"w":' + b"[" * 2_000_000, None),
        "digits": (b'{"w":' + b"9" * 100_000 + b"}", None),
        "invalid_utf8": (b'{"\xff":1}', None),
        "surrogate": (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', None),
        "nothing": (b"", None),
        "zeros": (bytes(1000), None),
        "not_a_mapping": (b"[]", None),
        "nan": (b'{"w":NaN}', None),
        "many_mappings": (b'{"w":[' + b"{}," * 5_000_000 + b"{}]}", None),
        "negative": (_of({"shape": [-1]}), None),
        "overlapping": (_of({"data_offsets": [0, 5]}), None),
        "out_of_file": (_of({"data_offsets": [100, 101]}), None),
        "giant_offsets": (_of({"data_offsets": [2**63, 2**63 + 1]}), None),
        "giant_shape": (_of({"shape": [2**40, 2**40]}), None),
        "giant_empty": (_of({"shape": [0, 2**62], "data_offsets": [0, 0]}), None),
        "unknown_dtype": (_of({"dtype": "../x"}), None),
        "many_dimensions": (_of({"shape": [1] * 100_000}), None),
        "no_metadata": (b"{%s}" % entry, None),
        "info_not_json": (_of({}, "{{{"), None),
        "info_deep": (_of({}, "[" * 1_000_000), None),
        "info_a_list": (_of({}, []), None),
        "info_text": (_of({}, {"w": "x"}), None),
        "info_negative": (_of({}, {"w": {"saved_offsets": [-1]}}), None),
        "info_giant_empty": (
            _of({}, {"w": {"saved_offsets": [0], "global_shape": [0, 2**62]}}),
            None,
        ),
        "info_giant": (
            _of({}, {"w": {"saved_offsets": [2**62], "global_shape": [2**62 + 1]}}),
            None,
        ),
        "info_digits": (_of({}, {"w": {"saved_offsets": [10**4000]}}), None),
        "metadata_text": (b'{"__metadata__":"x",%s}' % entry, None),
    }
    readers = EXPORTS | IMPORTS | _SHOWS
    for name, (text, length) in texts.items():
        given = {"text": text, "length": length, "data": b"\0"}
        sort = "header_info" if name.startswith("info") else "header_text"
        sort = "header_lengths" if length else sort
        sealed = EXPORTS | RESUMES | CHECKS | IMPORTS
        add(sort, f"{name}_bare", _header, readers, HEADERS, **given)
        add(sort, f"{name}_sealed", _header, sealed, **given, sealed=True)
    for name in ("../../outside/x", "/etc/x", "a\0b", "\x1b[2J", "__metadata__", "x" * 100_000):
        given = {"text": _of({}, name=name), "data": b"\0"}
        add("header_hostile_fqn", ascii(name[:20]), _header, readers, **given)


def _bare_files(add: Add) -> None:
    from tests.hostile.harness.attacks import SPECIALS, special

    def shard(case: Attacked, by: str) -> None:
        special(_bare(case), by, case.outside)

    def side(case: Attacked, by: str, file: str) -> None:
        _bare(case)
        special(case.model / ".hf_metadata" / file, by, case.outside)

    takers = EXPORTS | IMPORTS
    readers = takers | _SHOWS
    for by in SPECIALS:
        add("bare_special", f"{by}_shard", shard, readers, takers, by=by)
        for file in ("config.json", "fqn_to_dtype_mapping.json", "extra.py"):
            add("bare_special", f"{by}_{file}", side, takers, by=by, file=file)
    add("bare_sparse_shard", "1_TB", _bare_sparse, readers, takers)
    add("bare_index", "weight_map", _bare_index, readers)


def _bare_sparse(case: Attacked) -> None:
    size = 1 << 40
    info = {"w": {"saved_offsets": [0], "global_shape": [size]}}
    text = _of({"shape": [size], "data_offsets": [0, size]}, info)
    _header(case, text)
    os.truncate(case.shard, 8 + len(text) + size)


def _bare_index(case: Attacked) -> None:
    _bare(case)
    index = {
        "metadata": {},
        "weight_map": {"embed": "../../outside/secret.json", "x": "/etc/passwd"},
    }
    for directory in (case.model, case.model / ".hf_metadata"):
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _exports(add: Add) -> None:
    def write(case: Attacked, data: bytes | Callable[[], bytes]) -> None:
        path = case.model / "consolidated" / "export_manifest.json"
        path.write_bytes(data if isinstance(data, bytes) else data())

    record = {"size": 1, "digest": "xxh3_128:00"}
    values: dict[str, Any] = {
        "parent": {"../../../../outside/secret.json": record},
        "absolute": {"/etc/passwd": record},
        "nul": {"a\0b": record},
        "device": {"/dev/zero": record},
        "surrogate": {"\ud800": record},
        "escape": {"\x1b[2J": record},
        "list": [],
        "null": None,
        "text": "a",
        "digits": {"a": {**record, "size": 10**4000}},
        "nan": {"a": {**record, "size": float("nan")}},
        "infinite": {"a": {**record, "size": float("inf")}},
        "words": {"a": {**record, "size": "9" * 5000}},
        "empty": {"": record},
        "long": {"a" * 5000: record},
    }
    met = (CHECKS | EXPORTS | OF_EXPORTS, CHECKS | OF_EXPORTS)
    for name, files in values.items():
        data = json.dumps({"files": files}).encode()
        add("export_manifest_names", name, write, *met, data=data)
    for name, text in TEXTS.items():
        add("export_manifest_text", name, write, *met, data=text)
    for path in ("model", "optim", "rng"):
        add("foreign_export", path, _foreign_export, CHECKS, CHECKS, path=path)


def _foreign_export(case: Attacked, path: str) -> None:
    directory = case.checkpoint / path / "consolidated"
    if directory.exists():
        directory.rename(case.outside / "consolidated")
    directory.symlink_to(case.outside)


def entries(add: Add) -> None:
    _maps(add)
    _headers(add)
    _bare_files(add)
    attacks_dcp.entries(add)
    _exports(add)


__all__ = ["TEXTS", "entries"]
