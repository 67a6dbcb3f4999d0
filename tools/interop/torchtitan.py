"""torchtitan: what its CheckpointManager saves is read here, and it loads what is exported here (Llama 3, CPU)."""

import json
from collections.abc import Iterator

import torch

from tools.interop.program import Check, Workplace, build_model, logits_check, logits_of
from tools.support import ROOT

_MAKER = ROOT / "tests" / "fixtures" / "torchtitan" / "make.py"
_TOLERANCE = 2e-5


def checks(workplace: Workplace) -> Iterator[Check]:
    made = workplace.made("torchtitan/make.py", "--plain")
    run, config = workplace.directory / "imported", made / "config"
    workplace.ckpt("import", made / "checkpoint" / "step-3", run, "--config", config)
    theirs = json.loads((made / "logits.json").read_text())
    found = logits_of(run / "epoch_0_step_3" / "model", theirs["ids"])
    what = "its checkpoint of Llama 3 is imported"
    yield logits_check(what, found, theirs["logits"], _TOLERANCE)
    settings = json.loads((config / "config.json").read_text())
    arguments: list[str] = []
    for name in ("untied", "tied"):
        source = workplace.directory / name
        model = build_model(4, **settings | {"tie_word_embeddings": name == "tied"})
        for parameter in model.parameters():
            torch.nn.init.uniform_(parameter, -0.8, 0.8)
        model.save_pretrained(source)
        exported = workplace.directory / f"{name}-dcp"
        workplace.ckpt("export", source, "--to", "dcp", "--names", "torchtitan", "-o", exported)
        arguments += [name, str(exported)]
    runs = workplace.directory / "runs"
    report = workplace.report("load_torchtitan.py", _MAKER, runs, *arguments)
    for name, exported_path in zip(arguments[::2], arguments[1::2], strict=True):
        theirs = report[exported_path]
        found = logits_of(workplace.directory / name, theirs["ids"])
        what = f"CheckpointManager loads an exported Llama ({name} output layer)"
        yield logits_check(what, found, theirs["logits"], _TOLERANCE)
