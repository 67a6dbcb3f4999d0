"""The files of an export to ONNX, with a stand-in for torch's exporter."""

import json
from pathlib import Path

from safetensors import safe_open

from automodel_ckpt.convert.targets.flow import export_to
from tests.support.models.llamas import llama_checkpoint


def names_as_model(directory: Path, target: Path, dtype: str) -> str:
    """Stand for torch's exporter: the names and dtypes of the weights that it would load, and the dtype."""
    names: list[str] = []
    stored: set[str] = set()
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names += file.keys()
            stored.update(file.get_slice(name).get_dtype() for name in names)
    target.write_text(json.dumps({"names": names, "dtype": dtype, "stored": sorted(stored)}))
    return "a note"


def test_the_directory_has_the_model_and_its_side_files(tmp_path: Path) -> None:
    model = llama_checkpoint(tmp_path / "c", tied=False, base=tmp_path / "base")
    lines: list[str] = []
    report = export_to("onnx", tmp_path / "c", exporter=names_as_model, log=lines.append)
    assert report.output == tmp_path / "c-onnx" and report.checked
    found = {path.name for path in report.output.iterdir()}
    assert {"model.onnx", "config.json", "tokenizer.json"} <= found
    assert not any(name.startswith(".") or name.endswith(".safetensors") for name in found)
    exported = json.loads((report.output / "model.onnx").read_text())
    assert set(exported["names"]) == set(model.state_dict()) and exported["dtype"] == "float32"
    # Not rounded to the base's bfloat16.
    assert exported["stored"] == ["F32"] and not any("cast" in line for line in lines)
    assert "warning: a note" in lines
    assert report.num_tensors == len(exported["names"])
    assert report.nbytes == sum(path.stat().st_size for path in report.output.iterdir())
