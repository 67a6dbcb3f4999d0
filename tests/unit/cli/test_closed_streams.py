"""Standard streams that the caller closed."""

import subprocess
import sys

PROBE = """
import os, sys
from automodel_ckpt.base.terminal import occupy_standard_streams
occupy_standard_streams()
file = os.open("/proc/self/status", os.O_RDONLY)
print("lost")
sys.exit(0 if file > 2 and all(os.readlink(f"/proc/self/fd/{n}") == os.devnull for n in range(3)) else 1)
"""


def test_closed_streams_are_taken_by_dev_null_before_a_file_gets_their_numbers() -> None:
    shell = 'exec "$0" -c "$1" 0<&- 1>&- 2>&-'
    assert subprocess.run(["bash", "-c", shell, sys.executable, PROBE], check=False).returncode == 0
