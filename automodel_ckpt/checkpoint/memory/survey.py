"""Find the checkpoints that the directories of all nodes together have completely, after a failure.

Each node reports the files that it has, its own and copies of others. A checkpoint is usable if each of its files is
whole on some node. The manifest and the files without tensors are then brought to every node; of the tensors, each rank
reads what it needs, from its node or from others, by byte ranges.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import FileRecord, file_record
from automodel_ckpt.checkpoint.files.safe_open import open_safely, read_safely
from automodel_ckpt.checkpoint.memory.nodes import Nodes
from automodel_ckpt.checkpoint.memory.requests import NETWORK_HINT, NodeFailed, read_range
from automodel_ckpt.checkpoint.memory.save_files import (
    RECEIVING,
    bring_back,
    files_below,
    is_of_save,
    mark_save,
    save_digest,
    set_aside,
)
from automodel_ckpt.checkpoint.options import Level
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import MAX_BYTES, Manifest, Summary
from automodel_ckpt.checkpoint.parts.tree import has_merkle_digest
from automodel_ckpt.checkpoint.run import links
from automodel_ckpt.checkpoint.run.resume import checkpoint_names
from automodel_ckpt.checkpoint.store.ranges import REQUEST_BYTES, VerifiedRanges
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.parallel.ranks import agree

log = logging.getLogger("automodel_ckpt")

_Save = tuple[str, str]
"""The name of a checkpoint, and the digest of its manifest."""
_Holding = Mapping[str, int]
"""The sizes of the files that a node has of a save. The manifest is among them only if it can be read."""


@dataclass(slots=True)
class CheckpointOnNodes:
    """A checkpoint in the directories of several nodes. Its directory on each of them has the files without tensors.

    *holders* has the numbers of the nodes that have each file. :attr:`read_bytes` counts what this rank has read from
    each node.
    """

    path: Path
    digest: str
    manifest_bytes: bytes
    holders: Mapping[str, Sequence[int]]
    nodes: Nodes
    read_bytes: dict[int, int]

    @property
    def name(self) -> str:
        """Where the checkpoint is, for logs."""
        return f"{self.path} on {len(self.nodes.nodes)} nodes"

    def stored_locally(self, manifest: Manifest) -> Manifest:
        """Restrict *manifest* to the files that are still to be verified: none, since :func:`survey` has."""
        return replace(manifest, files={}, trees={}, state={})

    def ranges(self, manifest: Manifest) -> VerifiedRanges:
        """Open the files with tensors, to read them by byte ranges from the nodes."""
        return VerifiedRanges(self, self.path.name, manifest.trees.values())

    def __str__(self) -> str:
        return str(self.path.parent)

    def read_patiently(self, name: str, start: int, end: int) -> bytes:
        """Read bytes *start* to before *end* of the file *name* (CHECKPOINT/FILE), from this node if it has the file.

        Raises FileNotFoundError if no node has it, :class:`NodeFailed` if no node that has it answers.
        """
        file = name.partition("/")[2]
        holders = self.holders.get(file, ())
        own = self.nodes.own
        failure: Exception = FileNotFoundError(name)
        for number in sorted(holders, key=lambda number: number != own):
            try:
                data = self._read_from(number, file, start, end)
            except (NodeFailed, OSError) as error:
                failure = error
                continue
            self.read_bytes[number] = self.read_bytes.get(number, 0) + len(data)
            return data
        raise failure

    def _read_from(self, number: int, file: str, start: int, end: int) -> bytes:
        if number != self.nodes.own:
            name = f"{self.path.name}/{file}"
            return read_range(self.nodes.nodes[number].address, self.nodes.token, name, start, end)
        with os.fdopen(open_safely(self.path, file), "rb") as opened:
            opened.seek(start)
            return opened.read(end - start)


def survey(
    nodes: Nodes,
    group: ProcessGroup | None,
    level: Level,
    is_current: Callable[[Summary], bool],
) -> dict[Path, CheckpointOnNodes]:
    """Find the usable checkpoints in the directories of all nodes, by path. Collective.

    *level* is how files are verified. *is_current* states whether the present generation of the run continues a
    checkpoint. Incomplete checkpoints are set aside (:func:`~.save_files.set_aside`), and abandoned ones. The next
    survey examines them again: a node may have been absent. Directories that no save has written are left alone, or
    renamed where a checkpoint has their name. Raises OSError and :class:`NodeFailed` on all ranks.
    """
    mine = {}
    with agree.raise_on_all_ranks(group):
        nodes.start_again()
        if nodes.is_leader:
            bring_back(nodes.directory)
            mine = dict(_holdings(nodes.directory))
    of_ranks = agree.gather_objects(group, mine)
    of_nodes = [of_ranks[node.ranks[0]] for node in nodes.nodes]
    found = {}
    # Sorted: all ranks must examine the same saves in the same order.
    for save in sorted({save for of_node in of_nodes for save in of_node}):
        holdings = [of_node.get(save, {}) for of_node in of_nodes]
        checkpoint = _examine(nodes, group, level, is_current, save, holdings)
        if checkpoint is not None:
            found[checkpoint.path] = checkpoint
    with agree.raise_on_all_ranks(group):
        if nodes.is_leader:
            _set_aside_unusable(nodes.directory, found)
            for checkpoint in found.values():
                _complete(checkpoint)
    return found


def _holdings(directory: Path) -> Iterator[tuple[_Save, _Holding]]:
    """Yield the checkpoints in the memory of this node, or what it has of them. Others are left out."""
    for name in checkpoint_names(directory):
        path = directory / str(name)
        digest, has_manifest = save_digest(path)
        if digest is not None:
            try:
                sizes = {file: (path / file).stat().st_size for file in files_below(path)}
            except OSError as error:
                log.warning("%s in memory is not used: %s", path, error)
                continue
            if not has_manifest:
                sizes.pop(layout.MANIFEST, None)
            yield (str(name), digest), sizes


def _examine(
    nodes: Nodes,
    group: ProcessGroup | None,
    level: Level,
    is_current: Callable[[Summary], bool],
    save: _Save,
    holdings: Sequence[_Holding],
) -> CheckpointOnNodes | None:
    """Find where the files of a save are. Collective.

    *holdings* are the holdings of all nodes. Returns None when the save is incomplete or not of the present generation.
    """
    name, digest = save
    sources = [
        node.ranks[0]
        for node, holding in zip(nodes.nodes, holdings, strict=True)
        if layout.MANIFEST in holding
    ]
    if not sources:
        return None
    path = nodes.directory / name
    data = b""
    with agree.raise_on_all_ranks(group):
        if nodes.rank == sources[0]:
            data = read_safely(path, layout.MANIFEST, limit=MAX_BYTES)
    data = agree.broadcast_object(group, data, sources[0])
    # All ranks parse the same bytes, and so all reach the same result.
    try:
        summary = Summary.parse(data, path)
    except CheckpointUnusable:
        return None
    if summary.digest != digest or not is_current(summary):
        return None
    records = _without_tables(data, path).files
    whole = []
    with agree.raise_on_all_ranks(group):
        whole = _whole_files(nodes, path, holdings[nodes.own], records, level)
    of_ranks = agree.gather_objects(group, whole)
    holders: dict[str, list[int]] = {file: [] for file in records}
    for number, node in enumerate(nodes.nodes):
        for rank in node.ranks:
            for file in of_ranks[rank]:
                holders[file].append(number)
    if not all(holders.values()):
        return None
    return CheckpointOnNodes(path, digest, data, holders, nodes, {})


def _without_tables(data: bytes, path: Path) -> Manifest:
    """Parse a manifest without its tables, which this node may lack."""
    return Manifest.parse(data, path, lambda file, start, nbytes: b"")


def _whole_files(
    nodes: Nodes,
    path: Path,
    sizes: _Holding,
    records: Mapping[str, FileRecord],
    level: Level,
) -> list[str]:
    """The files of this node that match their records. Each rank of the node examines a part of them."""
    ranks = nodes.nodes[nodes.own].ranks
    present = sorted(file for file, record in records.items() if sizes.get(file) == record.size)
    share = present[ranks.index(nodes.rank) :: len(ranks)]
    if level != "digest":
        return share
    whole = []
    for file in share:
        record = records[file]
        # A file that cannot be read is as good as missing: another node may have it.
        with contextlib.suppress(OSError):
            # The slices of the first kind are compared with their digests when they are read.
            if has_merkle_digest(record) or file_record(path / file) == record:
                whole.append(file)
    return whole


def _set_aside_unusable(directory: Path, found: Mapping[Path, CheckpointOnNodes]) -> None:
    for name in checkpoint_names(directory):
        path = directory / str(name)
        checkpoint = found.get(path)
        is_found = checkpoint is not None and save_digest(path)[0] == checkpoint.digest
        if not is_found and is_of_save(path):
            set_aside(path)


def _complete(checkpoint: CheckpointOnNodes) -> None:
    """Bring the manifest, the slice tables and the files without tensors to this node."""
    path, data = checkpoint.path, checkpoint.manifest_bytes
    if save_digest(path)[0] != checkpoint.digest:
        if os.path.lexists(path):
            # No save has written it: the others were set aside.
            links.make_room(path)
        path.mkdir()
        mark_save(path, checkpoint.digest)
    manifest = _without_tables(data, path)
    for file in layout.tables_first(manifest.files.keys() - manifest.files_with_tensors):
        if checkpoint.nodes.own not in checkpoint.holders[file]:
            _fetch(checkpoint, file, manifest.files[file])
    commit.write_by_rename(path / layout.MANIFEST, data)


def _fetch(checkpoint: CheckpointOnNodes, file: str, record: FileRecord) -> None:
    """Copy a file from another node to this one. Raises :class:`NodeFailed` if other bytes than recorded arrive."""
    target = checkpoint.path / file
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{RECEIVING}{uuid.uuid4().hex}")
    with temporary.open("wb") as opened:
        for start in range(0, record.size, REQUEST_BYTES):
            end = min(record.size, start + REQUEST_BYTES)
            name = f"{checkpoint.path.name}/{file}"
            opened.write(checkpoint.read_patiently(name, start, end))
    # Its node has verified it. What is loaded from this copy is not verified again.
    if file_record(temporary) != record:
        temporary.unlink()
        raise NodeFailed(
            "a file of a checkpoint in memory was damaged on its way between two nodes; the next start reads it again",
            where=target,
            value="other bytes than the manifest records",
            hint=NETWORK_HINT,
        )
    os.rename(temporary, target)
