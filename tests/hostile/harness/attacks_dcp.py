"""Attacks on a directory of PyTorch DCP without a manifest: its ``.metadata`` is a pickle, and must be read."""

import functools
import os
import pickle
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tests.hostile.harness import bombs
from tests.hostile.harness.readers import EXPORTS, IMPORTS
from tests.hostile.harness.victim import Attacked

Add = Callable[..., None]
# They show what is wrong, and go on.
_SHOWS = frozenset({"ls", "show"}) | {"show_stats"}


def _bare(case: Attacked) -> Path:
    """The optimizer's DCP files in the place of the model's, as another program would have left them."""
    case.manifest.unlink()
    case.shard.unlink()
    for path in (case.checkpoint / "optim").iterdir():
        path.rename(case.model / path.name)
    return case.model / ".metadata"


def _write(case: Attacked, data: Callable[[Path], bytes]) -> None:
    _bare(case).write_bytes(data(case.marker))


def _changed(case: Attacked, value: Callable[[Metadata], object]) -> None:
    path = _bare(case)
    metadata = pickle.loads(path.read_bytes())
    value(metadata)
    path.write_bytes(pickle.dumps(metadata, protocol=4))


def _item(case: Attacked, data: Callable[[Path], bytes]) -> None:
    """Another archive in the place of every item."""
    content = data(case.marker)

    def point(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(content)

    _changed(case, point)
    (case.model / "__0_0.distcp").write_bytes(content)


@functools.cache
def _metadata_head() -> bytes:
    """A pickle that ends in building a Metadata, up to its state."""
    return b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81"


def _programs() -> dict[str, Callable[[Path], bytes]]:
    found: dict[str, Callable[[Path], bytes]] = {
        name: partial(lambda marker, name: bombs.executing_pickles(marker)[name], name=name)
        for name in bombs.executing_pickles(Path("x"))
    }
    head, deep = _metadata_head(), 1_000_000
    texts = {
        "deep_list": b"]" * deep + b"a" * (deep - 1) + b"b.",
        "deep_tuple_as_key": b"})" + b"\x85" * deep + b"K\x01sb.",
        "laughs": b"]\x94" + b"".join(b"](h%ch%ce\x94" % (i, i) for i in range(60)) + b"b.",
        "frame": b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f}b.",
        "long_text": b"X\xff\xff\xff\x7fa",
        "no_stop": b"}b",
        "long_number": b"\x8b\xff\xff\xff\x7fabc",
        "memo_index": b"r\xff\xff\xff\x7f}b.",
        "no_state": b".",
        "many_lists": b"](" + b"]" * 2_000_000 + b"eb.",
        "bytearray": b"\x96" + struct.pack("<Q", 1 << 40),
        "path": b"cpathlib\nPosixPath\n(" + b"X\x01\x00\x00\x00/" * 1000 + b"tRb.",
        "nothing": b"",
        "set": b"\x8f(K\x01\x90b.",
    }
    return found | {
        name: partial(lambda _, text: head + text, text=text) for name, text in texts.items()
    }


def _described(metadata: Metadata) -> TensorStorageMetadata:
    return next(
        e
        for e in metadata.state_dict_metadata.values()
        if isinstance(e, TensorStorageMetadata) and e.size
    )


def _changes() -> dict[str, Callable[[Metadata], object]]:
    def info(**values: Any) -> Callable[[Metadata], object]:
        def change(metadata: Metadata) -> None:
            for entry in metadata.storage_data.values():
                entry.__dict__.update(values)

        return change

    def size(*extents: int) -> Callable[[Metadata], object]:
        def change(metadata: Metadata) -> None:
            entry = _described(metadata)
            entry.size = torch.Size(extents)
            entry.chunks[0].sizes = torch.Size(extents)

        return change

    def again(metadata: Metadata) -> None:
        """A thousand names of one list of thousands of chunks."""
        entry = _described(metadata)
        entry.chunks = entry.chunks * 20_000
        metadata.state_dict_metadata.update({str(n): entry for n in range(1000)})

    return {
        "parent": info(relative_path="../../../outside/secret.json"),
        "absolute": info(relative_path="/etc/passwd"),
        "nul": info(relative_path="a\0b"),
        "device": info(relative_path="/dev/zero"),
        "giant_start": info(offset=2**62),
        "negative": info(offset=-1),
        "text": info(length="7"),
        "floats": info(offset=0.5),
        "no_file": info(relative_path=None),
        "digits": info(length=10**4000),
        "giant_shape": size(2**40, 2**20),
        "dimensions": size(*[1] * 10_000),
        "product": size(*[2**31] * 60),
        "one_list_often": again,
        "no_storage": lambda metadata: setattr(metadata, "storage_data", [1]),
        "no_tensors": lambda metadata: setattr(metadata, "state_dict_metadata", None),
        "paths": lambda metadata: setattr(
            metadata, "planner_data", {name: [["x"]] for name in metadata.planner_data}
        ),
    }


def entries(add: Add) -> None:
    takers = EXPORTS | IMPORTS
    readers = takers | _SHOWS
    add("dcp_untouched", "without_manifest", _bare, readers)
    for name, program in _programs().items():
        add("dcp_metadata_pickle", name, _write, readers, takers, data=program)
    for name, value in _changes().items():
        refusing = takers if name != "paths" else ()
        add("dcp_metadata_values", name, _changed, readers, refusing, value=value)
    for name in bombs.executing_state(Path("x")):
        data = partial(lambda marker, name: bombs.executing_state(marker)[name], name=name)
        add("dcp_item_pickle", name, _item, readers, takers, data=data)
    made = {
        "compressed": bombs.compressed_tensor,
        "pickle": bombs.compressed_pickle,
        "overlapping": bombs.overlapping_records,
        "beyond": bombs.storage_beyond_its_record,
    }
    for name, bomb in made.items():
        data = partial(lambda _, bomb: bomb(), bomb=bomb)
        add("dcp_item_bomb", name, _item, readers, takers, data=data)
    add("dcp_sparse", "metadata", lambda case: os.truncate(_bare(case), 1 << 40), readers, takers)
    add("dcp_sparse", "items", _sparse_items, readers, takers)
    for special in ("fifo", "link_outside", "link_to_zero", "directory", "zero"):
        add("dcp_special", special, _special_metadata, readers, takers, special=special)


def _sparse_items(case: Attacked) -> None:
    _bare(case)
    os.truncate(case.model / "__0_0.distcp", 1 << 40)


def _special_metadata(case: Attacked, special: str) -> None:
    from tests.hostile.harness import attacks

    attacks.special(_bare(case), special, case.outside)
