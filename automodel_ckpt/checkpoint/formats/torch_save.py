"""PyTorch DCP's own format: ``__{rank}_0.distcp`` files and a ``.metadata`` that torch's ``FileSystemReader`` reads.

We write it ourselves, because torch's writer fsyncs ``.metadata`` before it is flushed, keeps no digests, and publishes
in place. Each item of a ``.distcp`` file is one ``torch.save`` archive: a zip whose record ``data/0`` holds the
tensor's raw bytes, uncompressed. Where those stand goes into the manifest, so that our own reader needs neither the
archive nor the pickle in ``.metadata``.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.commit import write_file
from automodel_ckpt.checkpoint.discovery import raw_bytes
from automodel_ckpt.checkpoint.durable import DurableFile
from automodel_ckpt.checkpoint.formats.planning import TensorShare, TreePlan
from automodel_ckpt.checkpoint.manifest import Blob, DcpItem, Part, TreePart, digest_of

NAME = "torch_save"
_VERSION = "1.0.0"
# Parts of an archive of this size or less are remembered: its directory is, its tensor need not be.
_BULK_BYTES = 1 << 16


def write(plan: TreePlan, staging: Path, part: Part) -> None:
    """Write this rank's share of a tree and enter it into *part*."""
    written = part.trees[plan.name] = TreePart()
    file = layout.distcp_file(plan.directory, part.rank)
    shares = plan.tensors()
    with DurableFile(staging / file, nbytes=sum(share.nbytes for share in shares)) as out:
        for fqn, data in plan.values():
            start = out.tell()
            written.objects.append(Blob(fqn, file, start, out.write(data), digest_of(data)))
            written.dcp_items.append(DcpItem(fqn, None, file, start, len(data)))
        for share in shares:
            _write_tensor(plan, share, out, file, written)
    part.files[file] = out.close()


def _write_tensor(plan: TreePlan, share: TensorShare, out: DurableFile, file: str, written: TreePart) -> None:
    tensor = plan.tensor(share).to("cpu").contiguous()
    if tensor.untyped_storage().nbytes() != share.nbytes:
        tensor = tensor.clone()
    start, archive = out.tell(), _Archive(out)
    torch.save(tensor, archive)  # type: ignore[arg-type]  # streams into write(), no second copy in memory
    data_start = start + archive.data_start()
    written.tensors.append(share.stored(file, data_start, digest_of(raw_bytes(tensor))))
    written.dcp_items.append(DcpItem(share.fqn, share.offsets, file, start, archive.tell()))


class _Archive(io.RawIOBase):
    """Passes a torch.save archive on to a file and remembers all of it but the bulk, to look up where that stands."""

    def __init__(self, out: DurableFile) -> None:
        self._out, self._nbytes, self._at = out, 0, 0
        self._remembered: list[tuple[int, bytes]] = []

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) <= _BULK_BYTES:
            self._remembered.append((self._nbytes, bytes(view)))
        self._nbytes += self._out.write(view)
        self._at = self._nbytes
        return len(view)

    def data_start(self) -> int:
        """Where the raw bytes of the archive's only tensor begin."""
        with zipfile.ZipFile(self) as entries:
            info = next(entry for entry in entries.infolist() if entry.filename.endswith("/data/0"))
        self.seek(info.header_offset)
        local = self.read(30)
        # Local file header (source: PKWARE APPNOTE 4.3.7): 30 fixed bytes, then a name and an extra field so long.
        name, extra = int.from_bytes(local[26:28], "little"), int.from_bytes(local[28:30], "little")
        self._at = self._nbytes
        return info.header_offset + 30 + name + extra

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self._nbytes if size < 0 else min(self._at + size, self._nbytes)
        data = bytearray(max(stop - self._at, 0))
        for start, piece in self._remembered:
            low, high = max(start, self._at), min(start + len(piece), stop)
            if low < high:
                data[low - self._at : high - self._at] = piece[low - start : high - start]
        self._at = max(stop, self._at)
        return bytes(data)


def write_metadata(plan: TreePlan, staging: Path, parts: Sequence[Part]) -> None:
    """Write a tree's ``.metadata`` for torch's reader (the leader, when all ranks have written) and enter its file."""
    metadata: Metadata = plan.metadata
    metadata.storage_data = {
        MetadataIndex(item.fqn, item.offsets): _StorageInfo(Path(item.file).name, item.start, item.nbytes)
        for part in parts
        if plan.name in part.trees
        for item in part.trees[plan.name].dcp_items
    }
    metadata.storage_meta = StorageMeta()
    metadata.version = _VERSION
    file = f"{plan.directory}/{layout.DCP_METADATA}"
    parts[0].files[file] = write_file(staging / file, pickle.dumps(metadata))
