"""The manifest of an export, ``export_manifest.json``, and the comparison of an export's files with it.

An export is a directory of Hugging Face files. Its manifest lists every file with its size and the digests of
consecutive byte ranges, from which the digest of each tensor follows. Whatever reads an export opens it with
:func:`find_export_manifest` and compares what it reads before it uses the values. Imports no torch.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.durable_file import FileRecord, digest_of, part_digests
from automodel_ckpt.checkpoint.files.safe_open import is_sparse, parse_json, read_safely
from automodel_ckpt.checkpoint.files.threads import CallingThread, started_pool
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.options import Level
from automodel_ckpt.checkpoint.parts.slices import Tensor, row_major_boxes
from automodel_ckpt.checkpoint.parts.tree import size_problem
from automodel_ckpt.errors import CheckpointUnusable, Problem, unusable

# A line of a hundred bytes for each byte range; parsed, it takes up to 25 times as much memory. A longer manifest must
# have that many bytes of weights to describe.
_FREE_BYTES = 16 << 20
_MAX_BYTES = 1 << 29
_DATA_RATIO = 64
# The digests of about this many bytes are compared in one go, by one rank and one thread.
_TASK_BYTES = 64 << 20
_CHANGED_ON_PURPOSE = (
    f"if you changed the files on purpose, delete "
    f"{layout.EXPORT_MANIFEST}: the files are then not verified"
)


class DigestedRange(NamedTuple):
    """The bytes ``start .. start + nbytes`` of a file, and their digest."""

    start: int
    nbytes: int
    digest: str


def _ranges(entry: Values) -> tuple[DigestedRange, ...]:
    """The byte ranges of a file that an entry of the manifest describes. Raises ValueError, KeyError or TypeError."""
    size = int(entry["size"])
    # Only files with weights have parts; the others have one digest (docs/format.md).
    raw = entry["parts"] if "parts" in entry else [(size, entry["digest"])]
    ranges = []
    start = 0
    for nbytes, digest in raw:
        if int(nbytes) < 0:
            raise ValueError(f"a byte range of {nbytes} bytes")
        ranges.append(DigestedRange(start, int(nbytes), str(digest)))
        start += int(nbytes)
    if start != size:
        raise ValueError(f"byte ranges of {start} bytes for a file of {size}")
    return tuple(ranges)


@dataclass(frozen=True)
class ExportManifest:
    """The byte ranges of each file of the export in *directory*, which make it up.

    With *follow_links*, the files may be symbolic links (the Hub's cache).
    """

    directory: Path
    files: Mapping[str, Sequence[DigestedRange]]
    follow_links: bool = False

    @classmethod
    def read(cls, directory: Path, *, follow_links: bool = False) -> ExportManifest:
        """Read the manifest in *directory*. Raises :class:`CheckpointUnusable` if it is missing or malformed."""
        path = directory / layout.EXPORT_MANIFEST
        try:
            real = Path(os.path.realpath(path)) if follow_links else path
            text = read_safely(real.parent, real.name, limit=_most_bytes(directory))
            entries = parse_json(text)["files"]
            files = {name: _ranges(entry) for name, entry in entries.items()}
            for name in files:
                if reason := layout.unsafe_path(name):
                    raise ValueError(f"a file outside of the export, {name!r}: {reason}")
        except Exception as error:  # a damaged one can make the conversion raise anything
            raise unusable(
                "an export's manifest is missing or malformed",
                path,
                repr(error)[:300],
                _hint(directory),
            ) from error
        return cls(directory, files, follow_links)

    # ---------------------------------------------------------------- comparing whole files

    def problems(
        self,
        *,
        only: Collection[str] | None = None,
        level: Level = "digest",
        rank: int = 0,
        num_ranks: int = 1,
        num_threads: int = 2,
    ) -> list[Problem]:
        """Return all problems of the listed files (or *only* of those names), in the manifest's order.

        Level ``size`` checks that each file exists, is regular and has its size; ``digest`` also compares its bytes;
        ``none`` checks nothing. With several ranks, each reads its share of the bytes.
        """
        if level == "none":
            return []
        names = [name for name in self.files if only is None or name in only]
        problems = [problem for name in names if (problem := self._size_problem(name))]
        if problems or level == "size":
            return problems
        tasks = [task for name in names for task in self._tasks(name)]
        # All ranks list the same tasks in the same order, so that one of them reads each.
        mine = [task for number, task in enumerate(tasks) if number % num_ranks == rank]
        with started_pool(num_threads, "verify") or CallingThread() as pool:
            results = list(pool.map(lambda task: self._fits(*task), mine))
        damaged = {name: None for (name, _), fits in zip(mine, results, strict=True) if not fits}
        return [self._damage(name) for name in damaged]

    def _size_problem(self, name: str) -> Problem | None:
        record = FileRecord(_size(self.files[name]), "")
        path = self._path(name)
        root, relative = (path.parent, path.name) if self.follow_links else (self.directory, name)
        problem = size_problem(root, relative, record)
        if problem is None:
            return None
        what = problem.what.replace("of the checkpoint", "of the export")
        return replace(problem, what=what, hint=_hint(self.directory))

    def _tasks(self, name: str) -> Iterator[tuple[str, Sequence[DigestedRange]]]:
        """Yield the byte ranges of a file in groups of about 64 MiB."""
        group = []
        nbytes = 0
        for each in self.files[name]:
            group.append(each)
            nbytes += each.nbytes
            if nbytes >= _TASK_BYTES:
                yield name, group
                group, nbytes = [], 0
        if group:
            yield name, group

    def _fits(self, name: str, ranges: Sequence[DigestedRange]) -> bool:
        """Whether the byte ranges have their digests. False if the file cannot be read."""
        try:
            sizes = [each.nbytes for each in ranges]
            found = part_digests(self._path(name), sizes, start=ranges[0].start)
        except OSError:
            return False
        # A file that is too short has fewer digests.
        return found == [each.digest for each in ranges]

    def _damage(self, name: str) -> Problem:
        what = "a file of the export is damaged: its digest does not match"
        return Problem(
            what, str(self.directory / name), "its digest differs", _hint(self.directory)
        )

    # ---------------------------------------------------------------- comparing while reading

    def check_bytes(self, name: str, data: bytes) -> None:
        """Compare *data*, the complete content of a small file, with its digests.

        A file that is not listed was added later and is not compared. Raises :class:`CheckpointUnusable`.
        """
        if name not in self.files:
            return
        ranges = self.files[name]
        is_equal = len(data) == _size(ranges) and all(
            digest_of(data[each.start : each.start + each.nbytes]) == each.digest for each in ranges
        )
        if not is_equal:
            raise CheckpointUnusable.all_of([self._damage(name)])

    def check_header(self, name: str) -> None:
        """Compare the size of a safetensors file, and its bytes before the first tensor, with the manifest.

        Raises :class:`CheckpointUnusable`.
        """
        if name not in self.files:
            raise unusable(
                "the export's manifest does not list this file",
                self.directory / name,
                name,
                _hint(self.directory),
            )
        if problem := self._size_problem(name):
            raise CheckpointUnusable.all_of([problem])
        header = self.files[name][:1]
        if header and not self._fits(name, header):
            raise CheckpointUnusable.all_of([self._damage(name)])

    def with_digests(self, name: str, tensor: Tensor) -> Tensor:
        """Return *tensor*, one slice of the file *name*, divided into the slices for which the manifest has digests.

        Raises :class:`CheckpointUnusable` if the listed byte ranges do not match the tensor.
        """
        (whole,) = tensor.slices
        if not whole.nbytes:
            return tensor
        bits = DTYPE_BITS[whole.dtype]
        ranges = self.files[name]
        slices = []
        at, end = whole.start, whole.start + whole.nbytes
        for each in ranges[bisect_left(ranges, at, key=lambda each: each.start) :]:
            if each.start != at or at >= end:
                break
            if each.nbytes:
                first, before = divmod((at - whole.start) * 8, bits)
                at += each.nbytes
                last, after = divmod((at - whole.start) * 8, bits)
                boxes = [*row_major_boxes(tensor.shape, first, last)]
                if before or after or len(boxes) != 1:
                    break
                slices.append(
                    replace(
                        whole,
                        offsets=boxes[0].offsets,
                        sizes=boxes[0].sizes,
                        start=each.start,
                        nbytes=each.nbytes,
                        digest=each.digest,
                    )
                )
        if sum(each.nbytes for each in slices) != whole.nbytes:
            raise unusable(
                f"the export's manifest does not match the tensor {tensor.fqn!r}",
                self.directory / name,
                "its byte ranges differ from the file's header",
                _hint(self.directory),
            )
        return replace(tensor, slices=tuple(slices))

    def _path(self, name: str) -> Path:
        path = self.directory / name
        return Path(os.path.realpath(path)) if self.follow_links else path


def _size(ranges: Sequence[DigestedRange]) -> int:
    return sum(each.nbytes for each in ranges)


def find_export_manifest(directory: Path, *, follow_links: bool = False) -> ExportManifest | None:
    """Return the manifest of the export in *directory*. Returns None when it has none, so that nothing can be compared.

    Raises :class:`CheckpointUnusable` for a manifest that cannot be read.
    """
    if not os.path.lexists(directory / layout.EXPORT_MANIFEST):
        return None
    return ExportManifest.read(directory, follow_links=follow_links)


def export_problems(directory: Path, *, num_threads: int = 2) -> list[Problem]:
    """Return all problems of the export in *directory*, by its manifest."""
    if directory.is_symlink():
        hint = "replace the link with the directory it points to"
        value = os.readlink(directory)
        return [Problem("an export is a symbolic link", str(directory), value, hint)]
    try:
        return ExportManifest.read(directory).problems(num_threads=num_threads)
    except CheckpointUnusable as error:
        return [*error.problems]


def exports_in(checkpoint: Path) -> list[Path]:
    """Return the exports in the directories of a checkpoint's modules, sorted."""
    modules = sorted(
        entry.path for entry in os.scandir(checkpoint) if entry.is_dir(follow_symlinks=False)
    )
    candidates = [Path(module, name) for module in modules for name in sorted(layout.EXPORTS)]
    return [path for path in candidates if os.path.lexists(path)]


def complete_exports(checkpoint: Path) -> list[Path]:
    """Return the exports in the directories of a checkpoint's modules that have a manifest, sorted."""
    return [path for path in exports_in(checkpoint) if (path / layout.EXPORT_MANIFEST).is_file()]


def _hint(directory: Path) -> str:
    command = "ckpt export --merge" if directory.name == layout.MERGED else "ckpt export"
    return f"export again: {command}; {_CHANGED_ON_PURPOSE}"


def _most_bytes(directory: Path) -> int:
    nbytes = 0
    for entry in os.scandir(directory):
        status = entry.stat()
        if entry.is_file() and not is_sparse(status):
            # st_blocks counts units of 512 bytes, whatever the file system's block size (stat(2)).
            nbytes += status.st_blocks * 512
    return min(_MAX_BYTES, max(_FREE_BYTES, nbytes // _DATA_RATIO))
