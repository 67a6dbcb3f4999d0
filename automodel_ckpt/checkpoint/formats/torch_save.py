"""PyTorch DCP's own format: ``__{rank}_0.distcp`` files and a ``.metadata`` that torch's ``FileSystemReader`` reads.

We write it ourselves, because torch's writer fsyncs ``.metadata`` before it is flushed, keeps no digests, and publishes
in place. Each item of a ``.distcp`` file is one ``torch.save`` archive: a zip whose record ``data/0`` holds the
tensor's raw bytes, uncompressed. Where those stand goes into the manifest, so that our own reader needs neither the
archive nor the pickle in ``.metadata``.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.files.torch_archive import tensor_archive
from automodel_ckpt.checkpoint.formats.planning import DTYPES, TreePlan
from automodel_ckpt.checkpoint.manifest import Blob
from automodel_ckpt.checkpoint.writing.jobs import Chunk, FileJob
from automodel_ckpt.checkpoint.writing.rank_manifest import DcpItem, Part

NAME = "torch_save"
_VERSION = "1.0.0"


def plan_jobs(plan: TreePlan, rank: int) -> tuple[FileJob, list[DcpItem]]:
    """The job of *rank* for a tree, and where torch's reader finds each item of it."""
    file = layout.distcp_file(plan.directory, rank)
    pieces: list[Chunk] = []
    items: list[DcpItem] = []
    at = 0
    for fqn, data in plan.values():
        pieces.append(Chunk(at, data, Blob(fqn, file, at, len(data), "")))
        items.append(DcpItem(fqn, None, file, at, len(data)))
        at += len(data)
    for share in plan.tensors():
        archive = tensor_archive(DTYPES[share.dtype], share.sizes, share.nbytes)
        nbytes = len(archive.head) + share.nbytes + len(archive.tail)
        start = at + len(archive.head)
        pieces += [
            Chunk(at, archive.head),
            Chunk(start, plan.fetching(share), share.stored(file, start)),
            Chunk(start + share.nbytes, archive.tail, crc_at=archive.crc_at),
        ]
        items.append(DcpItem(share.fqn, share.offsets, file, at, nbytes))
        at += nbytes
    return FileJob(file, pieces, plan.name, at), items


def metadata_of(plan: TreePlan, parts: Sequence[Part]) -> bytes:
    """A tree's ``.metadata`` for torch's reader, from the rank manifests; unchanged while the plan is reused."""
    metadata: Metadata = plan.metadata
    metadata.storage_data = {
        MetadataIndex(item.fqn, item.offsets): _StorageInfo(
            Path(item.file).name, item.start, item.nbytes
        )
        for part in parts
        if plan.name in part.trees
        for item in part.trees[plan.name].dcp_items
    }
    metadata.storage_meta = StorageMeta()
    metadata.version = _VERSION
    return pickle.dumps(metadata)
