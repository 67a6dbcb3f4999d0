"""Load exported weights with torchtitan's CheckpointManager, and write the logits. Runs with torchtitan's interpreter.

Arguments: make.py of the fixtures, an empty directory, pairs: ``tied`` or ``untied``, and the exported directory, and
the report to write. The report maps a directory to {"ids": token ids, "logits": those of torchtitan's model}.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    maker_path, empty, *pairs, report = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("make", maker_path)
    maker: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    found: dict[str, Any] = {}
    for tied, directory in zip(pairs[::2], pairs[1::2], strict=True):
        folder = Path(empty).resolve() / tied
        parts = maker.Parts(folder, tied=tied == "tied", initial=Path(directory).resolve())
        before = maker.logits(parts.model, maker.IDS)
        if not parts.manager.load():
            raise RuntimeError(f"torchtitan did not load {directory}")
        parts.manager.close()
        after = maker.logits(parts.model, maker.IDS)
        if (before - after).abs().max() < 0.1:
            raise RuntimeError("the random weights were not replaced")
        found[directory] = {"ids": maker.IDS, "logits": after.tolist()}
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
