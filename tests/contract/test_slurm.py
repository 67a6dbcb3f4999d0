"""The cluster that `make slurm` runs the batch script on; test_examples.py tests the script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_without_slurm_the_campaign_names_what_is_missing() -> None:
    script = "import tools.slurm.cluster as c; c.PROGRAMS = ('no-such-daemon', 'bash')\n"
    script += "import runpy; runpy.run_module('tools.slurm', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert (
        done.stderr
        == "Slurm is not installed: no-such-daemon not found; apt-get install slurm-wlm munge\n"
    )
