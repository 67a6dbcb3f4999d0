"""NeMo: its .nemo files are read and unpacked here, and it restores those that are exported and packed here."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from automodel_ckpt.examples.data.python_docs import train_tokenizer
from tools.interop.program import Check, Workplace, build_model, files_check, logits_of

_PREFIX = "llm."
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def checks(workplace: Workplace) -> Iterator[Check]:
    made = workplace.made("nemo/make.py")
    state = made / "state.safetensors"
    for name in ("model.nemo", "unpacked", "gzip.nemo"):
        yield files_check(f"its {name} is read", made / name, state)
    workplace.ckpt("unpack", made / "gzip.nemo", made / "from_gzip")
    yield files_check("its gzip archive is unpacked", made / "from_gzip", state)
    # A tiny Llama with a tokenizer.
    source, place = workplace.directory / "llama", workplace.directory
    tokenizer = train_tokenizer(300)
    build_model(5, "llama", vocab_size=len(tokenizer), **_SIZES).save_pretrained(source)
    tokenizer.save_pretrained(source)
    save_file(load_file(source / "model.safetensors"), place / "expected.safetensors")
    exported = place / "exported.nemo"
    workplace.ckpt("export", source, "--to", "nemo", "-o", exported, "--prefix", _PREFIX)
    yield _restored(workplace, exported, "an exported Llama")
    # NeMo saves the model that it restored. That file is unpacked, edited and packed here.
    workplace.ckpt("unpack", place / "exported.nemo.again.nemo", place / "edited")
    config = place / "edited" / "model_config.yaml"
    # NeMo adds the class of this script, which it cannot import: restore_from then uses its own class.
    lines = [line for line in config.read_text().splitlines() if not line.startswith("target:")]
    config.write_text("\n".join([*lines, "edited: true"]) + "\n")
    workplace.ckpt("pack", place / "edited", place / "edited.nemo")
    yield _restored(workplace, place / "edited.nemo", "its own file, edited and packed")


def _restored(workplace: Workplace, path: Path, what: str) -> Check:
    expected = workplace.directory / "expected.safetensors"
    found = workplace.report("restore_nemo.py", path, _PREFIX, expected)
    logits = logits_of(workplace.directory / "llama", range(8)).flatten()
    difference = (torch.tensor(found["logits"]) - logits).abs().max().item()
    weights = "bit-equal" if found["equal"] else "different"
    artifacts = found["artifacts"]
    text = f"weights {weights}, logits differ by {difference:.1e}, {artifacts} artifacts"
    is_good = found["equal"] and difference < 1e-5 and artifacts >= 2
    return Check(f"restore_from reads {what}", text, is_good)
