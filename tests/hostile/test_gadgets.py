"""No callable that a recipe can name without trust runs, imports, unpickles, writes or deletes what its arguments name.

Every name in the libraries is tried for every purpose; what is on the list is called for real, in a forked child under
watch, with arguments that would show. HOSTILE=all (make hostile) takes all of them, else a sample is taken.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.cli.train import main
from automodel_ckpt.config.callables import allowlist
from automodel_ckpt.config.callables.trust import Rejected, Trust, check_name
from automodel_ckpt.errors import EXIT_USAGE
from tests.hostile.harness import bombs, gadgets, sandbox
from tests.support.models.small_tokenizer import small_tokenizer

KNOWN = (
    "transformers.exporters.utils.import_dotted_path",
    "transformers.modeling_utils.load_state_dict",
    "transformers.utils.import_utils.direct_transformers_import",
    "transformers.trainer_pt_utils.remove_dummy_checkpoint",
    "peft.utils.save_and_load.torch_load",
    "datasets.load.import_main_class",
    "datasets.Dataset.from_generator",
    "automodel_ckpt.base.durable_io.replace_file",
    "os.system",
)
SAMPLE = (
    "datasets.load_dataset",
    "transformers.AutoTokenizer.from_pretrained",
    "transformers.AutoModelForCausalLM.from_pretrained",
    "transformers.AutoModelForCausalLM.from_config",
    "transformers.GPT2Config",
    "torch.optim.AdamW",
    "torch.nn.CrossEntropyLoss",
)
READING = ("open of ", "os.listdir of ", "os.scandir of ")
# Code of templates and of torch's own, libraries that are imported late, variables of this process, and torch's cache.
HARMLESS = (
    "exec of <template>",
    "exec of <unknown>",
    "exec of <_remote_module_non_scriptable>.py",
    "dlopen ",
    "marshal.load ",
    "import encodings.",  # the name of an encoding, which Python looks up in that package only
    "os.putenv ",
    "os.unsetenv ",
    "os.mkdir of /tmp/torchinductor_",
)
BATCH = 100
"""Calls in one child, which has a minute; this package's builders do real work."""
NUM_PARTS = 24
"""Of the calls, so that several processes share them."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> gadgets.Place:
    made = gadgets.Place(tmp_path_factory.mktemp("gadgets").resolve())
    made.make()
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return small_tokenizer(400)


@pytest.fixture(scope="module")
def names() -> set[str]:
    return gadgets.all_names() if bombs.EVERY else gadgets.exported_names()


def test_a_name_that_is_not_on_the_list_is_rejected_for_every_purpose_without_an_import(
    names: set[str],
) -> None:
    purposes = (*allowlist.ALLOWED, "")
    listed = {
        name for name in names if any(allowlist.may_name(purpose, name) for purpose in purposes)
    }
    loaded = set(sys.modules)
    others = sorted(names - listed) + list(KNOWN)
    for name in others[::40]:
        with pytest.raises(Rejected):
            check_name(name, Trust())
    assert len(others) > (20_000 if bombs.EVERY else 5_000) and len(listed) > 100
    assert set(sys.modules) == loaded


@pytest.mark.parametrize("name", KNOWN)
def test_the_command_rejects_it_in_every_section(
    name: str,
    place: gadgets.Place,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place.run)
    nested = f"{{_target_: {name}, path: hostile_module.run}}"
    sections = dict.fromkeys(allowlist.PURPOSES, nested)
    sections["optimizer.groups"] = f"[{{params: ['*'], {nested[1:]}]"
    (place.run / "recipe.yaml").write_text("distributed: {tp_size: 2}\n")
    words = [f"--{key}={value}" for key, value in sections.items()]
    more = ["--nproc-per-node=2", f"--lr_scheduler.kwargs.x={nested}"]
    assert main(["recipe.yaml", "--dry-run", *words, *more]) == EXIT_USAGE
    error = capfd.readouterr().err
    assert error.count(f"{name} is not trusted") == len(sections) + 1
    assert gadgets.changed(place) == []


@pytest.mark.parametrize("part", range(NUM_PARTS) if bombs.EVERY else [0])
def test_what_is_on_the_list_does_no_harm(
    part: int, names: set[str], place: gadgets.Place, tokenizer: Any
) -> None:
    listed = sorted(name for name in names if allowlist.may_name(allowlist.CUSTOM, name))
    num_called, problems = 0, []
    for name in listed[part::NUM_PARTS] if bombs.EVERY else SAMPLE:
        if not gadgets.purposes_of(name):
            continue
        attempts = list(place.attempts(name))
        attempts = attempts if bombs.EVERY else attempts[:: len(attempts) // 6 + 1]
        codes = []
        batch = 5 if bombs.EVERY and name.startswith("automodel_ckpt.") else BATCH
        for first in range(0, len(attempts), batch):
            some = attempts[first : first + batch]
            outcome = sandbox.run(partial(_called, place, name, some, tokenizer), place.run)
            codes.append(outcome.code or 0)
            found = [
                each for each in outcome.violations if not _is_allowed(each)
            ] + gadgets.changed(place)
            found += [outcome.text[-1000:]] if outcome.code is None else []
            problems += [f"{name}: {each}" for each in found]
        num_called += sum(codes) > 0
    assert problems == []
    assert num_called >= (15 if bombs.EVERY else len(SAMPLE))


def _called(
    place: gadgets.Place,
    name: str,
    attempts: list[dict[str, Any]],
    tokenizer: Any,
) -> int:
    os.chdir(place.run)
    sys.dont_write_bytecode = True
    sys.path.append(str(place.run))  # as --trust would do for a package beside the recipe
    return gadgets.call(place, name, attempts, tokenizer)


def _is_allowed(violation: str) -> bool:
    """Reading, and writing into this session's caches."""
    caches = str(Path(os.environ["HF_HOME"]).parent)
    return violation.startswith(READING + HARMLESS) or f" {caches}" in violation
