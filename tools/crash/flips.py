"""Damaged files: one bit flipped at a time, or a whole file damaged. Each damage must be found and named.

Each is judged by the full check of all files' digests, as ``ckpt verify`` and a resume make it; every hundredth flip
also by a real two-rank start, which must fall back to the checkpoint before, and every tenth in a model's files by an
export, which must refuse and write nothing.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
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


def _truncate(path: Path, _: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _extend(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


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
"""What happens to a whole file; the second path is the same file of the older checkpoint."""


@dataclass(frozen=True)
class Damage:
    """A damaged *file* of a checkpoint: one of :data:`DAMAGES`, or ``flipped``, which is a *bit* of the byte *at*."""

    file: str
    kind: str
    at: int = 0
    bit: int = 0

    def apply(self, checkpoint: Path, older: Path) -> None:
        path = checkpoint / self.file
        if self.kind != "flipped":
            DAMAGES[self.kind](path, older / self.file)
            return
        content = bytearray(path.read_bytes())
        content[self.at] ^= 1 << self.bit
        path.write_bytes(content)

    @property
    def is_exported(self) -> bool:
        return self.file.startswith("model/") and self.file not in _NOT_EXPORTED


class Bench(Place):
    """Two checkpoints on tmpfs. The newer one is damaged and mended again and again."""

    def __init__(self, subject: Subject, seed: int) -> None:
        super().__init__(seed)
        self.subject = replace(subject, rows=_ROWS)
        self.prepare(self.subject, self.root, (OLDER, NEWER))

    def starts(self) -> list[Outcome]:
        outcomes = self.start(self.subject)
        self.pair.run(jobs.end)
        return outcomes

    def flip(self, directory: Path, files: list[str]) -> Damage:
        """Any bit of any file: half of the time all files are alike, half of the time all bytes."""
        sizes = [(directory / file).stat().st_size for file in files]
        weights = sizes if self.random.random() < 0.5 else None
        (index,) = self.random.choices(range(len(files)), weights=weights)
        at, bit = self.random.randrange(sizes[index]), self.random.randrange(8)
        return Damage(files[index], "flipped", at, bit)


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


def problems_of(checkpoint: Path) -> list[Problem]:
    """All that reading the manifest and checking every digest finds."""
    try:
        return verify(checkpoint, Manifest.read(checkpoint))
    except CheckpointUnusable as error:
        return list(error.problems)


def judge(checkpoint: Path, manifest: Manifest, damage: Damage) -> tuple[str, list[str]]:
    """Whether the damage, already done, is found in this file and no other; of a flip also the right tensors."""
    problems = problems_of(checkpoint)
    if not problems:
        return f"{damage.kind}: not found", ["not found"]
    path = checkpoint / damage.file
    wrong = [f"{problem.where} is named" for problem in problems if Path(problem.where) != path]
    if damage.kind != "flipped":
        return f"{damage.kind}: found", wrong if damage.file != layout.MANIFEST else []
    right = owners(manifest, damage.file, damage.at)
    value = " ".join(str(problem.value) for problem in problems)
    wrong += [f"{fqn} is not named" for fqn in right if f" {fqn}" not in value]
    for tree in manifest.trees.values():
        others = tree.tensors.keys() - right
        wrong += [f"{fqn} is named" for fqn in others if f"tensor {fqn} " in value]
    return ("flipped: found, tensor named" if right else "flipped: found, file named"), wrong


def _wrong_export(checkpoint: Path) -> list[str]:
    """Exporting the damaged checkpoint must fail and leave no trace."""
    before = sorted(checkpoint.rglob("*"))
    try:
        consolidate(checkpoint, num_threads=1, log=lambda _: None)
    except CheckpointUnusable:
        return [] if sorted(checkpoint.rglob("*")) == before else ["the export left something"]
    shutil.rmtree(checkpoint / "model" / layout.CONSOLIDATED, ignore_errors=True)
    return ["a damaged model was exported"]


def _wrong_start(bench: Bench, step: int) -> list[str]:
    right = Loaded(step, step)
    return [f"resumed from {o.value}: {o.error}" for o in bench.starts() if o.value != right]


def damages_of(bench: Bench, checkpoint: Path, files: list[str], points: int) -> Iterator[Damage]:
    """Every damage of every whole file, then random flips."""
    for file in files:
        yield from (Damage(file, kind) for kind in DAMAGES)
    filled = [file for file in files if (checkpoint / file).stat().st_size]
    for _ in range(points):
        yield bench.flip(checkpoint, filled)


def check_all(bench: Bench, record: Record, points: int, seconds: float) -> None:
    """Damage and mend the newer checkpoint again and again."""
    checkpoint, older = (bench.root / f"epoch_0_step_{step}" for step in (NEWER, OLDER))
    manifest = Manifest.read(checkpoint)
    files = [*manifest.files, layout.MANIFEST]
    end = time.monotonic() + seconds
    num_flips = 0
    for damage in damages_of(bench, checkpoint, files, points):
        if time.monotonic() > end:
            break
        path = checkpoint / damage.file
        whole = path.read_bytes()
        if not whole and damage.kind in ("truncated", "emptied"):
            continue
        damage.apply(checkpoint, older)
        is_same = path.is_file() and not path.is_symlink() and path.read_bytes() == whole
        if not is_same:  # the older checkpoint can have the same file
            outcome, wrong = judge(checkpoint, manifest, damage)
            is_flip = damage.kind == "flipped"
            if damage.is_exported and (not is_flip or num_flips % EVERY_EXPORT == 0):
                wrong += _wrong_export(checkpoint)
            if is_flip and num_flips % EVERY_START == 0:
                wrong += _wrong_start(bench, OLDER)
            num_flips += is_flip
            record.add(outcome, wrong, point=f"{bench.subject.name}/{damage}")
        path.unlink(missing_ok=True)
        path.write_bytes(whole)
    wrong = inspect.damage(bench.root) + _wrong_start(bench, NEWER)
    record.add("mended", wrong, point=bench.subject.name)


def run(subjects: tuple[Subject, ...], *, points: int, seed: int, seconds: float) -> Record:
    """The campaign, *points* shared equally between the formats."""
    record = Record("flips", {"points": points, "seed": seed, "seconds": seconds})
    for subject in subjects:
        with Bench(subject, seed) as bench:
            check_all(bench, record, -(-points // len(subjects)), seconds / len(subjects))
    return record


def run_baseline(subject: Subject, *, points: int, seed: int, seconds: float) -> Record:
    """Single bits of the files that another way of saving reads: does a start notice?"""
    limits = {"points": points, "seed": seed, "seconds": seconds}
    record = Record(f"flips of {subject.name}", limits)
    with Bench(subject, seed) as bench:
        directory = max(path for path in bench.root.iterdir() if path.is_dir())
        files = sorted(os.listdir(directory))
        while record.goes_on:
            flip = bench.flip(directory, files)
            whole = (directory / flip.file).read_bytes()
            flip.apply(directory, directory)
            outcomes = bench.starts()
            (directory / flip.file).write_bytes(whole)
            if not all(outcome.ok for outcome in outcomes):
                record.add("an error")
            elif all(outcome.value == Loaded(NEWER, NEWER) for outcome in outcomes):
                record.add("no effect")
            else:
                record.add("wrong values, unnoticed")
    return record
