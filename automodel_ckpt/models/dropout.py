"""Turning off the dropout of a model."""

from __future__ import annotations

from torch import nn

_LAYERS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def turn_off_dropout(model: nn.Module) -> list[float]:
    """Set all dropout rates of *model* to 0, the rates of adapters included. Its config is not changed.

    Layers that call functions of torch keep their rates as attributes, such as ``attention_dropout``, ``layerdrop``
    and ``drop_prob``.

    Returns:
        The rates above 0 that were set to 0.
    """
    rates = []
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_rate = "drop" in name or (name == "p" and isinstance(module, _LAYERS))
            if is_rate and isinstance(value, float) and value > 0:
                rates.append(value)
                setattr(module, name, 0.0)
    return rates
