"""Registration of host memory with CUDA (page-locking), so that copies from the device are asynchronous and fast.

It can fail: a process may lock only so many bytes (``ulimit -l``), and containers and sandboxes such as gVisor may lock
none. Copies to ordinary memory give the same bytes, but the host waits for them.
"""

from __future__ import annotations

import logging
import resource
from typing import Any, Protocol

import torch

from automodel_ckpt.base.units import size_text

log = logging.getLogger("automodel_ckpt")

_SUCCESS = 0


class Cudart(Protocol):
    """The functions of the CUDA runtime that are called, as ``torch.cuda.cudart()`` has them."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any: ...  # noqa: N802
    def cudaHostUnregister(self, address: int) -> Any: ...  # noqa: N802


class PageLock:
    """Locks and unlocks memory. After the first failure, which is logged, it locks nothing."""

    def __init__(self, cudart: Cudart | None = None) -> None:
        """*cudart* is the CUDA runtime; None: that of torch, when it is needed first."""
        self._cudart = cudart
        self._works = True
        self._locked: set[int] = set()

    def lock(self, tensor: torch.Tensor) -> bool:
        """Lock the memory of the CPU tensor *tensor*. Returns False, after a log line, if CUDA cannot."""
        if not self._works:
            return False
        address = tensor.data_ptr()
        try:
            status = int(self._runtime().cudaHostRegister(address, tensor.nbytes, 0))
        except RuntimeError as error:
            self._give_up(tensor.nbytes, str(error).splitlines()[0][:160])
            return False
        if status != _SUCCESS:
            self._give_up(tensor.nbytes, f"cudaHostRegister returned error {status}")
            self._clear_error()
            return False
        self._locked.add(address)
        return True

    def unlock(self, tensor: torch.Tensor) -> None:
        """Unlock the memory of *tensor* if :meth:`lock` has locked it. Raises RuntimeError if CUDA cannot."""
        address = tensor.data_ptr()
        if address in self._locked:
            self._locked.remove(address)
            status = int(self._runtime().cudaHostUnregister(address))
            if status != _SUCCESS:
                raise RuntimeError(f"cudaHostUnregister returned error {status}")

    def _runtime(self) -> Cudart:
        if self._cudart is None:
            self._cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return self._cudart

    def _give_up(self, nbytes: int, reason: str) -> None:
        self._works = False
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else size_text(soft)
        log.warning(
            "cannot page-lock %s for asynchronous saves (%s; ulimit -l is %s): training waits longer for each copy",
            size_text(nbytes),
            reason,
            limit,
        )

    def _clear_error(self) -> None:
        """Clear CUDA's last error, which torch would report for the next kernel of the training."""
        if not torch.cuda.is_available():
            return
        # torch has no binding of cudaGetLastError, but calls it after each kernel that it starts.
        try:
            torch.ones(1, device="cuda").add_(1)
        except RuntimeError as error:
            log.debug("cleared CUDA's last error: %s", error)
