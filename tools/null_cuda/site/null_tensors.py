"""A CUDA tensor of the null device as a CPU tensor in the same memory, and back."""

import torch

CPU = torch.device("cpu")


def cpu(t):
    s = t.untyped_storage()
    if s.nbytes() == 0 or t.numel() == 0:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype)
    base = torch._C._construct_storage_from_data_pointer(s.data_ptr(), CPU, s.nbytes())
    out = torch.empty(0, dtype=t.dtype).set_(base, t.storage_offset(), t.size(), t.stride())
    if t.is_conj():
        out = out.conj()
    if t.is_neg():
        out = torch._neg_view(out)
    return out


def gpu(t, device):
    out = (
        torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device)
        if _dense(t)
        else torch.empty(t.size(), dtype=t.dtype, device=device)
    )
    if t.numel():
        cpu(out).copy_(t)
    return out


def _dense(t):
    try:
        return torch._prims_common.is_non_overlapping_and_dense(t)
    except Exception:
        return False
