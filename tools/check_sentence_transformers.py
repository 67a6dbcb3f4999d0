"""Compare the embeddings of sentence-transformers with those that transformers and a plain mean or selection give.

    python -m tools.check_sentence_transformers EXPORT [--text TEXT ...]

EXPORT is a directory that the recipe ``embedding`` exported, or a directory of adapters. Run it in an environment with
sentence-transformers (6.2.0 was tested) and peft; nothing of this package is needed. It prints the largest difference
for the texts without a prompt and with both prompts, and ends with 1 if one is above 1e-5.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

_TEXTS = [
    "Return a copy of the list.",
    "x",
    "Open a file, and read its lines one after another. " * 20,
]
_LIMIT = 1e-5


def main() -> int:
    """Compare, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("export", type=Path)
    parser.add_argument("--text", action="append", dest="texts")
    arguments = parser.parse_args()
    texts = arguments.texts or _TEXTS
    library = importlib.import_module("sentence_transformers")
    model: Any = library.SentenceTransformer(str(arguments.export), device="cpu")
    prompts = json.loads((arguments.export / "config_sentence_transformers.json").read_text())
    worst = 0.0
    for name, encode in (
        (None, model.encode),
        ("query", model.encode_query),
        ("document", model.encode_document),
    ):
        prompt = prompts["prompts"][name] if name else ""
        found = encode(texts, convert_to_tensor=True).float()
        expected = _embedded(arguments.export, [prompt + text for text in texts])
        difference = (found - expected).abs().max().item()
        worst = max(worst, difference)
        print(f"{name or 'no'} prompt {prompt!r}: largest difference {difference:.1e}")
    return 0 if worst <= _LIMIT else 1


def _embedded(export: Path, texts: list[str]) -> torch.Tensor:
    """The embeddings [N, H] of *texts*, one text at a time, so that nothing is padded."""
    from transformers import AutoModel, AutoTokenizer

    # transformers loads adapters with their base, if peft is installed.
    model = AutoModel.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    limit = json.loads((export / "sentence_bert_config.json").read_text())["max_seq_length"]
    pooling = json.loads((export / "1_Pooling" / "config.json").read_text())
    rows = []
    for text in texts:
        tokens = tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**tokens).last_hidden_state[0]
        if pooling["pooling_mode_mean_tokens"]:
            rows.append(hidden.mean(dim=0))
        else:
            rows.append(hidden[0 if pooling["pooling_mode_cls_token"] else -1])
    embeddings = torch.stack(rows)
    if (export / "2_Normalize").exists():
        embeddings = torch.nn.functional.normalize(embeddings, dim=-1)
    return embeddings


if __name__ == "__main__":
    sys.exit(main())
