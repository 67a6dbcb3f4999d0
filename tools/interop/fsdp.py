"""torch with FSDP: what DCP saves is read and continued here, and torch loads what is exported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from automodel_ckpt.cli import ckpt
from tools.clients.environments import TORCH, Environment
from tools.interop.losses import losses_check, tensors_check
from tools.interop.program import Check, Program, Workplace

_MAKER = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "fsdp" / "make.py"
_LOADER = Path(__file__).resolve().parent / "scripts" / "load_dcp.py"


def checks(workplace: Workplace) -> Iterator[Check]:
    """Yield the checks of both directions."""
    made = workplace.directory / "made"
    workplace.run_script(_MAKER, made, "--all")
    for source in sorted(made.glob("torch-*")):
        yield tensors_check(source, source.name)
        for num_ranks in (1, 2):
            yield losses_check(workplace, source, source.name, num_ranks=num_ranks)
    yield _loaded(workplace, made / "torch-nested")


def _loaded(workplace: Workplace, source: Path) -> Check:
    """Export a run as a DCP directory, which torch loads into a model and an optimizer that two ranks shard."""
    run, exported = workplace.directory / "run", workplace.directory / "exported"
    code = ckpt.main(["import", str(source), str(run), "--training-state"])
    command = ["export", str(run), "--to", "dcp", "--optimizer", "flattened", "-o", str(exported)]
    if code != 0 or ckpt.main(command) != 0:
        return Check("dcp.load reads an export", "ckpt export failed", False)
    report = workplace.directory / "loaded.txt"
    workplace.run_script(_LOADER, exported, source, report)
    text = report.read_text().strip()
    return Check(
        "dcp.load fills a model and its optimizer that FSDP2 shards on 2 ranks", text, "all" in text
    )


PROGRAM = Program(
    name="accelerate and torch (FSDP)",
    environment=Environment(
        "fsdp",
        [TORCH],
        then=["accelerate==1.15.0", "transformers==5.23.0", "safetensors==0.8.0"],
    ),
    packages=("accelerate", "torch"),
    checks=checks,
)
