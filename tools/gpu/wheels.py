"""Download what the reference machine lacks into .gpu-wheels, so that it can be carried there: make gpu-wheels.

The machine has Python 3.12 on x86-64, torch and transformers, and no network. The folder is ignored by git; with the
files of the repository it must stay below the 64 MiB that travel.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tools.support import ROOT

WHEELS = ROOT / ".gpu-wheels"
PINS = (
    "datasets==5.2.0 dill==0.4.1 httpx==0.28.1 multiprocess==0.70.19 omegaconf==2.4.0 python-dateutil==4.0.0 "
    # datasets imports pandas; the list of what is on the machine does not name it.
    "pandas==3.1.1 "
    # Optional: QLoRA, 8-bit optimizers and FP8, and other programs' loss heads to compare with.
    "bitsandbytes==0.50.2 cut-cross-entropy==25.1.1 liger-kernel==0.8.5 torchao==0.18.0"
)
"""Each without its dependencies: the others are on the machine."""
_CUDA = "libbitsandbytes_cuda130.so"
"""The library of bitsandbytes for the machine's CUDA. Those for other versions are most of its wheel."""
_MOST_BYTES = 64 << 20


def main() -> int:
    """Download the wheels; returns 1 if something is missing or too large."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir()
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(WHEELS)]
    command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    for version in ("2_28", "2_27", "2_24", "2_17"):
        command += ["--platform", f"manylinux_{version}_x86_64"]
    failed = [pin for pin in PINS.split() if subprocess.run([*command, pin]).returncode]
    for wheel in WHEELS.glob("bitsandbytes-*.whl"):
        strip(wheel)
    carried = sum(path.stat().st_size for path in WHEELS.iterdir())
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    total = carried + sum(path.lstat().st_size for path in files if path.is_file())
    print(f"{WHEELS}: {carried / 2**20:.1f} MiB, with the repository {total / 2**20:.1f} MiB")
    if failed:
        print(f"not downloaded: {', '.join(failed)}")
    if total > _MOST_BYTES:
        print("too large to be carried: remove the wheel of an optional package")
    return 1 if failed or total > _MOST_BYTES else 0


def strip(wheel: Path) -> None:
    """Remove the libraries of bitsandbytes for other versions of CUDA from its wheel.

    pip does not compare the list of files in a wheel with its content when it installs.
    """
    partial = wheel.with_suffix(".partial")
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.infolist():
            name = Path(entry.filename).name
            if name.endswith(".so") and "_cpu" not in name and name != _CUDA:
                continue
            target.writestr(entry, source.read(entry), zipfile.ZIP_DEFLATED)
    partial.replace(wheel)


if __name__ == "__main__":
    sys.exit(main())
