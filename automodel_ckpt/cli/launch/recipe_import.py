"""Import torch and the recipe's code, once for all ranks that this process runs or forks.

Before the import, :func:`configure_torch` sets what torch reads then. After it, a launcher that forks validates that
the imported code has left nothing behind that does not survive a fork.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, MutableMapping
from typing import Any

from automodel_ckpt.base.python_child import freeze_in_forked_processes
from automodel_ckpt.cli.launch.node_resources import set_allocator
from automodel_ckpt.cli.launch.worker import RecipeClass
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.errors import RecipeError

NOISY_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
Prepare = Callable[[], tuple[LoadedRecipe, RecipeClass]]
"""Imports what the ranks need, and returns the checked recipe and its class."""


def configure_torch(environment: MutableMapping[str, str]) -> None:
    """Set the variables that torch reads at its import: fewer messages, and GPUs are counted without initializing CUDA.

    Variables that the user has set are not changed.
    """
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    set_allocator(environment)
    # After a restart, a shared store would give the new ranks the addresses of the old ones (pytorch #135712).
    environment.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    for name in NOISY_LOGGERS:
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.addHandler(logging.NullHandler())


def import_recipe(prepare: Prepare) -> tuple[LoadedRecipe, RecipeClass]:
    """Call *prepare* without garbage collection, which would traverse the objects of the modules again and again.

    These objects live as long as the process. Freezing them also keeps a collection in a rank from copying the memory
    pages that the ranks share.
    """
    gc.disable()
    try:
        return prepare()
    finally:
        gc.freeze()
        gc.enable()


def import_before_forks(prepare: Prepare) -> tuple[LoadedRecipe, RecipeClass]:
    """Import the recipe's code in a process that forks ranks, and return the recipe and its class.

    Code that reads the properties of a GPU when it is imported, such as bitsandbytes and torchao, does not initialize
    CUDA, which would not survive a fork.
    """
    from automodel_ckpt.cli.launch.gpu_properties import without_initializing_cuda

    def prepare_without_cuda() -> tuple[LoadedRecipe, RecipeClass]:
        with without_initializing_cuda():
            return prepare()

    freeze_in_forked_processes()
    return import_recipe(prepare_without_cuda)


def validate_cuda_not_initialized(torch: Any) -> None:
    """Raise :class:`RecipeError` if this process has initialized CUDA, which does not survive a fork."""
    if torch.cuda.is_initialized():
        raise RecipeError(
            "the recipe's code uses a GPU while it is imported; ranks that are forked afterwards cannot use any",
            where="recipe, _target_",
            value="torch.cuda is initialized",
            hint="move that code into a function, or start the ranks with torchrun",
        )
