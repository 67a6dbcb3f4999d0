"""The cores and GPUs of this node, and how its ranks divide them."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import counted_are
from automodel_ckpt.checkpoint.files.type_aliases import Texts
from automodel_ckpt.errors import RecipeError


def cores() -> int:
    """Return the number of processor cores that this process may use: its affinity and the quota of its container."""
    quota = cpu_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return max(1, int(min(len(os.sched_getaffinity(0)), quota)))


def cpu_quota(membership: Path, tree: Path) -> float:
    """Return how many cores the control group of a process and its parents allow; infinity without a limit.

    *membership* contains the line ``0::/path`` (source: cgroups(7)). A container may see the whole path, or its own
    group at the root of *tree*. ``cpu.max`` contains "QUOTA PERIOD" or "max PERIOD".
    """
    quota = math.inf
    with suppress(OSError):
        paths = [line.rpartition(":")[2] for line in membership.read_text().splitlines()]
        groups = {tree, *(tree / path.lstrip("/") for path in paths)}
        for place in {each for group in groups for each in (group, *group.parents)}:
            with suppress(OSError, ValueError):
                limit, period = (place / "cpu.max").read_text().split()
                quota = min(quota, int(limit) / int(period))
    return quota


def visible_gpus(environment: Texts) -> int:
    """Estimate the number of GPUs without torch, from CUDA_VISIBLE_DEVICES or the driver's files."""
    devices = environment.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        names = [device.strip() for device in devices.split(",")]
        return len([name for name in names if name not in ("", "-1")])
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0


def count_ranks(requested: str, num_gpus: int, *, on_gpu: bool) -> int:
    """Return the number of ranks on this node for ``--nproc-per-node``.

    *num_gpus* is the number of GPUs of this node; *on_gpu* states whether the ranks use them. Raises
    :class:`RecipeError` if there are fewer GPUs than requested.
    """
    hint = "lower --nproc-per-node, or train on the CPU with --distributed.backend gloo"
    if requested == "cpu" or (requested == "auto" and num_gpus == 0):
        return cores()
    if requested == "gpu" and num_gpus == 0:
        what = "this node has no GPU"
        hint = "use --nproc-per-node cpu, auto or a number"
    elif requested in ("auto", "gpu"):
        return num_gpus
    elif on_gpu and 0 < num_gpus < int(requested):
        what = "more ranks on this node than it has GPUs"
    else:
        return int(requested)
    raise RecipeError(
        what,
        "--nproc-per-node",
        f"{requested} ({counted_are(num_gpus, 'GPU')} visible)",
        hint,
    )


def set_threads(environment: MutableMapping[str, str], num_ranks: int) -> None:
    """Divide the cores among the ranks, unless the user has set OMP_NUM_THREADS. torch reads it once, at its import."""
    # Without this, each rank would start a thread for every core of the node.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // max(1, num_ranks))))


def set_allocator(environment: MutableMapping[str, str]) -> None:
    """Let the segments of torch's allocator for GPUs grow, unless the user has set options of it.

    Otherwise, rows of many lengths leave gaps between segments, and a GPU runs out of memory although enough is free.
    torch reads the variable when CUDA is initialized.
    """
    # The later ones are names of earlier versions.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if any(name in environment for name in names):
        return
    if answers_about_fabric():
        environment[names[0]] = "expandable_segments:True"


def answers_about_fabric() -> bool:
    """Whether NVML answers what torch 2.13 to 2.15 ask when a segment of the allocator grows: about the GPU's fabric.

    Without the library, torch calls a null pointer there. Some containers have a GPU and no NVML: their image sets
    NVIDIA_DRIVER_CAPABILITIES to ``compute``, without ``utility``. An error, as on Jetson, is an error of torch's too
    (pytorch #186374). Source: c10/cuda/PeerToPeerAccess.cpp.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return False
    except (OSError, AttributeError):
        return False
    try:
        return _fabric_is_known(library)
    finally:
        # A process that is forked later initializes it again.
        library.nvmlShutdown()


def _fabric_is_known(library: Any) -> bool:
    query = getattr(library, "nvmlDeviceGetGpuFabricInfoV", None)
    if query is None:
        # torch does not ask a driver without this function.
        return True
    device = ctypes.c_void_p()
    # nvmlGpuFabricInfo_v2_t begins with its size and its version.
    info = (ctypes.c_uint32 * 9)(9 * 4 | 2 << 24)
    is_there = library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
    return bool(is_there and query(device, ctypes.byref(info)) == 0)
