"""The batch script for Slurm, and the cluster that `make slurm` runs it on. The jobs themselves are `make slurm`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from automodel_ckpt.errors import EXIT_STOPPED

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
SRUN = """#!/bin/bash
printf '%s\\n' "$@" >> srun.args
exit $CODE
"""
SCONTROL = """#!/bin/bash
echo "$@" >> scontrol.args
"""


def run_script(directory: Path, code: int) -> subprocess.CompletedProcess[str]:
    """Run the batch script with programs in place of srun and scontrol that note their arguments."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    environment = {"PATH": f"{directory}:{os.environ['PATH']}", "CODE": str(code), "SLURM_JOB_ID": "7"}
    return subprocess.run(
        ["bash", SCRIPT, "a recipe.yaml", "--seed", "3"],
        cwd=directory, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_batch_script_requeues_a_job_that_has_saved_and_no_other(tmp_path: Path) -> None:
    assert run_script(tmp_path, EXIT_STOPPED).returncode == EXIT_STOPPED
    assert (tmp_path / "scontrol.args").read_text() == "requeue 7\n"
    for code in (0, 1, 4):
        assert run_script(tmp_path, code).returncode == code
    assert (tmp_path / "scontrol.args").read_text() == "requeue 7\n"


def test_the_batch_script_lets_all_ranks_end_by_themselves(tmp_path: Path) -> None:
    run_script(tmp_path, 0)
    arguments = (tmp_path / "srun.args").read_text().splitlines()
    assert arguments == ["--kill-on-bad-exit=0", ".venv/bin/ckpt-train", "a recipe.yaml", "--seed", "3"]


def test_without_slurm_the_campaign_names_what_is_missing(tmp_path: Path) -> None:
    script = "import tools.slurm.cluster as c; c.PROGRAMS = ('no-such-daemon', 'bash')\n"
    script += "import runpy; runpy.run_module('tools.slurm', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr == "Slurm is not installed: no-such-daemon not found; apt-get install slurm-wlm munge\n"
