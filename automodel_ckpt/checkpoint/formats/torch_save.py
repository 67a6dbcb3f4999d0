"""PyTorch DCP's own format: ``__{rank}_0.distcp`` files and a ``.metadata`` that torch's ``FileSystemReader`` reads.

We write it ourselves, because torch's writer fsyncs ``.metadata`` before it is flushed, keeps no digests, and publishes
in place. Each item of a ``.distcp`` file is one ``torch.save`` archive: a zip whose record ``data/0`` holds the
tensor's raw bytes, uncompressed. Their position is in the manifest, so that our own reader needs neither the archive
nor the pickle in ``.metadata``.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.files.torch_archive import tensor_archive
from automodel_ckpt.checkpoint.formats.planning import DTYPES, TreePlan, located
from automodel_ckpt.checkpoint.manifest import Blob
from automodel_ckpt.checkpoint.writing.jobs import Chunk, FileJob
from automodel_ckpt.checkpoint.writing.rank_manifest import DcpItem, RankManifest

NAME = "torch_save"
_VERSION = "1.0.0"


def plan_jobs(plan: TreePlan, rank: int) -> tuple[FileJob, list[DcpItem]]:
    """The job of *rank* for a tree, and where torch's reader finds each item of it."""
    file = layout.distcp_file(plan.directory, rank)
    chunks: list[Chunk] = []
    items: list[DcpItem] = []
    end = 0
    for fqn, data in plan.values():
        blob = Blob(fqn, file, end, len(data), "")
        chunks.append(Chunk(end, data, blob))
        items.append(DcpItem(fqn, None, file, end, len(data)))
        end += len(data)
    for tensor in plan.tensors():
        (stored,) = tensor.slices
        archive = tensor_archive(DTYPES[tensor.dtype], stored.sizes, stored.nbytes)
        # Head, data, tail: an archive of torch.save around the tensor's raw bytes. The tail contains their checksum,
        # which is known only when they are written.
        start = end
        data_start = start + len(archive.head)
        tail_start = data_start + stored.nbytes
        end = tail_start + len(archive.tail)
        entry = located(tensor, file, data_start)
        chunks.append(Chunk(start, archive.head))
        chunks.append(Chunk(data_start, plan.fetch(tensor), entry))
        chunks.append(Chunk(tail_start, archive.tail, crc_at=archive.crc_at))
        # torch's reader gets the whole archive, the manifest's entry has only the raw bytes in it.
        items.append(DcpItem(tensor.fqn, stored.offsets, file, start, end - start))
    return FileJob(file, chunks, plan.name, end), items


def metadata_of(plan: TreePlan, rank_manifests: Sequence[RankManifest]) -> bytes:
    """A tree's ``.metadata`` for torch's reader, from the rank manifests; unchanged while the plan is reused."""
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for written in rank_manifests:
        tree = written.trees.get(plan.name)
        for item in tree.dcp_items if tree is not None else ():
            # Only the name: torch's reader looks for the file beside .metadata.
            info = _StorageInfo(Path(item.file).name, item.start, item.nbytes)
            storage[MetadataIndex(item.fqn, item.offsets)] = info
    metadata: Metadata = plan.metadata
    metadata.storage_data = storage
    # Empty: torch's own writer stores the path of the directory, here that of the staging
    # directory.
    metadata.storage_meta = StorageMeta()
    metadata.version = _VERSION
    return pickle.dumps(metadata)
