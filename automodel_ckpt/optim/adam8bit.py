"""AdamW with 8-bit moments: two bytes per parameter instead of eight; with bfloat16 weights that lose no update.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861: each block of values has a
scale, its largest absolute value, and each value is stored as the nearest entry of a table of 256 values.

A float32 number has the sign and the exponent of a bfloat16 number and 16 further bits. An optimizer that keeps these
bits with a bfloat16 weight updates float32 weights, without a copy of them in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automodel_ckpt.base.code_tables import decoded, dynamic_table, nearest
from automodel_ckpt.base.device_copies import to_device
from automodel_ckpt.base.kernel_trial import has_triton, succeeds
from automodel_ckpt.checkpoint.files.layout import FURTHER_BITS
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.optim.combined_optimizer import update_each

_MOMENTS = ("exp_avg", "exp_avg_sq")
_NAN = 0x7FC0
"""The bits of NaN in bfloat16."""
_SMALLEST_BLOCK = 32
_CHUNK = 2**24
"""Elements that are updated at a time, as float32 values take four times the memory of their codes, or more."""


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with moments of matrices in 8 bits, as codes [..., C] and scales [..., C / block].

    A block has up to *block_size* neighboring elements of a row: the largest power of two that divides the row's
    length. So the state does not depend on how rows are sharded, and a checkpoint can be loaded on any number of
    ranks. Moments of vectors, of parameters with fewer than *min_elements* elements, and of rows without a block of at
    least 32 are float32. Updates are computed in float32, from moments that are not rounded yet.

    With *float32_weights*, the state of a bfloat16 parameter [...] has its further bits as int16 [...]. The parameter
    is the float32 weight, rounded. Without them, updates of less than about 1/256 of a bfloat16 weight are lost.

    Raises :class:`RecipeError` in the first step for rows with shards that begin within a block.
    """

    optional_state = frozenset({FURTHER_BITS})
    """State that a checkpoint may lack: :meth:`set_state_options` adds it."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[ValueDict],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        block_size: int = 256,
        min_elements: int = 4096,
        float32_weights: bool = False,
    ) -> None:
        if block_size < _SMALLEST_BLOCK or block_size & (block_size - 1):
            raise RecipeError(
                "the block of an 8-bit optimizer is not a power of two of at least 32",
                where="optimizer.block_size",
                value=block_size,
            )
        self.block_size = block_size
        self.min_elements = min_elements
        self.float32_weights = float32_weights
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        types = {parameter.dtype for group in self.param_groups for parameter in group["params"]}
        if float32_weights and torch.float16 in types:
            raise RecipeError(
                "float16 weights cannot be extended to float32 weights: their exponents have fewer bits",
                where="optimizer.float32_weights",
                value="weights in float16",
                hint="set model.dtype: bfloat16",
            )

    @property
    def state_options(self) -> dict[str, bool]:
        """The options that the state decides once there is one, by name: a load may change them."""
        has_bits = [FURTHER_BITS in state for _, state in self._extensible()]
        return {"float32_weights": any(has_bits) if has_bits else self.float32_weights}

    def set_state_options(self, *, float32_weights: bool) -> None:
        """Give the state further bits of the bfloat16 weights, zeros at first, or remove those that it has.

        Neither changes a weight. Weights without the bits stay rounded.
        """
        self.float32_weights = float32_weights
        for parameter, state in self._extensible():
            if not float32_weights:
                state.pop(FURTHER_BITS, None)
            elif FURTHER_BITS not in state:
                state[FURTHER_BITS] = _zeros_of_bits(parameter)

    def _extensible(self) -> Iterator[tuple[nn.Parameter, ValueDict]]:
        """The bfloat16 parameters that have a state, with it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                # The state is a defaultdict.
                state = self.state.get(parameter)
                if state and parameter.dtype == torch.bfloat16:
                    yield parameter, state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients. Returns the result of *closure*, which computes the gradients."""
        return update_each(self, closure, self._update)

    def load_state_dict(self, state_dict: ValueDict) -> None:
        """Load what ``state_dict`` returned, in its types: torch would convert all to the type of the parameters."""
        super().load_state_dict({**state_dict, "state": {}})
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [each for group in self.param_groups for each in group["params"]]
        for number, parameter in zip(saved, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                # The number of steps stays on the host.
                device = value.device if name == "step" else parameter.device
                self.state[parameter][name] = value.to(device)

    def state_like(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of *parameter* [...] as tensors without values, for forecasts of memory and disk."""
        shape = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return self._new_state(shape)

    def _block_of(self, parameter: Tensor) -> int:
        """The number of elements that share a scale; 0 for a parameter with float32 moments."""
        if parameter.dim() < 2 or parameter.numel() < self.min_elements:
            return 0
        block = math.gcd(parameter.shape[-1], self.block_size)
        return block if block >= _SMALLEST_BLOCK else 0

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Moments of zero, and zeros as further bits of the weights, sharded as *parameter* is."""
        block = self._block_of(parameter)
        state = {"step": torch.zeros((), dtype=torch.float32)}
        for moment in _MOMENTS:
            if block:
                state[f"{moment}_codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
                state[f"{moment}_scales"] = _new_scales(parameter, block)
            else:
                state[moment] = torch.zeros_like(parameter, dtype=torch.float32)
        if self.float32_weights and parameter.dtype == torch.bfloat16:
            state[FURTHER_BITS] = _zeros_of_bits(parameter)
        return state

    def _update(self, parameter: Tensor, group: ValueDict) -> None:
        state, block = self.state[parameter], self._block_of(parameter)
        if not state:
            state.update(self._new_state(parameter))
        state["step"] += 1
        shard, gradient = _local(parameter), _local(parameter.grad)
        beta1, beta2 = group["betas"]
        values = _setting_values(group, state["step"].item())
        bits = _local(state[FURTHER_BITS]) if FURTHER_BITS in state else None
        if not block:
            wide = gradient.float()
            average = _local(state["exp_avg"])
            average.lerp_(wide, 1 - beta1)
            square = _local(state["exp_avg_sq"])
            square.lerp_(wide.square(), 1 - beta2)
            _change(shard, bits, average, square, _settings(values, shard.device))
            return
        changed = [shard, *(_local(state[f"{moment}_codes"]) for moment in _MOMENTS)]
        if bits is not None:
            changed.append(bits)
        # The rows of a transposed matrix are no view of its blocks.
        contiguous = [tensor.contiguous() for tensor in changed]
        weights, *codes = (tensor.view(-1, block) for tensor in contiguous)
        rows = [weights, gradient.contiguous().view(-1, block), *codes[: len(_MOMENTS)]]
        rows += [_local(state[f"{moment}_scales"]).view(-1, 1) for moment in _MOMENTS]
        _update_rows(rows, None if bits is None else codes[-1], values)
        for tensor, copied in zip(changed, contiguous, strict=True):
            if tensor is not copied:
                tensor.copy_(copied)


def _zeros_of_bits(parameter: Tensor) -> Tensor:
    """Further bits of zero [...]: the float32 weights are the values of *parameter*."""
    return torch.zeros_like(parameter, dtype=torch.int16)


def _new_scales(parameter: Tensor, block: int) -> Tensor:
    """Scales of zero [..., C / block] in float32."""
    shape = (*parameter.shape[:-1], parameter.shape[-1] // block)
    local = _local(parameter)
    blocks = (*local.shape[:-1], local.shape[-1] // block)
    scales = torch.zeros(blocks, dtype=torch.float32, device=local.device)
    if not isinstance(parameter, DTensor):
        return scales
    last = parameter.dim() - 1
    num_parts = 1
    for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        if placement.is_shard(last):
            num_parts *= size
    if shape[-1] % num_parts:
        raise RecipeError(
            "shards of a parameter begin within a block of the 8-bit optimizer",
            where="optimizer",
            value=f"{shape[-1]} blocks of {block} elements among {num_parts} ranks",
            hint="set a smaller optimizer.block_size, or another distributed.tp_size",
        )
    # The shape is given, because shards of ranks can differ in size.
    stride = torch.empty(shape, device="meta").stride()
    sharded = DTensor.from_local(
        scales,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )
    # from_local moves to the device of the mesh, where offloaded parameters are not.
    return sharded.to(parameter.device)


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _setting_values(group: ValueDict, num_steps: float) -> list[float]:
    """What an update needs of a group: 1 - beta1, 1 - beta2, the factor of the weight decay, the step's size, the root
    of the second moment's bias correction, and eps."""
    beta1, beta2 = group["betas"]
    rate = float(group["lr"])
    return [
        1 - beta1,
        1 - beta2,
        1 - rate * group["weight_decay"],
        rate / (1 - beta1**num_steps),
        math.sqrt(1 - beta2**num_steps),
        group["eps"],
    ]


def _settings(values: list[float], device: torch.device) -> Tensor:
    """A tensor of *values*, which the device does not wait for."""
    # A plain pin_memory() would raise where the system locks no memory.
    return to_device(torch.tensor(values, dtype=torch.float32), device)


def _update_rows(rows: list[Tensor], further_bits: Tensor | None, values: list[float]) -> None:
    """Update the blocks of a parameter in place by a kernel for all of them, or in chunks.

    *rows* are the argument of :func:`update_blocks`: weights, gradient, codes and scales.
    """
    weights, gradient, *_ = rows
    device, block = weights.device, weights.shape[1]
    kernel = _row_kernel(device) if len(weights) else None
    if kernel is not None and kernel.fits(weights, gradient):
        kernel.update(rows, values, further_bits)
        return
    tables = _tables(device)
    settings = _settings(values, device)
    num_rows = max(_CHUNK // block, 1)
    for start in range(0, len(weights), num_rows):
        part = slice(start, start + num_rows)
        chunk = [each[part] for each in rows]
        bits_of_chunk = None if further_bits is None else further_bits[part]
        update_blocks(chunk, tables, settings, bits_of_chunk)


def _change(
    parameter: Tensor,
    further_bits: Tensor | None,
    average: Tensor,
    square: Tensor,
    settings: Tensor,
) -> None:
    """Update a parameter in place by its moments in float32, with the further bits of its weights if there are any."""
    _, _, decay, size, correction, eps = settings.unbind()
    denominator = square.sqrt() / correction + eps
    change = average / denominator * size
    if further_bits is None:
        parameter.copy_(parameter.float() * decay - change)
        return
    rounded, bits = divided(joined(parameter, further_bits) * decay - change)
    parameter.copy_(rounded)
    further_bits.copy_(bits)


def joined(rounded: Tensor, further_bits: Tensor) -> Tensor:
    """The float32 values that :func:`divided` has divided.

    Where something else has changed *rounded* since then, they are near its new values.
    """
    high = rounded.view(torch.int16).int() << 16
    bits = further_bits.int()
    # A weight of 0 has negative bits only if something else has set it to 0: the sum would be NaN.
    bits = torch.where(high << 1 == 0, bits.clamp(min=0), bits)
    return (high + bits).view(torch.float32)


def divided(values: Tensor) -> tuple[Tensor, Tensor]:
    """Divide float32 *values* [...] into the nearest bfloat16 values [...] and further bits as int16 [...].

    The further bits are the difference between the bits of a value and of its rounded value. Unlike a conversion
    to bfloat16, the middle between two values is rounded away from 0, so that the difference has 16 bits.
    """
    bits = values.view(torch.int32)
    high = (bits + 2**15) >> 16
    # The bits of a NaN would overflow, and become the bits of 0.
    high = torch.where(values.isnan(), _NAN, high)
    further_bits = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), further_bits.to(torch.int16)


def update_blocks(
    rows: Sequence[Tensor],
    tables: Sequence[Tensor],
    settings: Tensor,
    further_bits: Tensor | None = None,
) -> None:
    """Update blocks [n, block] of a parameter in place, their codes [n, block] and their scales [n, 1].

    *rows* are the parameter, its gradient, the codes of both moments, and their scales. *tables* are the values of both
    moments, [256] each. *further_bits* [n, block] are the parameter's.
    """
    parameter, gradient, average_codes, square_codes, average_scales, square_scales = rows
    signed, unsigned = tables
    wide = gradient.float()
    average = torch.lerp(decoded(average_codes, average_scales, signed), wide, settings[0])
    square = torch.lerp(decoded(square_codes, square_scales, unsigned), wide.square(), settings[1])
    _change(parameter, further_bits, average, square, settings)
    for moment, codes, scales, table in (
        (average, average_codes, average_scales, signed),
        (square, square_codes, square_scales, unsigned),
    ):
        scales.copy_(moment.abs().amax(1, keepdim=True))
        # A block of zeros has the scale 0.
        codes.copy_(nearest(moment / scales.clamp(min=torch.finfo(torch.float32).tiny), table))


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    return dynamic_table(True).to(device), dynamic_table(False).to(device)


@functools.cache
def _row_kernel(device: torch.device) -> Any:
    """The module with the kernel for all blocks of a parameter; None where Triton does not run, which is logged."""
    if device.type != "cuda" or not has_triton():
        return None
    from automodel_ckpt.optim import adam8bit_kernel

    runs = succeeds(
        lambda: adam8bit_kernel.try_once(device), "AdamW with 8-bit moments is computed"
    )
    return adam8bit_kernel if runs else None
