"""Import torch for ``ckpt env``, in a separate process: an import may crash or take long."""

from __future__ import annotations

import importlib
import json
from typing import Any


def main(_: list[str]) -> None:
    """Print what torch was built with, and the devices that it finds, as a line of JSON."""
    torch: Any = importlib.import_module("torch")
    build = {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "git": torch.version.git_version,
        "cudnn": torch.backends.cudnn.version(),
        "threads": torch.get_num_threads(),
        "nccl": str(torch.cuda.nccl.version()) if torch.cuda.is_available() else None,
    }
    numbers = range(torch.cuda.device_count())
    devices = [torch.cuda.get_device_name(each) for each in numbers]
    print(json.dumps({**build, "devices": devices}), flush=True)
