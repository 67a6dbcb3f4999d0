"""The section ``init_from``: the initial weights of a new run."""

from __future__ import annotations

from dataclasses import dataclass, field

from automodel_ckpt.config.tree.rules import (
    MISSING,
    NOT_EMPTY,
    setting,
)


@dataclass
class InitFromConfig:
    """Initial weights of a new run, instead of the pretrained ones. A resumed run ignores this section."""

    path: str = setting(MISSING, NOT_EMPTY)
    """A run directory, a checkpoint, a pointer (checkpoints/LATEST), a Hugging Face directory, a file of torch.save, a
    directory of another program (PyTorch DCP, DeepSpeed), a Hub name, or a URL of an object store with one of these
    (not a single file)."""
    revision: str | None = setting(None, NOT_EMPTY)
    """Branch, tag or commit of the Hub name in path; null: the main branch."""
    allow_missing: list[str] = field(default_factory=list)
    """Glob patterns of the model's weights that may be missing in path; they keep their initial values."""
    allow_unexpected: list[str] = field(default_factory=list)
    """Glob patterns of weights in path that the model may lack; they are ignored."""


@dataclass
class InitFromSource(InitFromConfig):
    """One of several sources of initial weights. A later source replaces tensors of an earlier one."""

    strip: str = ""
    """Prefix of names in path, such as encoder: it is removed, and other tensors are not used."""
    into: str = ""
    """Module of the model that gets the weights, such as model.audio_tower; empty: the whole model."""
