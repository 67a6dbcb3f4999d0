"""Import libraries for ``ckpt env``, in a separate process: an import may crash or take long."""

from __future__ import annotations

import importlib
import json
from types import ModuleType
from typing import Any


def main(names: list[str]) -> None:
    """Print a line of JSON for each library."""
    for name in names:
        print(json.dumps({"name": name, **_imported(name)}), flush=True)


def _imported(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        module = importlib.import_module(name)
        found["version"] = str(getattr(module, "__version__", "unknown"))
        if name == "torch":
            found |= _details(module)
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def _details(torch: ModuleType) -> dict[str, Any]:
    """Return what torch was built with, and the devices that it finds."""
    build = {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "git": torch.version.git_version,
        "cudnn": torch.backends.cudnn.version(),
        "threads": torch.get_num_threads(),
        "nccl": str(torch.cuda.nccl.version()) if torch.cuda.is_available() else None,
    }
    numbers = range(torch.cuda.device_count())
    return {"build": build, "devices": [torch.cuda.get_device_name(each) for each in numbers]}
