"""onnxruntime: models that are exported here give the logits of transformers, for any batch and length."""

from collections.abc import Iterator

from tests.support.models.gguf_models import model_named
from tools.interop.program import Check, Workplace

_NAMES = ("Llama 2", "Mistral", "Qwen 2, tied", "Qwen 3", "Gemma 3")
_MAX_ERROR = 1e-3


def checks(place: Workplace) -> Iterator[Check]:
    """Export in the environment, which has torch's exporter, and compare there."""
    for name in _NAMES:
        source = model_named(name).save_in(place.directory)
        output = source.with_name(f"{source.name}-onnx")
        export = ("-m", "automodel_ckpt.cli.ckpt", "export", source, "--to", "onnx", "-o", output)
        place.run([place.python, *export])
        for shape, error in place.report("onnx_logits.py", source, output):
            what = f"{name}: largest error of logits, batch and length {tuple(shape)}"
            yield Check(what, f"{error:.1e}", error < _MAX_ERROR)
