"""The properties of GPUs, for code that is imported in a process that forks later.

bitsandbytes and torchao read the compute capability of the GPUs when they are imported, and transformers and peft
import them wherever they are installed. torch initializes CUDA to answer, and then no process that is forked later can
use a GPU. torch's count of the GPUs does the same where NVML cannot count them: in containers without it, on Jetson,
and with ``CUDA_VISIBLE_DEVICES=MIG-...``. A forked process can answer instead.

This module imports nothing of the package, so that the server of the tests' commands can load it alone.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any


@contextmanager
def without_initializing_cuda() -> Iterator[None]:
    """Let a forked process answer what code of this context asks torch about GPUs; nothing changes without a GPU.

    The functions of torch that only read properties (``get_device_properties`` and those that call it) or count the
    GPUs then do not initialize CUDA in this process. The current device is the first one, as in every new process. All
    other functions do what they always do, and so do all functions in processes that are forked in this context.
    """
    import torch

    cuda: Any = torch.cuda
    if cuda.is_initialized():
        yield
        return
    owner = os.getpid()

    def answers_itself() -> bool:
        # torch reads the properties of all GPUs while it initializes CUDA. A process forked then cannot read them.
        return os.getpid() != owner or cuda.is_initialized() or _is_initializing(cuda)

    counted, asked, current = cuda.device_count, cuda.get_device_properties, cuda.current_device
    known: dict[str, SimpleNamespace] = {}
    counts: list[int] = []

    def count() -> Any:
        if answers_itself() or not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            return counted()
        if not counts:
            counts.append(_in_forked_process(lambda: {"count": counted()})["count"])
        return counts[0]

    def properties(device: Any = None) -> Any:
        if answers_itself():
            return asked(device)
        # The forked process has the same current device: the first one.
        name = str(device)
        if name not in known:
            known[name] = SimpleNamespace(**_in_forked_process(lambda: _fields(asked(device))))
        return known[name]

    cuda.device_count, cuda.get_device_properties = count, properties
    cuda.current_device = lambda: current() if answers_itself() else 0
    try:
        yield
    finally:
        cuda.device_count, cuda.get_device_properties = counted, asked
        cuda.current_device = current


def _is_initializing(cuda: Any) -> bool:
    """Whether this thread is in torch's initialization of CUDA, before ``torch.cuda.is_initialized()`` is True."""
    return bool(getattr(getattr(cuda, "_tls", None), "is_initializing", False))


def _fields(properties: Any) -> dict[str, Any]:
    """The public fields of a device's properties. Values of torch's own types, such as the UUID, are text."""
    fields = {}
    for name in dir(properties):
        value = getattr(properties, name)
        if name.startswith("_") or callable(value):
            continue
        fields[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return fields


def _in_forked_process(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a function returns in a forked process. Raises RuntimeError with the text of its exception."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(function, sender))
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork in a process with threads. The child runs no code that needs them.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    try:
        fields, error = receiver.recv()
    except EOFError:
        fields, error = {}, "the process that reads them ended"
    finally:
        # Also if a signal ended the wait.
        process.kill()
        process.join()
        receiver.close()
    if error:
        raise RuntimeError(f"the properties of the GPUs cannot be read: {error}")
    found: dict[str, Any] = fields
    return found


def _answer(function: Callable[[], dict[str, Any]], sender: Connection) -> None:
    """Send the result and the error of a function."""
    try:
        sender.send((function(), ""))
    except BaseException as error:
        sender.send(({}, f"{type(error).__name__}: {error}"))
