"""Import torch for ``ckpt env``, in a separate process: an import may crash or take long."""

from __future__ import annotations

import json
from importlib import import_module


def main(_: list[str]) -> None:
    """Print what torch was built with, and the devices that it finds, as a line of JSON."""
    torch = import_module("torch")
    build = {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "git": torch.version.git_version,
        "cudnn": torch.backends.cudnn.version(),
        "threads": torch.get_num_threads(),
        "nccl": str(torch.cuda.nccl.version()) if torch.cuda.is_available() else None,
    }
    devices = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    print(json.dumps({**build, "devices": devices}), flush=True)
