"""Run by Megatron's Python: load distributed checkpoints with megatron-core, and report the logits of the models.

``python load_megatron.py MAKER PORT [CONFIG.json CHECKPOINT PADDED_VOCABULARY TENSOR_PARALLEL] ... REPORT.json``:
MAKER is tests/fixtures/megatron/make.py, which builds the models. The report maps each checkpoint to the logits for
its IDS. All weights are zero before they are loaded.
"""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state


def main(rank: int, num_ranks: int, arguments: list[str]) -> None:
    """Load the models with as many tensor parallel ranks as each asks for that equal *num_ranks*."""
    maker_path, port, *models, report_path = arguments
    maker: Any = SimpleNamespace(**runpy.run_path(maker_path))
    maker.start(rank, num_ranks, int(port) + num_ranks, num_ranks)
    found: dict[str, Any] = {}
    for number in range(0, len(models), 4):
        config, checkpoint, padded, tensor_parallel = models[number : number + 4]
        if int(tensor_parallel) != num_ranks:
            continue
        dimensions = json.loads(Path(config).read_text())
        model = maker.gpt_model(dimensions, int(padded), num_ranks)
        for parameter in model.parameters():
            parameter.data.zero_()
        state = dist_checkpointing.load({"model": model.sharded_state_dict()}, checkpoint)
        model.load_state_dict(state["model"])
        logits = maker.logits_of(model, maker.IDS)[:, : dimensions["vocab_size"]]
        found[checkpoint] = logits.tolist()
    if rank == 0:
        report = Path(report_path)
        before = json.loads(report.read_text()) if report.exists() else {}
        report.write_text(json.dumps(before | found))
    parallel_state.destroy_model_parallel()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    for ranks in (1, 2):
        torch.multiprocessing.spawn(main, (ranks, sys.argv[1:]), nprocs=ranks)
