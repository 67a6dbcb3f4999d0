"""Every kind of file that a run directory holds, and a class of the matrix that attacks it."""

import re
from fnmatch import fnmatchcase

from tests.hostile.harness import attacks
from tests.hostile.harness.attacks_forms import COPIED
from tests.hostile.harness.attacks_run import READ_BY

_TREE = {
    "config.json": "hf_text",
    "model.safetensors.index.json": "hf_text",
    **dict.fromkeys(COPIED, "hf_copied_text"),
    "adapter_config.json": "adapter_layout",
    "automodel_peft_config.json": "adapter_layout",
}
_SIDE = {
    "config.json": "side_file_texts",
    "expected_tensors.json": "expected_shape",
    "fqn_to_file_index_mapping.json": "side_file_texts",
    "fqn_to_dtype_mapping.json": "side_file_texts",
    "adapter_config.json": "adapter_text",
    "automodel_peft_config.json": "adapter_text",
    **dict.fromkeys(COPIED, "copied_text"),
}
_CHECKPOINT = {
    "MANIFEST.json": "manifest_malformed",
    "config.yaml": "recipe_text",
    "losses.json": "recipe_text",
    "step_scheduler.pt": "pickle_in_step_scheduler",
    "dataloader/*.pt": "pickle_in_dataloader",
    "rng/*.pt": "pickle_in_rng",
    "model/.slices": "table_content",
    "optim/.slices": "table_content",
    "optim/.metadata": "pickle_in_metadata",
    "optim/__*_0.distcp": "pickle_in_distcp_value",
    "model/.metadata": "dcp_metadata_pickle",
    "model/__*_0.distcp": "dcp_item_pickle",
    "model/shard-*.safetensors": "header_text",
    "model/consolidate.sh": "consolidate_sh_replaced",
    "model/model-*.safetensors": "hf_special",
    "model/adapter_model.safetensors": "adapter_layout",
    **{f"model/{name}": kind for name, kind in _TREE.items()},
    **{f"model/.hf_metadata/{name}": kind for name, kind in _SIDE.items()},
    **{f"model/consolidated/{name}": "special_in_export" for name in attacks.EXPORTED},
}
_RUN = {
    "LATEST": "pointer_LATEST",
    "LOWEST_VAL": "pointer_LOWEST_VAL",
    "LATEST.txt": "pointer_text",
    "LOWEST_VAL.txt": "pointer_text",
    "pin-*": "pointer_pin",
    "epoch_*.superseded-*": "leftover",
    ".epoch_*.staging-*": "leftover",
    ".trash-*": "leftover",
    ".fetched": "leftover",
    ".unusable-*": "leftover",
    ".earlier-logs-*": "leftover",
    ".hub.staging-*": "leftover",
    ".LATEST.*": "leftover",
    ".pin-*": "leftover",
    ".link-*": "leftover",
    "training.jsonl": "log_values",
    "late_validations.json": "late_validation_values",
    "averaged": "special_as_averages",
    ".verified.json": "verified_values",
    ".trackers.json": "tracker_values",
    ".generation.json": "generation_values",
    **{
        name: "own_file_text"
        for name in READ_BY
        if name
        not in (
            "training.jsonl",
            "late_validations.json",
            ".verified.json",
            ".trackers.json",
            ".generation.json",
        )
    },
}
ATTACKED = {**_RUN, **{f"epoch_0_step_*/{path}": kind for path, kind in _CHECKPOINT.items()}}
"""Pattern of paths in a run directory (a star takes no slash) to a class of attacks."""


def class_for(path: str) -> str | None:
    """The class that attacks a file; None where none is entered."""
    return next((kind for pattern, kind in ATTACKED.items() if fits(path, pattern)), None)


def fits(path: str, pattern: str) -> bool:
    parts, wanted = path.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def documented(text: str) -> set[str]:
    """The names in the table of a run directory's files of docs/format.md, as one that could stand there."""
    table = text.split("## Run directory")[1].split("All other files")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = {name.rstrip("/") for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    example = {
        "epoch_E_step_S": "epoch_0_step_20",
        "pin-NAME": "pin-epoch_0_step_20",
        "upload-NAME": "upload-epoch_0_step_20",
        "hub-NAME": "hub-epoch_0_step_20",
        "unusable-NAME": "unusable-epoch_0_step_20",
        "-N": "-1",
        "-U": f"-{'0' * 32}",
        ".U": f".{'0' * 32}",
    }
    for placeholder, value in example.items():
        names = {name.replace(placeholder, value) for name in names}
    return names - {"epoch_0_step_20"}
