"""The same kills, power cuts and flips over plain DCP and safetensors, for comparison: outcomes, no promises."""

from __future__ import annotations

from collections.abc import Iterator

from tools.crash import flips, kill, power
from tools.crash.record import Record
from tools.crash.subjects import PlainDcp, PlainSafetensors
from tools.crash.syscalls import unsupported


def run(
    subjects: tuple[PlainDcp | PlainSafetensors, ...], *, points: int, seed: int, seconds: float
) -> Iterator[Record]:
    """A record per way of saving and campaign; *points* and *seconds* hold for each."""
    for subject in subjects:
        if reason := unsupported():
            print(f"the kill sweep is left out: {reason}")
        else:
            yield kill.run_baseline(subject, points=points, seed=seed, seconds=seconds)
        record = power.run(
            (subject,),
            power.FILE_SYSTEMS,
            points=points,
            seed=seed,
            seconds=seconds,
            violations=False,
        )
        record.campaign = f"power cuts of {subject.name}"
        if record.points:
            yield record
        yield flips.run_baseline(subject, points=points, seed=seed, seconds=seconds)
