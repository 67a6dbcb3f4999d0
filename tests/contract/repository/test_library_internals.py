"""Patches of other libraries: each is still needed. If one of these tests fails after an upgrade, remove the patch."""

import importlib
import inspect
from typing import Any


def test_transformers_still_has_no_setting_for_the_environment_of_chat_templates() -> None:
    rendering = importlib.import_module("transformers.utils.chat_template_utils")
    source = inspect.getsource(rendering)
    assert "jinja_env = ImmutableSandboxedEnvironment(" in source, "the patch has no effect"
    parameters = inspect.signature(rendering.render_jinja_template).parameters
    settings = [name for name in parameters if "env" in name]
    assert not settings, f"use {settings} instead of the patch in bounded_templates.py"


def test_torch_still_raises_the_death_of_a_worker_in_a_signal_handler_unless_it_is_set_already() -> (
    None
):
    from torch.utils.data._utils import signal_handling

    source = inspect.getsource(signal_handling._set_SIGCHLD_handler)
    assert "signal.signal(signal.SIGCHLD, handler)" in source, (
        "remove the assignment to _SIGCHLD_handler_set from data/batches/micro_batches.py"
    )
    assert "if _SIGCHLD_handler_set:\n        return" in source, "the assignment has no effect"


def test_torch_still_waits_for_workers_and_signals_them_when_its_iterator_ends() -> None:
    from torch.utils.data import dataloader

    iterator: Any = vars(dataloader)["_MultiProcessingDataLoaderIter"]
    source = inspect.getsource(iterator._shutdown_workers)
    assert "w.join(timeout=_utils.MP_STATUS_CHECK_INTERVAL)" in source
    assert "w.terminate()" in source, (
        "data/batches/micro_batches.py need not end the workers itself"
    )


def test_torch_still_wraps_the_steps_of_optimizers_without_the_mark_hooked() -> None:
    from torch.optim import Adam, Optimizer

    assert '"hooked", None' in inspect.getsource(Optimizer._patch_step_function)
    assert 'getattr(self, "grad_scale", None)' in inspect.getsource(Adam.step), (
        "torch's step no longer divides by grad_scale; see optim/build.py"
    )
    assert 'getattr(self, "found_inf", None)' in inspect.getsource(Adam.step), (
        "torch's step no longer reads found_inf; see optim/build.py"
    )
