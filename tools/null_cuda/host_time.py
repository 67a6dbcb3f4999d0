"""Measure the processor time that the host needs to queue a training step: a GPU that computes faster than that waits.

    NULL_CUDA_COPY=65536 python -m tools.null_cuda -- python -m tools.null_cuda.host_time

The step is full fine-tuning of a Llama with the shapes of 1B on one packed row of 4,096 tokens, as in the part
``packing`` of ``make gpu``, and the same with rows of other lengths. For comparison: loops without this program, on one
row, with weights in bfloat16, and with fsdp2 and weights in float32. Then four samples with images, as in the part
``vlm``: a loop without this program, and this program with the frozen tower in float32, as in its files, and with all
weights in bfloat16, without fsdp2. On the device without hardware, nothing else takes time. Printed is the tenth
percentile of the steps, since other programs on the machine lengthen some of them; a real driver needs some
microseconds more for each kernel.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tools.gpu import bare, ours
from tools.gpu.parts import vlm
from tools.gpu.session import Figures
from tools.gpu.shapes import LLAMA_1B, Work, work_of, write_base
from tools.gpu.timed import CLOCK

BARE, SHARDED = "bare loop", "bare loop with fsdp2"
BARE_IMAGES = "bare loop with images"
PROGRAMS: dict[str, dict[str, Any] | None] = {
    BARE: None,
    SHARDED: None,
    "packed rows": {
        "packed_sequence": {"size": 4096},
        "step_scheduler": {"global_batch_size": 1, "local_batch_size": 1},
    },
    "rows of other lengths": {},
    BARE_IMAGES: None,
    "images, tower in float32": {"model": {"dtype": "float32"}},
    "images": {},
    "images without fsdp2": {
        "model": {"dtype": "bfloat16"},
        "distributed": {"strategy": "single", "mixed_precision": "none"},
    },
}
"""Changes of the recipe; None: a loop without this program."""
NARROW = {"hidden_size": 256, "intermediate_size": 512}
"""Fewer values than in the part ``vlm``: the host queues the same operations."""
SAMPLES = {"num_samples": 4000, "longest": 1024, "mean": 170.0}
WARM_UP, STEPS = 10, 100


def accept_documents() -> None:
    """Let attention be limited to each sample, which the program probes with numbers that no kernel computes."""
    from automodel_ckpt.models.attention import by_document as attention

    probed: Any = attention._logits
    names = vars(attention)
    names["validate_kernel"] = lambda *_: None
    names["_logits"] = lambda *arguments: probed(*arguments).cpu().zero_()


def sharded(base: Path) -> Any:
    """The model in *base* with float32 weights, sharded over one rank and computed in bfloat16."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    model = bare.load(base, "cuda").float().train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def with_text(program: str, work: Work, directory: Path) -> Figures:
    """Train the shapes of 1B."""
    base = directory / "base"
    yield from write_base(work.config, base, "cuda")
    changes = PROGRAMS[program]
    if changes is None:
        model = sharded(base) if program == SHARDED else bare.load(base, "cuda").train()
        yield from bare._measure(program, model, work, "cuda", 1.0)
        return
    accept_documents()
    recipe = ours.recipe_of(work, base, directory / "run")
    samples = {**SAMPLES, "vocab_size": work.config["vocab_size"]}
    recipe["dataset"] = {"_target_": "tools.gpu.data.short_answers", **samples}
    yield from ours.measure(program, ours.merged(recipe, changes), directory / "run", 1, 1.0)


def with_images(program: str, work: Work, directory: Path) -> Figures:
    """Train a model with the layers of the part ``vlm``."""
    base, vision = directory / "base", {**vlm.CLIP_LARGE, **NARROW}
    config = vlm.llava(vision, {**work.config, **NARROW})
    yield from write_base(config, base, "cuda", "AutoModelForImageTextToText")
    recipe = vlm.recipe_of(vision, work, base, directory / "run", is_small=False)
    changes = PROGRAMS[program]
    if changes is None:
        yield from vlm.bare_loop(recipe, work, "cuda")
        return
    accept_documents()
    yield from ours.measure(program, ours.merged(recipe, changes), directory / "run", 1, 1.0)


def measured(program: str, work: Work) -> float:
    """Milliseconds of processor time per step. Runs in this process."""
    spent: list[float] = []
    note = CLOCK.note

    def note_time(num_tokens: int, *, is_last: bool = False) -> None:
        note(num_tokens, is_last=is_last)
        spent.append(time.process_time())

    vars(CLOCK)["note"] = note_time
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="host-time-") as name:
        run = with_images if "images" in program else with_text
        for _ in run(program, work, Path(name)):
            pass
    steps = sorted(end - start for start, end in itertools.pairwise(spent))
    return 1e3 * steps[len(steps) // 10]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("programs", nargs="*", help="some of the programs; all without")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--program", choices=PROGRAMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program is not None:
        batch = 1 if PROGRAMS[options.program] is None else 8
        if "images" in options.program:
            batch = 4
        work = work_of(
            LLAMA_1B, is_dry_run=False, batch=batch, warm_up=WARM_UP, steps=options.steps
        )
        print(measured(options.program, work))
        return
    for program in options.programs or PROGRAMS:
        # A process runs a single recipe.
        words = ["--program", program, "--steps", str(options.steps)]
        command = [sys.executable, "-m", __spec__.name, *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
        print(f"{program:24} {float(done.stdout.splitlines()[-1]):6.1f} ms", flush=True)


if __name__ == "__main__":
    main()
