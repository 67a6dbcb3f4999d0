"""The attention kernels of CUDA in plain float32, with the arguments and results of their operators."""

import itertools

import torch
from null_tensors import cpu, gpu


def visible_pairs(tq, tk, causal, left, right):
    """The pairs of *tq* queries and *tk* keys that attention uses: bool [tq, tk].

    *left* and *right* limit the window.
    """
    i = torch.arange(tq)[:, None] + (tk - tq)
    j = torch.arange(tk)[None]
    m = torch.ones(tq, tk, dtype=torch.bool)
    if causal:
        right = 0
    if right is not None and right >= 0:
        m &= j <= i + right
    if left is not None and left >= 0:
        m &= j >= i - left
    return m


def forward(q, k, v, scale, mask=None, bias=None):
    """Attention of float32 tensors [B, H, T, D]: the output, and the logarithm of each query's sum [B, H, T]."""
    rep = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
    s = q @ k.transpose(-1, -2) * scale
    if bias is not None:
        s = s + bias
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse[..., None]).nan_to_num(0)
    return p @ v, lse


def backward(do, q, k, v, scale, mask=None, bias=None):
    """The gradients of :func:`forward` for the gradient *do* of its output: of q, k, v, and of the scores."""
    rep = q.shape[1] // k.shape[1]
    kk, vv = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
    s = q @ kk.transpose(-1, -2) * scale
    if bias is not None:
        s = s + bias
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf"))
    p = torch.softmax(s, -1).nan_to_num(0)
    dv = p.transpose(-1, -2) @ do
    dp = do @ vv.transpose(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True))
    dq = ds @ kk * scale
    dk = ds.transpose(-1, -2) @ q * scale
    if rep > 1:
        dk = dk.unflatten(1, (-1, rep)).sum(2)
        dv = dv.unflatten(1, (-1, rep)).sum(2)
    return dq, dk, dv, ds


F = torch.float32


def as_dtype_of(value, t):
    """*value* on the device and in the dtype of *t*."""
    return gpu(value.to(t.dtype), t.device)


def in_flash_layout(value, t):
    """Memory as flash attention returns it: [B, T, H, D] transposed."""
    return gpu(value.to(t.dtype).transpose(1, 2).contiguous(), t.device).transpose(1, 2)


def scale_of(scale, q):
    """The factor of the scores: *scale*, or by default that of the head dimension of *q*."""
    return q.shape[-1] ** -0.5 if scale is None else scale


def flash_of_batch(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    """``aten::_scaled_dot_product_flash_attention``, with its arguments and results."""
    q, k, v = (cpu(x).to(F) for x in (query, key, value))
    mask = visible_pairs(q.shape[2], k.shape[2], True, -1, 0) if is_causal else None
    o, lse = forward(q, k, v, scale_of(scale, q), mask)
    r = torch.zeros(2, dtype=torch.uint64)
    return (
        in_flash_layout(o, query),
        gpu(lse, query.device),
        None,
        None,
        q.shape[2],
        k.shape[2],
        gpu(r, query.device),
        gpu(torch.zeros((), dtype=torch.uint64), query.device),
        torch.empty(0, dtype=query.dtype, device=query.device),
    )


def flash_of_batch_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    philox_seed,
    philox_offset,
    *,
    scale=None,
):
    """``aten::_scaled_dot_product_flash_attention_backward``, with its arguments and results."""
    q, k, v, g = (cpu(x).to(F) for x in (query, key, value, grad_out))
    mask = visible_pairs(q.shape[2], k.shape[2], True, -1, 0) if is_causal else None
    dq, dk, dv, _ = backward(g, q, k, v, scale_of(scale, q), mask)
    return in_flash_layout(dq, query), in_flash_layout(dk, key), in_flash_layout(dv, value)


def efficient(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    """``aten::_scaled_dot_product_efficient_attention``, with its arguments and results."""
    q, k, v = (cpu(x).to(F) for x in (query, key, value))
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if is_causal else None
    o, lse = forward(
        q, k, v, scale_of(scale, q), mask, cpu(attn_bias).to(F) if attn_bias is not None else None
    )
    z = gpu(torch.zeros((), dtype=torch.int64), query.device)
    return in_flash_layout(o, query), gpu(lse, query.device), z, z.clone()


def efficient_backward(
    grad_out_,
    query,
    key,
    value,
    attn_bias,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    dropout_p,
    grad_input_mask,
    is_causal=False,
    *,
    scale=None,
):
    """``aten::_scaled_dot_product_efficient_attention_backward``, with its arguments and results."""
    q, k, v, g = (cpu(x).to(F) for x in (query, key, value, grad_out_))
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if is_causal else None
    dq, dk, dv, ds = backward(
        g,
        q,
        k,
        v,
        scale_of(scale, q),
        mask,
        cpu(attn_bias).to(F) if attn_bias is not None else None,
    )
    db = None
    if grad_input_mask[3] and attn_bias is not None:
        db = as_dtype_of(ds.sum_to_size(attn_bias.shape), attn_bias)
    return in_flash_layout(dq, query), in_flash_layout(dk, key), in_flash_layout(dv, value), db


def spans(cum):
    """The (start, end) of each sequence, from cumulative lengths on the device."""
    c = cpu(cum).tolist()
    return list(itertools.pairwise(c))


def flash(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    **rest,
):
    """``aten::_flash_attention_forward``, with its arguments and results."""
    q, k, v = (cpu(x).to(F) for x in (query, key, value))
    s = scale_of(scale, q)
    outs = torch.zeros_like(q)
    if cum_seq_q is None:
        m = visible_pairs(q.shape[1], k.shape[1], is_causal, window_size_left, window_size_right)
        o, lse = forward(*(x.transpose(1, 2) for x in (q, k, v)), s, m)
        outs = o.transpose(1, 2)
    else:
        lse = torch.zeros(q.shape[1], q.shape[0])
        for (a, b), (c, d) in zip(spans(cum_seq_q), spans(cum_seq_k), strict=True):
            if b == a:
                continue
            assert b - a <= max_q and d - c <= max_k, (b - a, max_q)
            m = visible_pairs(b - a, d - c, is_causal, window_size_left, window_size_right)
            o, sums = forward(
                q[a:b].transpose(0, 1)[None],
                k[c:d].transpose(0, 1)[None],
                v[c:d].transpose(0, 1)[None],
                s,
                m,
            )
            outs[a:b] = o[0].transpose(0, 1)
            lse[:, a:b] = sums[0]
    r = gpu(torch.zeros(2, dtype=torch.uint64), query.device)
    return (
        as_dtype_of(outs, query),
        gpu(lse, query.device),
        r,
        gpu(torch.zeros((), dtype=torch.uint64), query.device),
        torch.empty(0, dtype=query.dtype, device=query.device),
    )


def flash_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    **rest,
):
    """``aten::_flash_attention_backward``, with its arguments and results."""
    q, k, v, g = (cpu(x).to(F) for x in (query, key, value, grad_out))
    s = scale_of(scale, q)
    if cum_seq_q is None:
        m = visible_pairs(q.shape[1], k.shape[1], is_causal, window_size_left, window_size_right)
        dq, dk, dv, _ = backward(*(x.transpose(1, 2) for x in (g, q, k, v)), s, m)
        dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
    else:
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (a, b), (c, d) in zip(spans(cum_seq_q), spans(cum_seq_k), strict=True):
            if b == a:
                continue
            m = visible_pairs(b - a, d - c, is_causal, window_size_left, window_size_right)
            x, y, z, _ = backward(
                g[a:b].transpose(0, 1)[None],
                q[a:b].transpose(0, 1)[None],
                k[c:d].transpose(0, 1)[None],
                v[c:d].transpose(0, 1)[None],
                s,
                m,
            )
            dq[a:b] = x[0].transpose(0, 1)
            dk[c:d] += y[0].transpose(0, 1)
            dv[c:d] += z[0].transpose(0, 1)
    return as_dtype_of(dq, query), as_dtype_of(dk, key), as_dtype_of(dv, value)
