"""PyTorch DCP's own format: ``__{rank}_0.distcp`` files and a ``.metadata`` that torch's ``FileSystemReader`` reads.

We write it ourselves, because torch's writer fsyncs ``.metadata`` before it is flushed, keeps no digests, and publishes
in place. Each item of a ``.distcp`` file is one ``torch.save`` archive: a zip whose record ``data/0`` holds the
tensor's raw bytes, uncompressed. Their position is in the manifest, so that our own reader needs neither the archive
nor the pickle in ``.metadata``.
"""

from __future__ import annotations

import os
import pickle

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.files.torch_archive import tensor_archive
from automodel_ckpt.checkpoint.formats.planning import DTYPES, TreePlan, located
from automodel_ckpt.checkpoint.formats.tree_layout import TreeLayout, ordered
from automodel_ckpt.checkpoint.manifest import Blob, Tree
from automodel_ckpt.checkpoint.slices import Tensor
from automodel_ckpt.checkpoint.writing.jobs import Chunk, FileJob

NAME = "torch_save"
_VERSION = "1.0.0"


def lay_out(plan: TreePlan) -> TreeLayout:
    """The order of an assigned plan's tensors in the files of each rank."""
    return ordered(plan.assignment.tensors.values())


def plan_jobs(plan: TreePlan, rank: int) -> FileJob:
    """The job of *rank* for a tree."""
    file = layout.distcp_file(plan.directory, rank)
    chunks: list[Chunk] = []
    end = 0
    for fqn, data in plan.values():
        chunks.append(Chunk(end, data, Blob(fqn, file, end, len(data), "")))
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
    return FileJob(file, chunks, plan.name, end)


def metadata_of(plan: TreePlan, tree: Tree) -> bytes:
    """A tree's ``.metadata`` for torch's reader; unchanged while the plan is reused."""
    storage: dict[MetadataIndex, _StorageInfo] = {}
    described: dict[str, STORAGE_TYPES] = {}
    for fqn, tensor in tree.tensors.items():
        described[fqn] = _add_tensor(tensor, storage)
    for fqn, blob in tree.objects.items():
        described[fqn] = BytesStorageMetadata()
        storage[MetadataIndex(fqn)] = _StorageInfo(
            os.path.basename(blob.file), blob.start, blob.nbytes
        )
    metadata = Metadata(
        described,
        planner_data=dict(plan.paths) if plan.nested else None,
        storage_data=storage,
        # Empty: torch's own writer stores the path of the directory, here that of the staging
        # directory.
        storage_meta=StorageMeta(),
        version=_VERSION,
    )
    return pickle.dumps(metadata)


def _add_tensor(
    tensor: Tensor, storage: dict[MetadataIndex, _StorageInfo]
) -> TensorStorageMetadata:
    """Describe a tensor, and add where its slices are to *storage*."""
    chunks: list[ChunkStorageMetadata] = []
    dtype = DTYPES[tensor.dtype]
    for stored in tensor.slices:
        offsets = torch.Size(stored.offsets)
        chunks.append(ChunkStorageMetadata(offsets, torch.Size(stored.sizes)))
        # torch's reader gets the whole archive, the manifest's entry has only the raw bytes in it.
        archive = tensor_archive(dtype, stored.sizes, stored.nbytes)
        length = len(archive.head) + stored.nbytes + len(archive.tail)
        # Only the name: torch's reader looks for the file beside .metadata.
        name = os.path.basename(stored.file)
        info = _StorageInfo(name, stored.start - len(archive.head), length)
        storage[MetadataIndex(tensor.fqn, offsets)] = info
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(tensor.shape), chunks)
