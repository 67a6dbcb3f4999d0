"""The garbage collector is paused during saves and loads, and runs afterwards as before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.checkpoint.files.collector import collector_paused


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


class Observed(nn.Module):
    """A module that notes whether the collector is enabled when its state is read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(1, 1).weight.detach())
        self.seen: list[bool] = []

    def state_dict(self, *words: object, **options: object) -> dict[str, object]:  # type: ignore[override]
        self.seen.append(gc.isenabled())
        return super().state_dict(*words, **options)  # type: ignore[misc,no-any-return,call-overload]


def test_saves_and_loads_do_not_collect(tmp_path: Path) -> None:
    model = Observed()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save({"model": model}, step=1, epoch=0)
    assert model.seen and not any(model.seen) and gc.isenabled()
    model.seen.clear()
    assert checkpointer.load({"model": model}) is not None
    assert model.seen and not any(model.seen) and gc.isenabled()
    checkpointer.close()


def test_the_collector_is_as_before_after_an_error() -> None:
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()
