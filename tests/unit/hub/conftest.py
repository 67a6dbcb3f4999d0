"""Two short runs, and a local server of the Hub's HTTP API."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub.utils import _http

from tests.support import ranks
from tests.support.runs.training import RECIPE, VALIDATION, train, write_recipe
from tests.support.servers.hub_server import HubServer, hub_server, using

LORA = """
model: {from_pretrained: BASE}
peft: {r: 2, target_modules: ['*_proj']}
"""


@pytest.fixture(scope="session")
def server() -> Iterator[HubServer]:
    with hub_server() as running:
        yield running


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the runs ``full``, whose last checkpoint is exported, and ``lora``, adapters of that export."""
    place = tmp_path_factory.mktemp("secret-home")
    text = RECIPE + VALIDATION
    full = f"{text}checkpoint: {{checkpoint_dir: {place / 'full'}, save_consolidated: final}}\n"
    ranks.run(partial(train, write_recipe(place, full)), 1, init=False)
    base = place / "full/LATEST/model/consolidated"
    data = text[text.index("dataset:") :]
    lora = LORA.replace("BASE", str(base)) + data
    lora += f"checkpoint: {{checkpoint_dir: {place / 'lora'}}}\n"
    ranks.run(partial(train, write_recipe(place, lora)), 1, init=False)
    return place


@pytest.fixture
def hub(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The server without repositories, which huggingface_hub in this process uses."""
    server.reset()
    # The library waits 1 to 8 seconds between its attempts.
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    with using(server, str(tmp_path / "home"), monkeypatch):
        yield server
