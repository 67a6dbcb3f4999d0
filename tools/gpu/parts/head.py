"""The loss head compared with the products of its layer (time), full logits (memory), and other programs."""

from tools.gpu.session import Figures, PartRun


def run(part: PartRun) -> None:
    """4,096 and 8,192 tokens of an 8B model, with a layer that trains and one that is frozen."""
    is_small = part.session.is_dry_run
    vocabulary, hidden = (512, 64) if is_small else (128_256, 4096)
    for tokens in (64, 128) if is_small else (4096, 8192):
        for trains in (True, False):
            name = f"{tokens} tokens, {'trained' if trains else 'frozen'} layer"
            sizes = (vocabulary, hidden, tokens)
            part.measure(name, _compare, name, part.session.device, sizes, trains, limit=90)


def _compare(name: str, device: str, sizes: tuple[int, int, int], trains: bool) -> Figures:
    """All implementations, and as ``default`` the one that a recipe uses."""
    import torch

    from automodel_ckpt.models.loss.head_gradients import kernel_for
    from tools.bench.loss_kernels import compare

    found = compare(device, *sizes, trains=trains, rounds=10 if device == "cuda" else 1)
    default = f"ours, {kernel_for(device, torch.float32)}"
    yield f"{name}, default", {**found[default], "implementation": default}
    for implementation, figures in found.items():
        yield f"{name}, {implementation}", figures
