"""The ``.metadata`` that is assembled from instructions: what PyTorch and our own reader find in it."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from torch.distributed.checkpoint import FileSystemReader

from automodel_ckpt.checkpoint.parts.manifest import Blob
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor
from automodel_ckpt.checkpoint.parts.tree import Tree
from automodel_ckpt.checkpoint.pickles.dcp_metadata import Columns, DcpLocation, DcpMetadata
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import described_archive
from tests.support.dcp_metadata import metadata_by_torch

# Beyond 32 bits, as in files of more than 2 GiB.
FAR = 2**40 + 1


def tensor(fqn: str, dtype: str, shape: tuple[int, ...], starts: tuple[int, ...]) -> Tensor:
    """A tensor whose rows are in as many chunks of one row each as there are starts."""
    slices: list[Slice] = []
    for row, start in enumerate(starts):
        offsets = (row, *(0 for _ in shape[1:])) if shape else ()
        sizes = (1, *shape[1:]) if shape else ()
        nbytes = int(np.prod(sizes)) * 4
        slices.append(Slice(fqn, dtype, offsets, sizes, f"optim/__{row}_0.distcp", start, nbytes))
    return Tensor(fqn, dtype, shape, tuple(slices))


def tree_of(*tensors: Tensor, objects: tuple[Blob, ...] = ()) -> Tree:
    return Tree(
        "torch_save", {each.fqn: each for each in tensors}, {each.fqn: each for each in objects}
    )


NESTED = {
    "optimizer.state.a.b.exp_avg": ("optimizer", "state", "a.b", "exp_avg"),
    "optimizer.state.7.step": ("optimizer", "state", 7, "step"),
    "optimizer.state.0": ("optimizer", "state", 0),
    "schedule": ("schedule",),
    "optimizer.(1, 2.5).None": ("optimizer", (1, 2.5), None),
    f"optimizer.{2**70}.é\ud800": ("optimizer", 2**70, "é\ud800"),
}
TREES = {
    "chunks": tree_of(
        tensor("a", "F32", (3, 2), (5120, FAR, 9000)),
        tensor("b", "F32", (3, 2), (5000, 6000, 7000)),
        tensor("c", "I32", (), (FAR,)),
    ),
    "no chunks": tree_of(Tensor("a", "BF16", (0, 4), ())),
    "values": tree_of(objects=(Blob("v", "optim/__1_0.distcp", FAR, 10, ""),)),
    "nested": tree_of(*(tensor(name, "F32", (1,), (9,)) for name in NESTED)),
    "nothing": tree_of(),
    "many names": tree_of(*(tensor(f"n{i}", "F32", (1,), (9 * i,)) for i in range(400))),
}


@pytest.mark.parametrize("name", TREES)
def test_metadata_has_what_torchs_classes_would_have(name: str, tmp_path: Path) -> None:
    tree = TREES[name]
    metadata = DcpMetadata()
    paths = {fqn: NESTED.get(fqn, (fqn,)) for fqn in (*tree.tensors, *tree.objects)}
    for fqn, each in tree.tensors.items():
        items: list[tuple[int, int, int]] = []
        for stored in each.slices:
            archive = described_archive(each.dtype, stored.sizes)
            nbytes = len(archive.head) + stored.nbytes + len(archive.tail)
            file = metadata.file_number(Path(stored.file).name)
            items.append((file, stored.start - len(archive.head), nbytes))
        form = (len(each.slices), len(each.shape))
        boxes = [
            [stored.offsets for stored in each.slices],
            [stored.sizes for stored in each.slices],
        ]
        offsets, sizes = (np.array(rows, np.int64).reshape(form) for rows in boxes)
        columns = Columns(offsets, sizes, *np.array(items, np.int64).reshape(-1, 3).T)
        metadata.add_columns(paths[fqn], each.dtype, each.shape, columns)
    for fqn, blob in tree.objects.items():
        location = DcpLocation(Path(blob.file).name, blob.start, blob.nbytes)
        metadata.add_value(paths[fqn], location)
    data = metadata.to_bytes()
    (tmp_path / ".metadata").write_bytes(data)
    expected = metadata_by_torch(tree, paths)
    assert FileSystemReader(tmp_path).read_metadata().storage_data == expected.storage_data
    found = pickle.loads(data)
    assert found == expected
    for fqn, described in found.state_dict_metadata.items():
        assert vars(described) == vars(expected.state_dict_metadata[fqn])
