"""Runs ``ckpt`` on files that an attacker wrote, and checks that it does no harm."""

import os
from collections.abc import Sequence
from pathlib import Path

from automodel_ckpt.cli import ckpt
from tests.hostile.harness import sandbox


def check_harmless(
    run: Path, *words: str | Path, codes: Sequence[int] = (3,), beside: Sequence[str] = ()
) -> sandbox.Outcome:
    """Run a command in the sandbox.

    It must end with one of *codes*, stay within its limits, and leave nothing in the directory of *run* but *run* and
    what was *beside* it.
    """
    outcome = sandbox.run(lambda: ckpt.main([str(word) for word in words]), run)
    report = f"{outcome.text[-2000:]}\n{outcome}"[:3000]
    assert not outcome.violations, report
    assert sorted(os.listdir(run.parent)) == sorted([run.name, *beside]), report
    assert outcome.code in codes and "Traceback" not in outcome.text, report
    assert "this is a bug" not in outcome.text, report
    assert outcome.seconds < sandbox.SECONDS and outcome.extra_bytes < sandbox.EXTRA_BYTES, report
    return outcome
