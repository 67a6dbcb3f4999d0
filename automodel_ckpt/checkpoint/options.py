"""The options of :class:`~automodel_ckpt.checkpoint.checkpointer.Checkpointer`. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from automodel_ckpt.errors import RecipeError

ModelFormat = Literal["safetensors", "torch_save"]
ModelLayout = Literal["shards", "hf", "adapter"]
OnIncompatible = Literal["error", "sibling"]
Mode = Literal["min", "max"]
"""Which metric is better."""
Level = Literal["none", "size", "digest"]
"""What to verify of a file."""


@dataclass(frozen=True, slots=True)
class RemoteStorage:
    """Where checkpoints are uploaded, for programs without a recipe file: the options of ``checkpoint.remote``."""

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    required: bool = False
    wait_after_signal_seconds: float = 90.0
    keep_last: int | None = None
    keep_best: int = 0
    keep_every_steps: int | None = None
    keep_steps: Iterable[int] = ()
    max_mb_per_second: float | None = None
    num_threads: int = 8


RemoteOptions = RemoteStorage
"""The section ``checkpoint.remote`` of a recipe has these attributes, too."""


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Options of a checkpointer, with the names and the defaults of a recipe's ``checkpoint:`` section."""

    model_save_format: ModelFormat = "safetensors"
    """Format of the model's shards; torch_save is the format of torch.distributed.checkpoint (DCP)."""
    model_layout: ModelLayout | None = None
    """shards (also None): each rank writes its own files; hf, adapter: all ranks write the final Hugging Face or peft
    files together."""
    save_consolidated: bool | str | None = None
    """Export Hugging Face files from the ``final`` or ``every`` (or True) checkpoint, or never (False); None: final
    with safetensors, otherwise never."""
    is_async: bool = False
    """Save asynchronously: :meth:`Checkpointer.save` returns when the state is copied to CPU memory."""
    incremental: bool | Literal["auto"] = "auto"
    """Share shards of tensors that do not train with an earlier checkpoint by hard links. ``auto``: if they take 16 MiB
    or more, and never with the checkpoint just before, so that two checkpoints stay independent; True: always."""
    scratch_dir: str | None = None
    """If the directory is a URL: the local directory in which the run gets its own; None: the user's cache."""
    restore_from: str | None = None
    """Checkpoint to load: LATEST, LOWEST_VAL, a name, a path or a URL; None: the newest usable one."""
    save_optimizer: bool = True
    """Save the optimizer state; False: only weights, so that a resume is not exact."""
    best_metric_key: str = "val_loss"
    """Metric that selects the best checkpoint (LOWEST_VAL)."""
    best_mode: Mode = "min"
    """Whether a lower (min) or a higher (max) metric is better."""
    keep_last: int | None = None
    """Keep the newest N checkpoints and remove others; None: keep all."""
    keep_best: int = 0
    """In addition to keep_last, keep the N best checkpoints."""
    keep_every_steps: int | None = None
    """In addition to keep_last, keep checkpoints with a step that is a multiple of N."""
    keep_steps: Iterable[int] = ()
    """In addition to keep_last, keep the checkpoints of these steps."""
    verify: Level = "digest"
    """What to verify of each file before loading."""
    allow_missing_state: Iterable[str] = ()
    """Attributes that may be missing in the checkpoint or in the state."""
    allow_changed_model: bool = False
    """Load even if the model's config changed in a way that affects its outputs."""
    on_incompatible: OnIncompatible = "error"
    """If existing checkpoints are of another model: raise an error, or continue in a sibling directory."""
    remote: RemoteOptions | None = None
    """Where published checkpoints are uploaded in the background, and fetched from at the start; None: nowhere."""

    @classmethod
    def of(cls, options: Any) -> CheckpointOptions:
        """Return *options*, converted if it is an object with the same attributes, such as a recipe's section."""
        if isinstance(options, cls):
            return options
        return cls(**{each.name: getattr(options, each.name) for each in fields(cls)})

    def __post_init__(self) -> None:
        """Read iterables once, and paths as text. Raises :class:`RecipeError` for values of other kinds."""
        steps, names = self.keep_steps, self.allow_missing_state
        # The class is frozen.
        object.__setattr__(self, "keep_steps", _items("keep_steps", steps, int))
        object.__setattr__(self, "allow_missing_state", _items("allow_missing_state", names, str))
        for name in ("restore_from", "scratch_dir"):
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fsdecode(value))
            elif value is not None and not isinstance(value, str):
                raise _wrong_value(name, value, "use a name or a path")


def _items(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    """Return *values* of the option *name* as a tuple. Raises :class:`RecipeError` unless all are of this *kind*."""
    hint = f"use a list of {'whole numbers' if kind is int else 'names'}"
    # A text is an iterable of its characters.
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise _wrong_value(name, values, hint)
    items = tuple(values)
    if not all(isinstance(item, kind) for item in items):
        raise _wrong_value(name, list(items), hint)
    return items


def _wrong_value(name: str, value: Any, hint: str) -> RecipeError:
    return RecipeError(
        f"the option {name} has no such value",
        where="CheckpointOptions",
        value=f"{value!r:.200}",
        hint=hint,
    )


_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "model_save_format": get_args(ModelFormat),
    "model_layout": (None, *get_args(ModelLayout)),
    "on_incompatible": get_args(OnIncompatible),
    "best_mode": get_args(Mode),
    "verify": get_args(Level),
}
_AT_LEAST = {"keep_last": 1, "keep_best": 0, "keep_every_steps": 1}


def validate_options(options: CheckpointOptions) -> None:
    """Raise :class:`RecipeError` for invalid options, and for options of the model's files that exclude each other."""
    for name, choices in _CHOICES.items():
        value = getattr(options, name)
        if value not in choices:
            raise _wrong_value(name, value, f"use {', '.join(map(repr, choices))}")
    for name, least in _AT_LEAST.items():
        value = getattr(options, name)
        if value is not None and not (isinstance(value, int) and value >= least):
            raise _wrong_value(name, value, f"use a whole number from {least}")
    conflicts = {}
    if options.incremental is True and options.model_layout == "hf":
        conflicts["incremental"] = "are written completely by each save, and share nothing"
    if options.model_layout in ("hf", "adapter") and options.model_save_format != "safetensors":
        conflicts["model_save_format"] = "are always written as safetensors"
    for name, why in conflicts.items():
        raise RecipeError(
            f"Hugging Face files {why}",
            where=f"checkpoint.{name}",
            value=getattr(options, name),
            hint="remove this key, or set checkpoint.model_layout to shards",
        )
