"""What PyTorch's own classes say about a tree in DCP's format: the reference for the ``.metadata`` that is written."""

import os
from typing import Any

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

from automodel_ckpt.checkpoint.parts.tree import Tree
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import described_archive
from automodel_ckpt.checkpoint.state.storable import DTYPES


def metadata_by_torch(tree: Tree, paths: dict[str, Any] | None) -> Metadata:
    """Describe each slice of *tree* by PyTorch's objects."""
    storage: dict[MetadataIndex, _StorageInfo] = {}
    described: dict[str, STORAGE_TYPES] = {}
    for fqn, tensor in tree.tensors.items():
        dtype = DTYPES[tensor.dtype]
        chunks: list[ChunkStorageMetadata] = []
        for stored in tensor.slices:
            offsets = torch.Size(stored.offsets)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(stored.sizes)))
            archive = described_archive(tensor.dtype, stored.sizes)
            start = stored.start - len(archive.head)
            length = len(archive.head) + stored.nbytes + len(archive.tail)
            info = _StorageInfo(os.path.basename(stored.file), start, length)
            storage[MetadataIndex(fqn, offsets)] = info
        size = torch.Size(tensor.shape)
        described[fqn] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)
    for fqn, blob in tree.objects.items():
        described[fqn] = BytesStorageMetadata()
        info = _StorageInfo(os.path.basename(blob.file), blob.start, blob.nbytes)
        storage[MetadataIndex(fqn)] = info
    return Metadata(
        described,
        planner_data=paths,
        storage_data=storage,
        storage_meta=StorageMeta(),
        version="1.0.0",
    )
