"""What any layout of ranks saves, any other loads, bit for bit: model and optimizer, in each format."""

import os
from pathlib import Path
from typing import Any

from tests.support import ranks
from tests.support.runs.reshard import SAMPLE, WAYS, Way, load_all, save_all

FULL = os.environ.get("RESHARD") == "full"  # `make reshard`
FORMATS: dict[str, dict[str, Any]] = {
    "safetensors": {"model_save_format": "safetensors"},
    "torch_save": {"model_save_format": "torch_save"},
    "hf": {"model_save_format": "safetensors", "model_layout": "hf"},
}


def of_size(ways: tuple[Way, ...], num_ranks: int) -> tuple[Way, ...]:
    return tuple(way for way in ways if way.num_ranks == num_ranks)


def test_every_layout_loads_what_every_other_saved(tmp_path: Path) -> None:
    ways = WAYS if FULL else tuple(way for way in WAYS if way.name in SAMPLE)
    formats = FORMATS if FULL else {name: FORMATS[name] for name in ("safetensors", "torch_save")}
    for size in (1, 2, 4):
        ranks.run(save_all, size, tmp_path, of_size(ways, size), formats, timeout=170)
    wrong = [
        ranks.run(load_all, n, tmp_path, of_size(ways, n), ways, formats, timeout=600)
        for n in (1, 2, 4)
    ]
    assert [line for group in wrong for rank in group for line in rank] == []
