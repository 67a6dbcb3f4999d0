"""The default optimizer, and which parameters any optimizer gets."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import traceback
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from automodel_ckpt.base.kernel_trial import has_triton, succeeds
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.errors import RecipeError

LEAST_ELEMENTS: float = 2**22
"""On a GPU, :mod:`adamw_kernel` updates tensors with at least as many elements; ``math.inf`` leaves all to torch.

Smaller ones would take less time than the launch of a kernel for each.
"""


def trainable(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of *modules* that require gradients, without duplicates."""
    found = {
        id(parameter): parameter
        for module in modules
        for parameter in module.parameters()
        if parameter.requires_grad
    }
    return list(found.values())


def check_optimizer(optimizer: object, takes_own_steps: bool) -> None:
    """Validate that the training loop can call ``optimizer.step()``.

    Raises :class:`RecipeError` if *optimizer* is not a torch.optim.Optimizer, or if its step requires a closure that
    computes the loss again (LBFGS) and the recipe does not override the step (*takes_own_steps*).
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RecipeError(
            "the optimizer is not a torch.optim.Optimizer",
            where="optimizer",
            value=type(optimizer).__name__,
        )
    needed = _required_arguments(optimizer.step)
    if needed and not takes_own_steps:
        raise RecipeError(
            "this optimizer evaluates the loss several times in a step, but the recipe computes it once",
            where="optimizer",
            value=f"{type(optimizer).__name__}.step({', '.join(needed)})",
            hint="use another optimizer, or override train_step in a recipe of your own",
        )


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    return [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]


def check_sharding_support(optimizer: torch.optim.Optimizer, error: Exception) -> None:
    """Explain an *error* of the optimizer's step that is due to an operation which DTensor does not support.

    Raises :class:`RecipeError` in that case; otherwise, returns and leaves *error* to the caller.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_from_step = any(frame.f_locals.get("self") is optimizer for frame in frames)
    # torch names the unsupported operation ("aten.…") or the tensor class; it has no exception class for this.
    mentions_sharding = "aten." in str(error) or "DTensor" in str(error)
    if is_from_step and mentions_sharding:
        raise RecipeError(
            "the optimizer cannot update sharded parameters",
            where="optimizer",
            value=f"{type(optimizer).__name__}: {str(error).splitlines()[0][:160]}",
            hint="use another one, such as torch.optim.AdamW or SGD, or distributed.strategy ddp, which does "
            "not shard parameters",
        ) from error


class FusedAdamW(torch.optim.AdamW):
    """AdamW with torch's fused kernel, which updates all parameters of a group in one call of C++.

    The kernel gets this rank's shards directly, because DTensor's dispatch costs more than the update of a small model.
    It can divide gradients while it reads them (:meth:`divide_in_step`), and leave out a step by a flag on the device
    (:attr:`found_inf`). Results are bit-equal to torch.optim.AdamW(fused=True). Its step is used for
    everything else: groups with tensors of several types or devices, amsgrad, maximize, closures and hooks.

    On a GPU, a Triton kernel updates float32 tensors of at least :data:`LEAST_ELEMENTS` elements. It has the operations
    of torch's kernel in the same order, each with the same rounding. On an H200, all results were bit-equal;
    elsewhere, the last bits can differ where a compiler combines a product and a sum
    differently. A step that divides gradients may leave ``grad`` as it was, or divided.
    """

    # torch's fused step divides gradients by this attribute, if it is not None (GradScaler uses the same interface).
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    """If it is 1 (0-dim, float32, on the device of the parameters), the next step changes nothing."""

    def __init__(self, params: Iterable[nn.Parameter], **settings: Any) -> None:
        super().__init__(params, **{"fused": True, **settings})

    def divide_in_step(self, divisor: float | Tensor) -> None:
        """Divide all gradients by *divisor* in the next step only; a tensor is 0-dim, on the parameters' device."""
        self.grad_scale = torch.as_tensor(divisor, dtype=torch.float32)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients. Returns the result of *closure*, which computes the gradients."""
        # A hook or a profiler expects torch's wrapper around the step.
        is_watched = (
            torch._C._autograd._profiler_enabled()
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        )
        if closure is None and not is_watched and self._step_on_shards():
            return None
        return self._step_of_torch(closure)

    # Without this mark (torch 2.10 to 2.13), torch's constructor wraps the method to call hooks and to open a profiler
    # record, which takes a fifth of a small model's update.
    step.hooked = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def _step_on_shards(self) -> bool:
        """Update this rank's shards. Returns False, without an update, if a group requires torch's own step."""
        # All groups are read before any is updated: if one requires torch's step, that step updates
        # all.
        inputs = []
        for group in self.param_groups:
            if (shards := self._shards_of(group)) is None:
                return False
            inputs.append(shards)
        for group, shards in zip(self.param_groups, inputs, strict=True):
            if shards.steps:
                self._update(group, shards)
        self.grad_scale = self.found_inf = None
        return True

    @torch.no_grad()
    def _step_of_torch(self, closure: Callable[[], float] | None) -> float | None:
        if self.grad_scale is not None:
            # Divided here, because torch's step cannot combine a plain grad_scale with DTensor gradients.
            gradients = []
            for group in self.param_groups:
                gradients += [p.grad for p in group["params"] if p.grad is not None]
            torch._foreach_div_(_local(gradients), self.grad_scale.item())
            self.grad_scale = None
        # grad_scale is None by now: torch's fused step would divide by it again. It reads found_inf.
        result = _STEP_OF_TORCH(self, closure)
        self.found_inf = None
        return result  # type: ignore[no-any-return]

    def _shards_of(self, group: ValueDict) -> _Shards | None:
        """The kernel's inputs for a parameter group. None when the group requires torch's own step."""
        if not group["fused"] or group["amsgrad"] or group["maximize"]:
            return None
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        # On a GPU, one call of the kernel accepts one dtype and one device.
        kinds = {(each.device, each.dtype) for each in parameters if not each.is_cpu}
        if len(kinds) > 1 or (kinds and any(each.is_cpu for each in parameters)):
            return None
        entries = [self.state[parameter] for parameter in parameters]
        if not all(entries):
            # torch creates the missing entries; the lists that it fills are not needed.
            self._init_group(group, *([] for _ in range(6)))  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in parameters]
        averages = [entry["exp_avg"] for entry in entries]
        squares = [entry["exp_avg_sq"] for entry in entries]
        steps = [entry["step"] for entry in entries]
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            for row in zip(parameters, gradients, averages, squares, strict=True):
                if len({_layout_of(tensor) for tensor in row}) > 1:
                    return None
            parameters, gradients = _local(parameters), _local(gradients)
            averages, squares = _local(averages), _local(squares)
        return _Shards(parameters, gradients, averages, squares, steps)

    def _update(self, group: ValueDict, shards: _Shards) -> None:
        beta1, beta2 = group["betas"]
        settings: ValueDict = {
            "lr": group["lr"],
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": group["weight_decay"],
            "eps": group["eps"],
            "grad_scale": self.grad_scale,
            "found_inf": self.found_inf,
        }
        rest = shards
        # torch keeps the numbers of updates in the host's memory for parameters that are there.
        if shards.steps[0].is_cpu:
            # One by one, which is faster than torch's foreach operation for a few dozen 0-dim tensors.
            for step in shards.steps:
                step.add_(1)
        else:
            torch._foreach_add_(shards.steps, 1)
            large, others = _divided(shards, group["lr"])
            update = _large_update(shards.parameters[0].device) if large.steps else None
            if update is not None:
                update(*large, **settings)
                rest = others
        if rest.steps:
            # The public torch.optim.adamw.adamw calls this operation too, but groups the tensors by device and dtype
            # first, which takes as long as the update of a small model (torch 2.13).
            torch._fused_adamw_(
                rest.parameters,
                rest.gradients,
                rest.averages,
                rest.squares,
                [],
                rest.steps,
                **settings,
                amsgrad=False,
                maximize=False,
            )
        if self.found_inf is not None:
            # The kernels leave out the update, but not the count above.
            torch._foreach_sub_(shards.steps, [self.found_inf] * len(shards.steps))


class _Shards(NamedTuple):
    """This rank's shards of the tensors of a parameter group, one item per parameter that has a gradient.

    *steps* are 0-dim: how often each parameter was updated.
    """

    parameters: list[Tensor]
    gradients: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]


def _divided(shards: _Shards, lr: object) -> tuple[_Shards, _Shards]:
    """The shards that the kernel for large tensors accepts, and the others."""
    large, others = _Shards([], [], [], [], []), _Shards([], [], [], [], [])
    # Without the loop, which would take longer than the update of small tensors.
    if isinstance(lr, Tensor) or not any(map(_is_large, shards.parameters)):
        return large, shards
    for row in zip(*shards, strict=True):
        fits = _is_large(row[0]) and all(map(_is_plain, row[:-1]))
        for tensors, tensor in zip(large if fits else others, row, strict=True):
            tensors.append(tensor)
    return large, others


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() >= LEAST_ELEMENTS


def _is_plain(tensor: Tensor) -> bool:
    """Whether *tensor* consists of consecutive float32 values. Other subclasses may have no memory."""
    is_known = type(tensor) in (Tensor, nn.Parameter)
    return is_known and tensor.dtype == torch.float32 and tensor.is_contiguous()


@functools.cache
def _large_update(device: torch.device) -> Callable[..., None] | None:
    """The kernel for large tensors; None where Triton is absent, or fails, which is logged."""

    def trial() -> None:
        from automodel_ckpt.optim import adamw_kernel

        adamw_kernel.try_once(device)

    if not has_triton() or not succeeds(trial, "AdamW updates large tensors"):
        return None
    from automodel_ckpt.optim import adamw_kernel

    return adamw_kernel.update


_STEP_OF_TORCH: Any = torch.optim.Optimizer.profile_hook_step(
    inspect.unwrap(torch.optim.AdamW.step)
)
"""AdamW's step, wrapped so that hooks and profilers see a FusedAdamW."""


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's shards of *tensors*; a plain tensor is its own shard."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def current_rate(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate of the first parameter group for the next step; NaN if the optimizer computes it itself."""
    rate = optimizer.param_groups[0]["lr"]
    return math.nan if rate is None else float(rate)


def skips_by_flag(optimizer: torch.optim.Optimizer) -> bool:
    """Whether :func:`skip_step_if` works with *optimizer*: torch's fused optimizers read ``found_inf``."""
    return all(
        getattr(part, "_step_supports_amp_scaling", False)
        and all(group.get("fused") for group in part.param_groups)
        for part in parts_of(optimizer)
    )


def skip_step_if(optimizer: torch.optim.Optimizer, flag: Tensor) -> None:
    """Make the next step of *optimizer* change nothing if *flag* is true: 0-dim, on the device of the parameters.

    The host does not read *flag*. Requires :func:`skips_by_flag`.
    """
    for part in parts_of(optimizer):
        part.found_inf = flag.float()


def parts_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The optimizers that a CombinedOptimizer steps; *optimizer* alone if it is another one."""
    return getattr(optimizer, "optimizers", [optimizer])


def _layout_of(tensor: Tensor) -> object:
    """The mesh and the placements of a DTensor; None for another tensor."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


log = logging.getLogger("automodel_ckpt")

_MAX_AUTOMATIC_WARMUP = 1000


def build_schedule(
    optimizer: Optimizer,
    name: str,
    *,
    total_steps: int | None,
    warmup_steps: int | str | None = None,
    warmup_ratio: float | None = None,
    warmup_from: float = 0.0,
    decay_steps: int | None = None,
    kwargs: Values | None = None,
) -> LRScheduler:
    """Build the schedule *name* over *decay_steps* (default: *total_steps*), which include the warm-up.

    *warmup_steps* is a number, or ``auto``: a tenth of *total_steps*, rounded down, and at most 1000. The warm-up
    begins at the fraction *warmup_from* of the rate. The warm-up of *warmup_ratio* is
    rounded up, as in transformers.
    Raises :class:`RecipeError` if the schedule requires an unknown length (a stream without max_steps), or does not
    accept *kwargs*.
    """
    # Imported here, because these modules import half of transformers' trainer and peft.
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler
    from transformers.trainer_utils import SchedulerType

    length = decay_steps or total_steps
    function: Any = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]
    parameters = inspect.signature(function).parameters
    warms_up, decays = "num_warmup_steps" in parameters, "num_training_steps" in parameters
    decays_or_warms_up = decays or warmup_ratio is not None
    for key, value, is_used in (
        ("warmup_steps", warmup_steps, warms_up),
        ("warmup_ratio", warmup_ratio, warms_up),
        ("warmup_from", warmup_from or None, warms_up),
        ("decay_steps", decay_steps, decays_or_warms_up),
    ):
        if value is not None and not is_used:
            raise RecipeError(
                f"the schedule {name} does not use {key}",
                where=f"lr_scheduler.{key}",
                value=value,
            )
    is_tenth = warmup_steps == "auto"
    if (length is None and decays_or_warms_up) or (total_steps is None and is_tenth):
        key = "warmup_steps" if is_tenth else "name"
        raise RecipeError(
            "this schedule requires the number of steps, which the data set does not define",
            where=f"lr_scheduler.{key}",
            value=warmup_steps if is_tenth else name,
            hint="set step_scheduler.max_steps",
        )
    if is_tenth:
        warmup_steps = min(_MAX_AUTOMATIC_WARMUP, (total_steps or 0) // 10)
    warmup = int(warmup_steps or 0)
    if warmup_ratio is not None and length is not None:
        warmup = math.ceil(length * warmup_ratio)
    if total_steps is not None and warmup >= total_steps > 1:
        log.warning(
            "the learning rate does not reach its peak: it warms up for %d steps, and the run has %d "
            "(lr_scheduler.warmup_steps)",
            warmup,
            total_steps,
        )
    # get_scheduler ignores what the constant schedules do not accept. last_epoch belongs to the checkpoint.
    unknown = sorted((kwargs or {}).keys() - (parameters.keys() - {"last_epoch"}))
    try:
        if unknown:
            raise TypeError(f"{name} has no argument {', '.join(unknown)}")
        schedule: LRScheduler = get_scheduler(name, optimizer, warmup, length, dict(kwargs or {}))
        if warmup_from and isinstance(schedule, LambdaLR):
            # A partial has the state of transformers' own factors: none.
            schedule.lr_lambdas = [
                partial(_raised, each, warmup, warmup_from) for each in schedule.lr_lambdas
            ]
            follow_schedule(schedule)
        # Errors in the values must not appear only after the warm-up.
        for factor in getattr(schedule, "lr_lambdas", ()):
            factor(warmup)
            factor(length or warmup + 1)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise RecipeError(
            f"the schedule {name} cannot be computed with these values",
            where="lr_scheduler.kwargs",
            value=f"{dict(kwargs or {})} ({type(error).__name__}: {error})",
            hint="correct them, or remove them to use the schedule's defaults",
        ) from error
    return schedule


def _raised(factor: Callable[[int], float], warmup: int, start: float, step: int) -> float:
    """The factor of a schedule at *step*, if its warm-up of *warmup* steps begins at *start* instead of 0."""
    value = float(factor(step))
    if step >= warmup:
        return value
    return start + (1 - start) * value


def check_scalable(optimizer: Optimizer) -> None:
    """Raise :class:`RecipeError` if *optimizer* has no learning rates that a schedule could scale."""
    if any(group["lr"] is None for group in optimizer.param_groups):
        raise RecipeError(
            "the optimizer sets its own learning rates, which a schedule cannot scale",
            where="lr_scheduler",
            value=f"{type(optimizer).__name__} without lr",
            hint="remove the section lr_scheduler, or set optimizer.lr (Adafactor: and relative_step: false)",
        )


def check_schedule(schedule: object) -> None:
    """Raise :class:`RecipeError` unless *schedule* is a schedule of torch that depends on nothing but the step."""
    if not isinstance(schedule, LRScheduler):
        raise RecipeError(
            "the schedule is not a torch.optim.lr_scheduler.LRScheduler",
            where="lr_scheduler",
            value=type(schedule).__name__,
        )
    if needed := _required_arguments(schedule.step):
        raise RecipeError(
            "this schedule needs more than the step",
            where="lr_scheduler",
            value=f"{type(schedule).__name__}.step({', '.join(needed)})",
            hint="use another schedule; step_scheduler.early_stopping ends a run that no longer improves",
        )


def follow_schedule(schedule: LambdaLR) -> None:
    """Set the learning rates that *schedule* has at its current step.

    A loaded state contains the rates of the schedule that saved it, which may have been another one.
    """
    rates = [
        base * factor(schedule.last_epoch)
        for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    # What get_last_lr() returns; LRScheduler has no setter.
    schedule._last_lr = rates


def fast_forward(schedule: LRScheduler, num_steps: int) -> None:
    """Set a new *schedule* and the learning rates of its optimizer to their state after *num_steps* steps."""
    if isinstance(schedule, LambdaLR):
        # LambdaLR computes rates from last_epoch alone. step() would warn if the count did not match.
        schedule.last_epoch = num_steps
        schedule._step_count = num_steps + 1
        follow_schedule(schedule)
        return
    with warnings.catch_warnings():
        # torch warns because no step of the optimizer precedes these.
        warnings.simplefilter("ignore")
        for _ in range(num_steps):
            schedule.step()
