"""A recipe that records the state after each step, for ``ckpt-train --selftest-resume`` and for tests.

The hook is a subclass of the recipe's loop, so that other runs have no trace of it.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from automodel_ckpt.checkpoint.parts.discovery import classify, discover
from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.checkpoint.state.storable import check_safe, raw_bytes
from automodel_ckpt.data.batches.loader import GlobalBatch
from automodel_ckpt.optim.build import current_rate
from automodel_ckpt.parallel.gradients import local_shard
from automodel_ckpt.training.counters.step_scheduler import Due
from automodel_ckpt.training.loop import TrainingLoop
from automodel_ckpt.training.recipe import Recipe
from automodel_ckpt.training.values.records import Control

# State that differs between any two runs.
_OF_THE_CLOCK = {"elapsed_seconds"}


def observed(recipe_class: type[Recipe], directory: Path, *, stop_after: int | None = None) -> Any:
    """*recipe_class*, writing a line of JSON per step to ``rank_{r}.jsonl`` in *directory* (for its fields see
    :func:`observation`). With *stop_after* it asks itself to stop after that step, as by a signal."""

    class ObservedLoop(recipe_class.loop_class):  # type: ignore[name-defined,misc]
        recipe: Recipe

        def step(self, batch: GlobalBatch, control: Control) -> Due:
            due: Due = super().step(batch, control)
            self.finish_pending()
            line = json.dumps(observation(self.recipe, batch)) + "\n"
            path = directory / f"rank_{self.layout.rank}.jsonl"
            with path.open("a") as lines:
                lines.write(line)
            if self.step_scheduler.step == stop_after and not due.last:
                self.stop_request.note(signal.SIGTERM)
            return due

    class Observed(recipe_class):  # type: ignore[misc,valid-type]
        loop_class = ObservedLoop

        def build_loop(self) -> TrainingLoop:
            loop: TrainingLoop = super().build_loop()
            assert isinstance(loop, ObservedLoop)
            loop.recipe = self
            return loop

    return Observed


def observation(recipe: Recipe, batch: GlobalBatch) -> dict[str, Any]:
    """The result of a step on this rank: numbers as exact text (``float.hex``), and a digest of each state value.

    The keys of ``state`` are ``attribute/tensor`` for modules and optimizers, ``attribute`` for the rest. The digest of
    a sharded tensor is the digest of the rank's shard.
    """
    result = recipe.loop.last_step
    assert result is not None
    return {
        "step": recipe.step_scheduler.step,
        "samples": batch.sample_ids,
        "lr": current_rate(recipe.optimizer).hex(),
        "loss": result.loss.hex() if math.isfinite(result.loss) else repr(result.loss),
        "grad_norm": float(result.grad_norm).hex(),
        "state": dict(sorted(_digests(recipe))),
        "has_dropout": _has_dropout(recipe.model),
    }


def _digests(recipe: Recipe) -> Iterator[tuple[str, str]]:
    items = classify(discover(recipe))
    names = {
        id(p): f"{i.name}.{n}"
        for i in items
        if i.kind == "module"
        for n, p in i.value.named_parameters()
    }
    for item in items:
        if item.kind == "module":
            for name, tensor in unwrap(item.value).state_dict().items():
                yield f"{item.name}/{name}", _digest(tensor)
        elif item.kind == "optimizer":
            for parameter, state in item.value.state.items():
                for key, value in state.items():
                    yield f"{item.name}/{names.get(id(parameter), '?')}.{key}", _digest(value)
        else:
            state = item.value.state_dict()
            if isinstance(state, dict):
                state = {key: value for key, value in state.items() if key not in _OF_THE_CLOCK}
            yield item.name, check_safe(item.name, state)


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    local = local_shard(value)
    return f"{local.dtype}{list(local.shape)} {xxhash.xxh3_128_hexdigest(raw_bytes(local))}"


def _has_dropout(model: nn.Module) -> bool:
    """Whether a step draws random numbers for dropout, according to the layers and the configuration."""
    config = getattr(unwrap(model), "config", None)
    stated = config.to_dict() if config is not None else {}
    by_config = any(
        isinstance(value, float) and value > 0 and ("dropout" in key or "pdrop" in key)
        for key, value in stated.items()
    )
    return by_config or any(
        isinstance(layer, nn.Dropout) and layer.p > 0 for layer in model.modules()
    )
