"""Bit flips: one bit of one file of a checkpoint at a time, then whole files damaged; each must be found and named.

Every flip is judged by the full check of all files' digests, as ``ckpt verify`` and a resume make it; every hundredth
also by a real two-rank start, which must fall back to the checkpoint before, and every tenth in a model's files by an
export, which must refuse and write nothing.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from automodel_ckpt.checkpoint import Manifest
from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.slices import runs_in_file
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.errors import CheckpointUnusable, Problem
from tools.crash import inspect, jobs
from tools.crash.pair import Outcome
from tools.crash.place import Place
from tools.crash.record import Record
from tools.crash.subjects import Loaded, Subject

OLDER, NEWER = 10, 20
EVERY_START, EVERY_EXPORT = 100, 10
_ROWS = 128
_NOT_EXPORTED = {f"model/{layout.CONSOLIDATE_SCRIPT}", f"model/{layout.DCP_METADATA}"}
"""An export reads offsets and digests from the manifest, and never the script."""


@dataclass(frozen=True)
class Flip:
    """A bit of a file: *file* is relative to the checkpoint, *at* the byte, *bit* 0 to 7."""

    file: str
    at: int
    bit: int

    def apply(self, checkpoint: Path) -> None:
        """Flip it; a second time undoes it."""
        descriptor = os.open(checkpoint / self.file, os.O_RDWR)
        try:
            (byte,) = os.pread(descriptor, 1, self.at)
            os.pwrite(descriptor, bytes([byte ^ (1 << self.bit)]), self.at)
        finally:
            os.close(descriptor)


class Bench(Place):
    """Two checkpoints on tmpfs, whose newer one is damaged and mended again and again."""

    def __init__(self, subject: Subject, seed: int) -> None:
        super().__init__(seed)
        self.subject = replace(subject, rows=_ROWS)
        self.prepare(self.subject, self.root, (OLDER, NEWER))

    def starts(self) -> list[Outcome]:
        """What each rank resumes from."""
        outcomes = self.start(self.subject)
        self.pair.run(jobs.end)
        return outcomes

    def flip(self, directory: Path, files: list[str]) -> Flip:
        """Any bit of any file: half of the time all files are alike, half of the time all bytes."""
        sizes = [(directory / file).stat().st_size for file in files]
        weights = sizes if self.random.random() < 0.5 else None
        (index,) = self.random.choices(range(len(files)), weights=weights)
        return Flip(files[index], self.random.randrange(sizes[index]), self.random.randrange(8))


def owners(manifest: Manifest, file: str, at: int) -> set[str]:
    """The tensors (and pickled values) that a byte belongs to."""
    found = set()
    for tree in manifest.trees.values():
        for tensor in tree.stored:
            for piece in tensor.slices:
                runs = runs_in_file(piece, tensor.shape) if piece.file == file else ()
                if any(run.source <= at < run.source + run.nbytes for run in runs):
                    found.add(piece.fqn)
        for blob in tree.objects.values():
            if blob.file == file and blob.start <= at < blob.start + blob.nbytes:
                found.add(blob.fqn)
    return found


def is_exported(file: str) -> bool:
    """Whether an export reads the file."""
    return file.startswith("model/") and file not in _NOT_EXPORTED


def problems_of(checkpoint: Path) -> list[Problem]:
    """All that reading the manifest and checking every digest finds."""
    try:
        return verify(checkpoint, Manifest.read(checkpoint))
    except CheckpointUnusable as error:
        return list(error.problems)


def judge(checkpoint: Path, manifest: Manifest, flip: Flip) -> tuple[str, list[str]]:
    """Whether the flip, already made, is found, in this file and no other, and its tensor named and no other."""
    problems = problems_of(checkpoint)
    if not problems:
        return "not found", ["not found"]
    wrong = [f"{p.where} is named" for p in problems if Path(p.where) != checkpoint / flip.file]
    right = owners(manifest, flip.file, flip.at)
    value = " ".join(str(p.value) for p in problems)
    wrong += [f"{fqn} is not named" for fqn in right if f" {fqn}" not in value]
    named = {
        other
        for tree in manifest.trees.values()
        for other in tree.tensors
        if f"tensor {other} " in value
    }
    wrong += [f"{fqn} is named" for fqn in named - right]
    return ("found, tensor named" if right else "found, file named"), wrong


def _wrong_export(checkpoint: Path) -> list[str]:
    """Exporting the damaged checkpoint must fail and leave no trace."""
    before = sorted(str(path) for path in checkpoint.rglob("*"))
    try:
        consolidate(checkpoint, num_threads=1, log=lambda _: None)
    except CheckpointUnusable:
        after = sorted(str(path) for path in checkpoint.rglob("*"))
        return [] if after == before else ["the refused export left something"]
    shutil.rmtree(checkpoint / "model" / layout.CONSOLIDATED, ignore_errors=True)
    return ["a damaged model was exported"]


def _wrong_start(bench: Bench) -> list[str]:
    right = Loaded(OLDER, OLDER)
    return [
        f"resumed from {o.value}, not {right}: {o.error}"
        for o in bench.starts()
        if o.value != right
    ]


def flip_ours(bench: Bench, record: Record, points: int, end: float) -> None:
    """Single bits of a checkpoint of this project."""
    checkpoint = bench.root / f"epoch_0_step_{NEWER}"
    manifest = Manifest.read(checkpoint)
    files = [
        file for file in (*manifest.files, layout.MANIFEST) if (checkpoint / file).stat().st_size
    ]
    for number in range(points):
        if time.monotonic() > end:
            return
        flip = bench.flip(checkpoint, files)
        flip.apply(checkpoint)
        outcome, wrong = judge(checkpoint, manifest, flip)
        if number % EVERY_EXPORT == 0 and is_exported(flip.file):
            wrong += _wrong_export(checkpoint)
            record.notes["exports refused"] = record.notes.get("exports refused", 0) + 1
        if number % EVERY_START == 0:
            wrong += _wrong_start(bench)
            record.notes["starts that fell back"] = record.notes.get("starts that fell back", 0) + 1
        flip.apply(checkpoint)
        record.add(outcome, wrong, point=f"{bench.subject.name}/{flip}")
    if problems_of(checkpoint) or any(o.value != Loaded(NEWER, NEWER) for o in bench.starts()):
        record.add("mended", ["the mended checkpoint is refused"], point=bench.subject.name)


def _truncate(path: Path, _: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _extend(path: Path, _: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\0")


def _link(path: Path, older: Path) -> None:
    path.unlink()
    path.symlink_to(older)


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "truncated": _truncate,
    "emptied": lambda path, _: os.truncate(path, 0),
    "extended": _extend,
    "deleted": lambda path, _: path.unlink(),
    "swapped": lambda path, older: shutil.copyfile(older, path),
    "linked": _link,
}


def damage_files(bench: Bench, record: Record) -> None:
    """Every file cut, extended, removed, exchanged with the older checkpoint's, or a link to it."""
    checkpoint, older = (bench.root / f"epoch_0_step_{step}" for step in (NEWER, OLDER))
    manifest = Manifest.read(checkpoint)
    for file in (*manifest.files, layout.MANIFEST):
        whole = (checkpoint / file).read_bytes()
        for kind, damage in DAMAGES.items():
            if not whole and kind in ("truncated", "emptied"):
                continue
            damage(checkpoint / file, older / file)
            _judge_file(bench, record, checkpoint, file, whole, kind)
            (checkpoint / file).unlink(missing_ok=True)
            (checkpoint / file).write_bytes(whole)


def _judge_file(
    bench: Bench, record: Record, checkpoint: Path, file: str, whole: bytes, kind: str
) -> None:
    path = checkpoint / file
    if path.is_file() and not path.is_symlink() and path.read_bytes() == whole:
        return  # the older checkpoint's file is the same
    problems = problems_of(checkpoint)
    wrong = [] if problems else ["not found"]
    if file != layout.MANIFEST:
        wrong += [f"{p.where} is named" for p in problems if Path(p.where) != path]
    if is_exported(file):
        wrong += _wrong_export(checkpoint)
    record.add(
        f"file {kind}: found" if problems else f"file {kind}: not found",
        wrong,
        point=f"{bench.subject.name}/{file}/{kind}",
    )


def run(subjects: tuple[Subject, ...], *, points: int, seed: int, seconds: float) -> Record:
    """The campaign, *points* shared equally between the formats."""
    record = Record("flips", {"points": points, "seed": seed, "seconds": seconds})
    for subject in subjects:
        with Bench(subject, seed) as bench:
            damage_files(bench, record)
            end = time.monotonic() + seconds / len(subjects)
            flip_ours(bench, record, -(-points // len(subjects)), end)
            record.notes.setdefault("whole at the end", []).append(inspect.damage(bench.root) == [])
    return record


def run_baseline(subject: Subject, *, points: int, seed: int, seconds: float) -> Record:
    """Single bits of the files that another way of saving reads: does a start notice?"""
    limits = {"points": points, "seed": seed, "seconds": seconds}
    record = Record(f"flips of {subject.name}", limits)
    end = time.monotonic() + seconds
    with Bench(subject, seed) as bench:
        directory = max(path for path in bench.root.iterdir() if path.is_dir())
        files = sorted(os.listdir(directory))
        while record.points < points and time.monotonic() < end:
            flip = bench.flip(directory, files)
            flip.apply(directory)
            outcomes = bench.starts()
            flip.apply(directory)
            if not all(outcome.ok for outcome in outcomes):
                record.add("an error")
                continue
            harmless = all(outcome.value == Loaded(NEWER, NEWER) for outcome in outcomes)
            record.add("no effect" if harmless else "wrong values, unnoticed")
    return record
