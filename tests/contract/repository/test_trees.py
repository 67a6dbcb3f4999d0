"""A checkpoint's files, one by one: language and vision-language models, whole and with adapters, every format and
layout, on one rank and on two; and that each goes on exactly where it stopped.

AUTOMODEL_CKPT_ALL_TREES=1 (`make trees`) looks at every combination on one rank and on two, and resumes each, on as
many ranks and on the other number. Otherwise each combination of a language model, and one of a vision-language model
on each number of ranks, is looked at on one of the two, and one of them resumed.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.kinds.test_vlm import prepare
from tests.support import ranks
from tests.support.runs.training import EXPORT, RECIPE, steps_of, train, write_recipe

ALL = bool(os.environ.get("AUTOMODEL_CKPT_ALL_TREES"))
LIMIT_SECONDS = 900 if ALL else 200
TOKENIZER = ["tokenizer.json", "tokenizer_config.json"]
PROCESSOR = [*TOKENIZER, "processor_config.json", "chat_template.jinja"]
ADAPTER = ["adapter_config.json", "automodel_peft_config.json"]
SHORT = (
    "--step_scheduler.max_steps=2",
    "--step_scheduler.ckpt_every_steps=1",
    "--step_scheduler.global_batch_size=4",
    "--lr_scheduler=null",
)


@dataclass(frozen=True)
class Case:
    domain: str
    peft: bool
    model_format: str
    model_layout: str

    @property
    def name(self) -> str:
        return "-".join(
            [self.domain, "peft" if self.peft else "sft", self.model_format, self.model_layout]
        )

    @property
    def options(self) -> list[str]:
        saved = [
            f"--checkpoint.model_save_format={self.model_format}",
            f"--checkpoint.model_layout={self.model_layout}",
        ]
        if self.model_layout == "adapter":
            # The adapter files are the export: with every export that there is, nothing more is written.
            saved += ["--checkpoint.save_consolidated=every"]
        elif self.model_format == "safetensors" and self.model_layout == "shards":
            saved += [EXPORT]
        if self.domain == "llm":
            return [
                *saved,
                "--model.from_config.attention_dropout=0",
            ]  # it draws other numbers on other ranks
        return [
            *saved,
            *(
                ["--model.freeze=[]", "--peft.exclude_modules=['*vision_tower*']"]
                if self.peft
                else []
            ),
        ]


CASES = [
    Case(domain, peft, model_format, model_layout)
    for domain in ("llm", "vlm")
    for peft in (False, True)
    for model_format, model_layout in (
        ("safetensors", "shards"),
        ("safetensors", "adapter" if peft else "hf"),
        ("torch_save", "shards"),
    )
]


def cases_on(num_ranks: int) -> list[Case]:
    return CASES if ALL else CASES[num_ranks - 1 : 8 : 2]


def expected_tree(case: Case, num_ranks: int, *, last: bool) -> set[str]:
    """The files of a checkpoint; *last*: of the run's last one, which is exported where there is anything to export."""
    one_by_one = range(num_ranks)
    files = {"MANIFEST.json", "config.yaml", "losses.json", "step_scheduler.pt"}
    files |= {f"dataloader/dataloader_dp_rank_{rank}.pt" for rank in one_by_one}
    files |= {f"rng/rng_dp_rank_{rank}.pt" for rank in one_by_one}
    files |= {"optim/.metadata"} | {f"optim/__{rank}_0.distcp" for rank in one_by_one}
    side = [
        *(PROCESSOR if case.domain == "vlm" else TOKENIZER),
        *(ADAPTER if case.peft else _of_a_model(case)),
    ]
    if case.model_layout == "adapter":
        return files | {f"model/{name}" for name in (*side, "adapter_model.safetensors")}
    if case.model_layout == "hf":
        weights = [
            "model-00001-of-00001.safetensors",
            "model.safetensors.index.json",
            "consolidate.sh",
        ]
        return files | {f"model/{name}" for name in (*side, *weights)}
    if case.model_format == "safetensors":
        files |= {
            f"model/shard-{rank + 1:05}-model-00001-of-00001.safetensors" for rank in one_by_one
        }
    else:
        files |= {"model/.metadata"} | {f"model/__{rank}_0.distcp" for rank in one_by_one}
    files |= {"model/consolidate.sh"} | {
        f"model/.hf_metadata/{name}" for name in (*side, *_maps(case))
    }
    if last and case.model_format == "safetensors":
        weights = ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
        weights = ["adapter_model.safetensors"] if case.peft else weights
        files |= {
            f"model/consolidated/{name}" for name in (*side, *weights, "export_manifest.json")
        }
    return files


def _of_a_model(case: Case) -> list[str]:
    return ["config.json", "generation_config.json"]


def _maps(case: Case) -> list[str]:
    if case.peft:
        return ["expected_tensors.json"]
    from_base = ["fqn_to_dtype_mapping.json"] if case.domain == "vlm" else []
    return ["expected_tensors.json", "fqn_to_file_index_mapping.json", *from_base]


def tree(checkpoint: Path) -> set[str]:
    return {
        path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()
    }


def recipe_of(case: Case, directory: Path) -> Path:
    if case.domain == "vlm":
        text = (directory / "vlm" / "recipe.yaml").read_text()
    else:
        text = RECIPE
        if case.peft:
            text = text.replace(
                "\ntokenizer:", f"\npeft:\n  base_dir: {directory / 'llm-base'}\ntokenizer:", 1
            )
    return write_recipe(directory / case.name, text)


def train_all(recipes: list[tuple[Case, Path, int]], *extra: str) -> dict[str, dict[str, str]]:
    """Each case in its own directory, one after the other in this process; the digests of the states at the end."""
    ended = {}
    for case, recipe, port in recipes:
        os.environ["MASTER_PORT"] = str(port)
        options = [*SHORT, *case.options, *(text.format(run=recipe.parent) for text in extra)]
        ended[case.name] = train(recipe, *options)
    return ended


@pytest.fixture(scope="module", params=[1, 2], ids=["one_rank", "two_ranks"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every case trained for two steps, both saved: the number of ranks, the root, each rank's digests."""
    num_ranks, root = request.param, tmp_path_factory.mktemp(f"trees-{request.param}")
    (root / "vlm").mkdir()
    prepare(root / "vlm", "llava")
    for case in cases_on(num_ranks):
        (root / case.name).mkdir()
    recipes = [(case, recipe_of(case, root), ranks.free_port()) for case in cases_on(num_ranks)]
    place = "--checkpoint.checkpoint_dir={run}/run"
    digests = ranks.run(
        lambda: train_all(recipes, place, "--step_scheduler.local_batch_size=2"),
        num_ranks,
        init=False,
        timeout=LIMIT_SECONDS,
    )
    return num_ranks, root, digests


@pytest.mark.timeout(2 * LIMIT_SECONDS)
def test_each_checkpoint_has_exactly_these_files(trained: Any) -> None:
    num_ranks, root, _ = trained
    wrong = {}
    for case in cases_on(num_ranks):
        for step in (1, 2):
            found = tree(root / case.name / "run" / f"epoch_0_step_{step}")
            expected = expected_tree(case, num_ranks, last=step == 2)
            if found != expected:
                wrong[f"{case.name} step {step}"] = sorted(found ^ expected)
    assert wrong == {}


@pytest.mark.timeout(2 * LIMIT_SECONDS)
def test_each_goes_on_bit_for_bit_and_on_another_number_of_ranks(trained: Any) -> None:
    num_ranks, root, digests = trained
    cases = cases_on(num_ranks)[0 if ALL else -1 :]
    ports = {case: ranks.free_port() for case in cases}
    recipes = [(case, root / case.name / "recipe.yaml", ports[case]) for case in cases]
    options = (
        "--checkpoint.checkpoint_dir={run}/again",
        "--checkpoint.restore_from={run}/run/epoch_0_step_1",
        "--step_scheduler.local_batch_size=2",
        "--checkpoint.save_consolidated=false",
    )
    again = ranks.run(
        lambda: train_all(recipes, *options), num_ranks, init=False, timeout=LIMIT_SECONDS
    )
    for before, after in zip(digests, again, strict=True):
        assert {name: before[name] for name in after} == after
    other = ("--checkpoint.checkpoint_dir={run}/other", *options[1:])
    ranks.run(lambda: train_all(recipes, *other), 3 - num_ranks, init=False, timeout=LIMIT_SECONDS)
    for case in cases:
        losses = [
            [float.fromhex(step["loss"]) for step in steps_of(root / case.name / run)]
            for run in ("run", "other")
        ]
        assert losses[1] == pytest.approx(losses[0][1:], rel=1e-4), case.name
