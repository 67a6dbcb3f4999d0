"""NeMo AutoModel: what its Checkpointer saves is read and continued here, and it reads the shards that we save."""

from collections.abc import Iterator

import torch
from safetensors.torch import load_file

from tools.interop.continued import continued_check, state_check
from tools.interop.program import Check, Workplace, tensors_check
from tools.support import ROOT

_RECIPE = ROOT / "examples" / "llm_finetune" / "tiny_llama_python_docs.yaml"


def checks(workplace: Workplace) -> Iterator[Check]:
    made = workplace.made("automodel/train.py", "--all")
    source = made / "epoch_0_step_4"
    yield state_check(source, "its checkpoint", made)
    places = {"recorded": made, "config": source / "model" / ".hf_metadata"}
    for num_ranks in (1, 2):
        yield continued_check(workplace, source, "its run", num_ranks=num_ranks, **places)
    formats = workplace.made("automodel/make_fixture.py", name="formats")
    expected = load_file(formats / "expected.safetensors")
    for form in ("safetensors", "torch_save"):
        output = workplace.directory / f"exported-{form}"
        workplace.ckpt("export", formats / form / "epoch_0_step_1", "-o", output)
        found: dict[str, torch.Tensor] = {}
        for file in output.glob("*.safetensors"):
            found |= load_file(file)
        yield tensors_check(f"its checkpoint ({form}) is exported", found, expected)
    # A step on two ranks here; its reader and its consolidation take the shards.
    run = workplace.directory / "ours"
    options = ("--step_scheduler.max_steps=1", f"--checkpoint.checkpoint_dir={run}")
    workplace.train(_RECIPE.read_text(), run.with_name("recipe"), *options, num_ranks=2)
    model = run / "LATEST" / "model"
    (file,) = (model / "consolidated").glob("*.safetensors")
    for what, num_different in workplace.report("ask_automodel.py", model, file).items():
        text = f"{num_different} tensors differ"
        yield Check(f"its {what} takes our shards", text, num_different == 0)
