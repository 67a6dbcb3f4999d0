"""Compute the operators of CUDA tensors on the CPU, in the same (host) memory."""

import warnings

import null_attention
import torch
from null_tensors import CPU, cpu, gpu
from torch.utils._pytree import tree_leaves, tree_map

MOST_PRODUCTS = 2e10
"""Larger matrix products are measurements of speed, and would take minutes: their result is not computed."""
SKIP = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::_local_scalar_dense",
    "aten::record_stream",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Storage",
    "aten::set_.source_Tensor",
    "aten::set_",
    "aten::resize_",
    "aten::is_pinned",
    "aten::_pin_memory",
    "aten::_fused_sdp_choice",
    "aten::is_set_to",
    "aten::_cudnn_init_dropout_state",
    "aten::_use_cudnn_ctc_loss",
    "aten::equal_",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_flash_attention_forward",
    "aten::_flash_attention_backward",
    "aten::_efficient_attention_forward",
    "aten::_efficient_attention_backward",
    "aten::_flash_attention_forward.quantized",
    "aten::_scaled_dot_product_flash_attention.quantized",
    "aten::mm.dtype",
    "aten::mm.dtype_out",
    "aten::addmm.dtype",
    "aten::addmm.dtype_out",
    "aten::bmm.dtype",
    "aten::bmm.dtype_out",
    "aten::baddbmm.dtype",
    "aten::baddbmm.dtype_out",
    "aten::_efficientzerotensor",
    "aten::_unsafe_view",
}


def generator_for(g, device):
    if g is None:
        torch.cuda._lazy_init() if not torch.cuda.is_initialized() else None
        g = torch.cuda.default_generators[device.index or 0]
    seed, offset = g.initial_seed(), g.get_offset()
    g.set_offset(offset + 4)
    out = torch.Generator()
    out.manual_seed((seed * 1000003 + offset) % (1 << 62))
    return out


def make(op):
    """A kernel for CUDA tensors that computes *op* on the CPU, in the same memory."""
    names = [a.name for a in op._schema.arguments]

    def run(*args, **kwargs):
        device = device_of(args, kwargs)
        here, named = tree_map(on_cpu, (list(args), dict(kwargs)))
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if "generator" in names:
            at = names.index("generator")
            generator = generator_for(given.get("generator"), device)
            if at < len(here):
                here[at] = generator
            else:
                named["generator"] = generator
        if op.name() in ("aten::mm", "aten::mm.out"):
            (rows, inner), columns = here[0].shape, here[1].shape[1]
            if rows * inner * columns > MOST_PRODUCTS:
                out = kwargs.get("out")
                if out is None:
                    out = torch.empty(rows, columns, dtype=here[0].dtype, device=device)
                return out
        here = [as_declared(value, a) for value, a in zip(here, op._schema.arguments, strict=False)]
        if op.name() == "aten::histc" and not here[0].is_floating_point():
            value = op(here[0].float(), *here[1:], **named).to(here[0].dtype)
        else:
            value = op(*here, **named)
        return results(op._schema, value, given, device)

    return run


def as_declared(value, argument):
    """A number in place of a tensor as a tensor: torch unwraps those that it has made of numbers."""
    if str(argument.type) != "Tensor" or not isinstance(value, (int, float)):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def on_cpu(value):
    if isinstance(value, torch.Tensor) and value.is_cuda:
        return cpu(value)
    return CPU if isinstance(value, torch.device) else value


def device_of(args, kwargs):
    """The device of the first CUDA tensor, or the first CUDA device, among the arguments."""
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return value.device
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cuda", value.index or 0)
    return torch.device("cuda", 0)


def results(schema, value, given, device):
    """What the operator returns: the arguments that it writes to, and copies of other values on *device*."""
    if not schema.returns:
        return None
    if len(schema.returns) == 1:
        return result(schema, 0, value, given, device)
    return tuple(result(schema, i, one, given, device) for i, one in enumerate(value))


def result(schema, index, value, given, device):
    alias = schema.returns[index].alias_info
    if alias is not None and alias.is_write:
        target = given[written_argument(schema, alias)]
        tensors = isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor)
        if tensors and target.shape != value.shape:
            target.resize_(value.shape)
            cpu(target).copy_(value)
        return target
    if isinstance(value, torch.Tensor):
        return gpu(value, device)
    if isinstance(value, (list, tuple)):
        return [gpu(one, device) for one in value]
    return value


def written_argument(schema, alias):
    for argument in schema.arguments:
        own = argument.alias_info
        if own is not None and set(own.before_set) == set(alias.before_set):
            return argument.name
    raise AssertionError(f"{schema}: no argument for a result")


def is_view(op):
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel.*")
LIB = torch.library.Library("aten", "IMPL")


def install():
    """Replace the CUDA kernel of each operator that the CPU has, too, and that makes no view."""
    warnings.simplefilter("ignore")
    done = set()
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or name in SKIP or not has_kernels(name):
            continue
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if op is not None and not is_view(op):
            LIB.impl(name, make(op), "CUDA", allow_override=True)
            done.add(name)
    # They have one kernel for all devices, which would start kernels of CUDA.
    for name in ("copy_", "convolution"):
        if f"aten::{name}" not in done:
            LIB.impl(f"aten::{name}", make(getattr(torch.ops.aten, name).default), "CUDA")


def has_kernels(name):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    computed = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    return has(name, "CUDA") and (has(name, "CPU") or computed(name, "CPU"))


def dtype_mm(name, fn, out):
    if out:

        def run(*a, out):
            cpu(out).copy_(fn(*[cpu(x) if isinstance(x, torch.Tensor) else x for x in a]))
            return out

    def plain(*args, beta=1, alpha=1, out=None):
        args = list(args)
        dtype = args.pop()
        t = [cpu(x).to(torch.float32) for x in args]
        value = fn(*t) if len(t) == 2 else beta * t[0] + alpha * fn(*t[1:])
        value = value.to(dtype)
        if out is not None:
            cpu(out).copy_(value)
            return out
        return gpu(value, args[0].device)

    LIB.impl("aten::" + name, plain, "CUDA")


PRODUCTS = (("mm", torch.mm), ("addmm", torch.mm), ("bmm", torch.bmm), ("baddbmm", torch.bmm))


def rms_norm_backward(gradient, inputs, shape, inverse, weight, wanted):
    """The gradients of an RMS normalization of the last dimension, for which the CPU has no operator."""
    slope = cpu(gradient).float()
    scaled = cpu(inputs).float() * cpu(inverse)
    weighted = slope * cpu(weight).float()
    projection = (weighted * scaled).mean(-1, keepdim=True)
    of_inputs = (weighted - scaled * projection) * cpu(inverse)
    of_weight = (slope * scaled).flatten(0, -2).sum(0)
    found = zip((of_inputs, of_weight), (inputs, weight), wanted, strict=True)
    return tuple(gpu(g.to(x.dtype), x.device) if is_wanted else None for g, x, is_wanted in found)


ATTENTION = (
    ("_scaled_dot_product_flash_attention", null_attention.flash_of_batch),
    ("_scaled_dot_product_flash_attention_backward", null_attention.flash_of_batch_backward),
    ("_scaled_dot_product_efficient_attention", null_attention.efficient),
    ("_scaled_dot_product_efficient_attention_backward", null_attention.efficient_backward),
    ("_flash_attention_forward", null_attention.flash),
    ("_flash_attention_backward", null_attention.flash_backward),
)
MASKS = ("eq.Scalar", "masked_select")
"""Operators that make masks of token ids, and that have results of a size that depends on a mask."""


def install_all():
    """Compute all operators on the CPU."""
    for base, fn in PRODUCTS:
        for o in ("dtype", "dtype_out"):
            if hasattr(getattr(torch.ops.aten, base), o):
                dtype_mm(f"{base}.{o}", fn, o.endswith("out"))
    LIB.impl("aten::_fused_rms_norm_backward", rms_norm_backward, "CUDA")
    for name, fn in ATTENTION:
        LIB.impl("aten::" + name, fn, "CUDA")
    with warnings.catch_warnings():
        install()


def install_masks():
    """Compute on the CPU what decides about the sizes of tensors; kernels of all other operators do nothing."""
    for name in MASKS:
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        LIB.impl(f"aten::{name}", make(op), "CUDA", allow_override=True)
