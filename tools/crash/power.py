"""Power cuts: a file system on a loop image is shut down in the middle of saves, mounted again, and started on anew.

The shutdown ioctl of ext4 and XFS drops what is not on disk yet and fails every later call, as a cut does; mounting
replays the journal. The image keeps every block that the file system has written to it: a disk that loses blocks it
acknowledged after a flush is not imitated. Needs root, loop devices and mkfs.
"""

import contextlib
import fcntl
import math
import os
import random
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from tools.crash import inspect, jobs
from tools.crash.jobs import Run
from tools.crash.pair import Outcome, Pair, Rank
from tools.crash.record import Record
from tools.crash.subjects import NOTHING, Options, Subject, failed, found

FILE_SYSTEMS = ("ext4", "xfs")
_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2
"""EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN are the same request."""
_MEGABYTES = {"ext4": 64, "xfs": 320}
_MKFS = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"]}
_OPTIONS = {"ext4": "loop", "xfs": "loop,nouuid"}
KEEP_LAST = 3
_LONGEST_SECONDS = 0.4
NOTHING_RETURNED = "nothing had returned"
_GOES_ON = {"the last that returned", "one begun, then finished", NOTHING_RETURNED}


def unsupported(file_system: str) -> str | None:
    """Why this machine cannot cut that file system's power, or None."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if shutil.which(_MKFS[file_system][0]) is None:
        package = "Debian: apt-get install e2fsprogs xfsprogs"
        return f"{_MKFS[file_system][0]} is not installed ({package})"
    try:
        with Disk(file_system):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"a loop image cannot be mounted: {error}"


def no_disk() -> str | None:
    """Why no file system can be cut here, or None."""
    reasons = [unsupported(name) for name in FILE_SYSTEMS]
    return "; ".join(reason for reason in reasons if reason) if all(reasons) else None


class Disk:
    """A file system in a sparse image in memory, mounted."""

    def __init__(self, file_system: str) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="power-", dir="/dev/shm"))
        self.mount_point = self._directory / "mnt"
        self._image = self._directory / "image"
        self._options = _OPTIONS[file_system]
        self.mount_point.mkdir()
        try:
            with open(self._image, "wb") as file:
                file.truncate(_MEGABYTES[file_system] << 20)
            _command([*_MKFS[file_system], str(self._image)])
            self._mount()
        except BaseException:
            shutil.rmtree(self._directory)
            raise

    def _mount(self) -> None:
        _command(["mount", "-o", self._options, str(self._image), str(self.mount_point)])

    def mount_again(self) -> None:
        """Power on: what the image contains, on a new device. A mount namespace that another process made meanwhile
        keeps the old mount, and mounting the same image again would give that one, shut down for good."""
        copy = self._directory / "copy"
        _command(["cp", "--sparse=always", str(self._image), str(copy)])
        copy.rename(self._image)
        self._mount()

    def cut(self) -> None:
        """Power off: nothing more reaches the image."""
        descriptor = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def unmount(self, *, seconds: float = 20.0) -> bool:
        """Whether it could be unmounted within *seconds*: not while a process holds a file."""
        end = time.monotonic() + seconds
        while subprocess.run(["umount", str(self.mount_point)], capture_output=True).returncode:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.unmount():
            print(f"{self.mount_point} cannot be unmounted: a process holds a file", flush=True)
        shutil.rmtree(self._directory, ignore_errors=True)


def _command(arguments: list[str]) -> None:
    subprocess.run(arguments, check=True, capture_output=True)


class Cycle:
    """Save until the power is cut, mount, start anew; again and again on the same disk and, where they have let go of
    it, by the same two ranks."""

    def __init__(self, subject: Subject, disk: Disk, seed: int) -> None:
        self._disk, self._pair = disk, Pair()
        self._random = random.Random(seed)
        self.root = disk.mount_point / "run"
        self._run = Run(subject, self.root, (), Options(keep_last=KEEP_LAST))
        self.step = 1
        self.returned: int | None = None

    def start(self) -> list[Outcome]:
        return self._pair.run(jobs.begin, self._run)

    def save_and_cut(self) -> list[str]:
        """Cut at a random instant of saving; note the last save that had returned. Returns what is wrong with how the
        ranks fail."""
        for rank in self._pair.ranks:
            rank.messages.clear()
        self._pair.tell(jobs.save_until_it_fails, self.step)
        outcomes: dict[int, Outcome] = {}
        end = time.monotonic() + self._random.uniform(0, _LONGEST_SECONDS)
        while (left := end - time.monotonic()) > 0:
            self._pair.serve_once(outcomes, None, seconds=left)
        self._disk.cut()
        # Our ranks must end together. Others wait for each other, and are killed with their machine.
        is_ours = self._run.subject.is_ours
        ended = self._pair.finish(seconds=60.0 if is_ours else 1.0)
        disagreement = _disagreement(self._pair.ranks, ended)
        saved = [step for rank in self._pair.ranks for step in rank.messages]
        self.returned = max(saved, default=self.returned)
        if self._pair.alive and not disagreement:
            self._pair.run(jobs.forget)
        if not self._pair.alive or disagreement or not self._disk.unmount(seconds=0.1):
            # Other processes, where the old ones died or still hold a file of the disk that went.
            self._pair.close()
            self._pair = Pair()
            self._disk.unmount()
        self._disk.mount_again()
        return disagreement if is_ours else []

    def close(self) -> None:
        self._pair.close()

    def found(self, outcomes: list[Outcome]) -> tuple[str, list[str]]:
        """What the start after a cut found: (outcome, what is wrong with it); the next saves go on from there."""
        outcome, loaded = found(outcomes)
        if outcome == NOTHING and self.returned is None:
            return NOTHING_RETURNED, []
        if loaded is None:
            return outcome, failed("no start", outcomes) or ["all is lost"]
        self.step = loaded.step + 1
        if outcome:
            return outcome, [f"step {loaded.step} is not what was saved"]
        if self.returned is not None and loaded.step < self.returned:
            lost = f"step {self.returned} had returned, {loaded.step} was found"
            return "a finished save lost", [lost]
        newer = self.returned is None or loaded.step > self.returned
        return "one begun, then finished" if newer else "the last that returned", []


def _disagreement(ranks: list[Rank], outcomes: list[Outcome]) -> list[str]:
    """Ranks that did not fail in the same save, or not as they should."""
    last = {max(rank.messages, default=None) for rank in ranks}
    if len(last) == 1 and {outcome.kind for outcome in outcomes} == {"SaveFailed"}:
        return []
    said = [f"{outcome.kind}: {outcome.error[:300]}" for outcome in outcomes]
    return [f"the ranks do not fail together, after {last}: " + "; ".join(said)]


def run(
    subjects: tuple[Subject, ...],
    file_systems: tuple[str, ...] = FILE_SYSTEMS,
    *,
    points: int,
    seed: int,
    seconds: float,
    name: str = "power cuts",
) -> Record:
    """The campaign, *points* and *seconds* shared equally; other programs are only counted."""
    jobs.warm_up()
    record = Record(name, {"points": points, "seed": seed, "seconds": seconds})
    skipped = {each: reason for each in file_systems if (reason := unsupported(each))}
    record.notes |= {f"{each} skipped": reason for each, reason in skipped.items()}
    usable = [each for each in file_systems if each not in skipped]
    parts = [(subject, file_system) for subject in subjects for file_system in usable]
    for number, (subject, file_system) in enumerate(parts, start=1):
        last = math.ceil(points * number / len(parts))
        end = time.monotonic() + seconds / len(parts)
        while record.points < last and time.monotonic() < end:
            _cut_one_disk(record, subject, file_system, last, seed + record.points, end)
    return record


def _cut_one_disk(
    record: Record, subject: Subject, file_system: str, last: int, seed: int, end: float
) -> None:
    """Cut after cut, until the record has the *last* point; a loss ends the disk, so that it is counted once."""
    with Disk(file_system) as disk, contextlib.closing(Cycle(subject, disk, seed)) as cycle:
        cycle.start()
        outcome = NOTHING_RETURNED
        while outcome in _GOES_ON and record.points < last and time.monotonic() < end:
            wrong = cycle.save_and_cut()
            outcome, lost = cycle.found(cycle.start())
            if subject.is_ours:
                wrong += lost + inspect.damage(cycle.root)
                wrong += inspect.unclean(cycle.root, running=True)
            point = f"{subject.name}/{file_system}/{record.points}"
            record.add(f"{file_system}: {outcome}", wrong, point=point, seed=seed)
