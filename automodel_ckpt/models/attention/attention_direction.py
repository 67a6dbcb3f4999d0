"""Attention to later tokens in a decoder: the setting ``is_causal`` of transformers, and whether a model follows it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.models.config_reading import sees_later_tokens
from automodel_ckpt.models.inspect.interface import side_effect_free

_TOKENS = (1, 2, 3, 2, 1, 3, 3, 1)
_MIXERS = ("attn", "attention", "att", "mamba")
"""How the names of attention and of state space models end."""
_EFFECT = 1e-2
"""The smallest relative effect of later tokens. Their values are negated, so that it is about 1; FP8 has one scale for
a tensor, so that other tokens change the rounding of the first one."""


def attend_both_ways(config: PreTrainedConfig) -> bool:
    """Change *config* so that tokens see later ones, and return True; False for one of a model in which they do.

    transformers' masks follow the setting, which is also stored in ``config.json`` (``create_causal_mask`` in
    ``masking_utils.py``, ``merge_with_config_defaults`` in ``utils/generic.py``).
    """
    if sees_later_tokens(config):
        return False
    text: Any = config.get_text_config()
    text.is_causal = False
    return True


def causal_layers(
    model: nn.Module, layers: Sequence[nn.Module], multiple: int, options: Values
) -> list[int]:
    """The numbers of the *layers* of *model* in which the first token does not see the later ones.

    Runs *model* with *options* on a few tokens, without and with padding, which can have different masks. It has no
    side effects. *multiple* divides the length of the rows. Each layer gets two rows that differ in the later tokens
    only, and the outputs of its attention are compared, before the residual connection hides small effects. Layers that
    the forward pass does not use are left out; all are returned if it uses none.
    """
    device = next(model.parameters()).device
    row = list(_TOKENS) * multiple
    rows = torch.tensor([row, row], device=device)
    padded = torch.ones_like(rows)
    padded[:, -2:] = 0
    sees: dict[int, bool] = {}
    with side_effect_free(model), ExitStack() as hooks:
        for number, layer in enumerate(layers):
            mixers = [part for name, part in layer.named_children() if name.endswith(_MIXERS)]
            for part in mixers or [layer]:
                before = part.register_forward_pre_hook(_negate_later_tokens, with_kwargs=True)
                after = part.register_forward_hook(partial(_compare_rows, sees, number))
                hooks.callback(before.remove)
                hooks.callback(after.remove)
        for mask in (torch.ones_like(rows), padded):
            model(input_ids=rows, attention_mask=mask, **options)
    if not sees:
        return list(range(len(layers)))
    return sorted(number for number, is_seen in sees.items() if not is_seen)


def _negate_later_tokens(
    _: nn.Module, arguments: tuple[Any, ...], keywords: ValueDict
) -> tuple[tuple[Any, ...], ValueDict]:
    """Give the layer hidden states [2, T, H] of the same tokens, with the values of the later ones negated in a row."""
    name = "hidden_states"
    hidden = keywords[name] if name in keywords else arguments[0]
    both = torch.cat([hidden[:1], hidden[:1]])
    both[1, 1:] *= -1
    if name in keywords:
        return arguments, {**keywords, name: both}
    return (both, *arguments[1:]), keywords


def _compare_rows(
    sees: dict[int, bool], number: int, _: nn.Module, arguments: Any, output: Any
) -> None:
    states = output[0] if isinstance(output, tuple) else output
    one, other = states[0, 0].float(), states[1, 0].float()
    is_seen = bool((one - other).abs().max() > _EFFECT * one.abs().max())
    sees[number] = sees.get(number, True) and is_seen
