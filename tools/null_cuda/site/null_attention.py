"""The attention kernels of CUDA in plain float32, with the arguments and results of their operators."""

import itertools

import torch
from null_tensors import cpu, gpu


def scores_mask(tq, tk, causal, left, right):
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


def forward(q, k, v, scale, mask=None, bias=None):  # [B,H,T,D] float32
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


def like(value, t):
    return gpu(value.to(t.dtype), t.device)


def bhtd(value, t):
    """Memory as flash attention returns it: [B, T, H, D] transposed."""
    return gpu(value.to(t.dtype).transpose(1, 2).contiguous(), t.device).transpose(1, 2)


def scl(scale, q):
    return q.shape[-1] ** -0.5 if scale is None else scale


def sdpa_flash(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    q, k, v = (cpu(x).to(F) for x in (query, key, value))
    mask = scores_mask(q.shape[2], k.shape[2], True, -1, 0) if is_causal else None
    o, lse = forward(q, k, v, scl(scale, q), mask)
    r = torch.zeros(2, dtype=torch.uint64)
    return (
        bhtd(o, query),
        gpu(lse, query.device),
        None,
        None,
        q.shape[2],
        k.shape[2],
        gpu(r, query.device),
        gpu(torch.zeros((), dtype=torch.uint64), query.device),
        torch.empty(0, dtype=query.dtype, device=query.device),
    )


def sdpa_flash_b(
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
    q, k, v, g = (cpu(x).to(F) for x in (query, key, value, grad_out))
    mask = scores_mask(q.shape[2], k.shape[2], True, -1, 0) if is_causal else None
    dq, dk, dv, _ = backward(g, q, k, v, scl(scale, q), mask)
    return bhtd(dq, query), bhtd(dk, key), bhtd(dv, value)


def sdpa_eff(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    q, k, v = (cpu(x).to(F) for x in (query, key, value))
    mask = scores_mask(q.shape[2], k.shape[2], True, -1, 0) if is_causal else None
    if is_causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    o, lse = forward(
        q, k, v, scl(scale, q), mask, cpu(attn_bias).to(F) if attn_bias is not None else None
    )
    z = gpu(torch.zeros((), dtype=torch.int64), query.device)
    return bhtd(o, query), gpu(lse, query.device), z, z.clone()


def sdpa_eff_b(
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
    q, k, v, g = (cpu(x).to(F) for x in (query, key, value, grad_out_))
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if is_causal else None
    dq, dk, dv, ds = backward(
        g, q, k, v, scl(scale, q), mask, cpu(attn_bias).to(F) if attn_bias is not None else None
    )
    db = None
    if grad_input_mask[3] and attn_bias is not None:
        db = like(ds.sum_to_size(attn_bias.shape), attn_bias)
    return bhtd(dq, query), bhtd(dk, key), bhtd(dv, value), db


def spans(cum):
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
    q, k, v = (cpu(x).to(F) for x in (query, key, value))
    s = scl(scale, q)
    outs = torch.zeros_like(q)
    if cum_seq_q is None:
        m = scores_mask(q.shape[1], k.shape[1], is_causal, window_size_left, window_size_right)
        o, lse = forward(*(x.transpose(1, 2) for x in (q, k, v)), s, m)
        outs = o.transpose(1, 2)
    else:
        lse = torch.zeros(q.shape[1], q.shape[0])
        for (a, b), (c, d) in zip(spans(cum_seq_q), spans(cum_seq_k), strict=True):
            if b == a:
                continue
            assert b - a <= max_q and d - c <= max_k, (b - a, max_q)
            m = scores_mask(b - a, d - c, is_causal, window_size_left, window_size_right)
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
        like(outs, query),
        gpu(lse, query.device),
        r,
        gpu(torch.zeros((), dtype=torch.uint64), query.device),
        torch.empty(0, dtype=query.dtype, device=query.device),
    )


def flash_b(
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
    q, k, v, g = (cpu(x).to(F) for x in (query, key, value, grad_out))
    s = scl(scale, q)
    if cum_seq_q is None:
        m = scores_mask(q.shape[1], k.shape[1], is_causal, window_size_left, window_size_right)
        dq, dk, dv, _ = backward(*(x.transpose(1, 2) for x in (g, q, k, v)), s, m)
        dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
    else:
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (a, b), (c, d) in zip(spans(cum_seq_q), spans(cum_seq_k), strict=True):
            if b == a:
                continue
            m = scores_mask(b - a, d - c, is_causal, window_size_left, window_size_right)
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
    return like(dq, query), like(dk, key), like(dv, value)
