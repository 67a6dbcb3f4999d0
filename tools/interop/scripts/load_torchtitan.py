"""Load exported weights with torchtitan's CheckpointManager, and write the logits. Runs with torchtitan's interpreter.

Arguments: make.py of the fixtures, an empty directory, pairs: ``tied`` or ``untied``, and the exported directory, and
the report to write. The report maps a directory to {"ids": token ids, "logits": of torchtitan's model}.
"""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main() -> None:
    maker_path, empty, *pairs, report = sys.argv[1:]
    maker: Any = SimpleNamespace(**runpy.run_path(maker_path))
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
