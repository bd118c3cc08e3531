"""What gets each rejection code, and what is written instead, in plain torch: for the page of
codes.

``PROLOGUE`` fuses. An example of which ``after`` stands in it is run: with ``before`` in its place,
the code is given (tests/project/test_rejections_page.py). The others are given by near misses and
tests that name their code.
"""

from __future__ import annotations

PROLOGUE = """\
def rms_norm(x, weight):
    high = x.float()
    return (high * torch.rsqrt(high.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def rotate(x, cos, sin):
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def prologue(x, cos, sin, kv_cache, kr_cache, slots):
    c_q = rms_norm(x @ W_dq, g_q)
    q_nope, q_pe = (c_q @ W_uq_qr).view(-1, N, D + Dr).split([D, Dr], -1)
    c_kv, k_pe = (x @ W_dkv_kr).split([Hckv, Dr], -1)
    q_pe = rotate(q_pe, cos[:, None], sin[:, None])
    k_pe = rotate(k_pe, cos, sin)
    query = torch.einsum("tnd,ndc->tnc", q_nope, W_uk)
    kv_cache.view(-1, Hckv)[slots] = rms_norm(c_kv, g_kv)
    kr_cache.view(-1, Dr)[slots] = k_pe
    return query, q_pe
"""

_KEY_ROTATED = "rotate(k_pe, cos, sin)"
_LATENT_NORMED = "rms_norm(c_kv, g_kv)"
_REPORT = "report it: a defect of the pass"

# code: (before, after)
EXAMPLES: dict[str, tuple[str, str]] = {
    "q_lora.absent": ("x @ W_q", "c_q @ W_uq_qr"),
    "q_lora.interrupted": (
        "c_q = rms_norm(x @ W_dq, g_q).clamp(-9, 9)",
        "c_q = rms_norm(x @ W_dq, g_q)",
    ),
    "kv_latent.absent": (
        "kv_cache.view(-1, Hckv)[slots] = c_kv",
        f"kv_cache.view(-1, Hckv)[slots] = {_LATENT_NORMED}",
    ),
    "rope.absent": (
        "q_pe = q_pe * cos[:, None]",
        "q_pe = rotate(q_pe, cos[:, None], sin[:, None])",
    ),
    "rope.tables_differ": ("rotate(k_pe, cos, -sin)", _KEY_ROTATED),
    "rope.normed_key": ("rotate(rms_norm(k_pe, g_kr), cos, sin)", _KEY_ROTATED),
    "rope.heads_differ": (
        "q_pe = rotate(q_pe[:, :1], cos[:, None], sin[:, None])",
        "q_pe = rotate(q_pe, cos[:, None], sin[:, None])",
    ),
    "absorb.absent": ("query = q_nope", 'query = torch.einsum("tnd,ndc->tnc", q_nope, W_uk)'),
    "norm.absent": ("c_q = F.layer_norm(x @ W_dq, [Hcq], g_q)", "c_q = rms_norm(x @ W_dq, g_q)"),
    "norm.gamma_absent": (
        "c_q = F.rms_norm(x @ W_dq, [Hcq], eps=1e-6)",
        "c_q = rms_norm(x @ W_dq, g_q)",
    ),
    "norm.gamma_dtype": (
        "F.rms_norm(c_kv.float(), [Hckv], g_float32, 1e-6).bfloat16()",
        _LATENT_NORMED,
    ),
    "norm.of_input": (
        "c_q = rms_norm(x @ W_dq, g_q * (x.sin() @ A)[:, :1])",
        "c_q = rms_norm(x @ W_dq, g_q)",
    ),
    "norm.low_precision": ("high = x", "high = x.float()"),
    "norm.runtime_eps": (".mean(-1, keepdim=True) + eps", ".mean(-1, keepdim=True) + 1e-6"),
    "linear.bias": ("F.linear(c_q, W_uq_qr.t(), b)", "c_q @ W_uq_qr"),
    "linear.scaled": ("torch.addmm(x.new_zeros(Hcq), x, W_dq, alpha=2.0)", "x @ W_dq"),
    "linear.symbolic": ("model(x, heads=n)  # dynamic=True", "torch.compile(model, dynamic=False)"),
    "linear.hidden": ("x @ W_dq + x @ A @ B", "x @ W_dq"),
    "quant.static": ("npu_quantize(x, scale, offset, ..)", "npu_dynamic_quant(x)"),
    "quant.weights_only": (
        "(x @ w_int8.bfloat16()) * w_scale",
        "npu_quant_matmul(*npu_dynamic_quant(x), ..)",
    ),
    "quant.dynamic": (
        "(c_q / scale).to(torch.int8)",
        "(c_q / scale).round().clamp(-128, 127).to(torch.int8)",
    ),
    "quant.mixed": (
        "int8(W_dq), int8(W_uq_qr), W_dkv_kr",
        "int8(W_dq), int8(W_uq_qr), int8(W_dkv_kr)",
    ),
    "quant.tokens_differ": (
        "npu_dynamic_quant(x, smooth), npu_dynamic_quant(x)",
        "xq, scale = npu_dynamic_quant(x)",
    ),
    "quant.scale": (
        "npu_quant_matmul(xq, w, one_scale, ..)",
        "npu_quant_matmul(xq, w, scale_per_column, ..)",
    ),
    "dtype.region": ("(c_q.half() @ W_uq_qr.half()).bfloat16()", "c_q @ W_uq_qr"),
    "scale.unequal": (
        'torch.einsum("tnd,ndc->tnc", 0.5 * q_nope, W_uk)',
        'torch.einsum("tnd,ndc->tnc", q_nope, W_uk)',
    ),
    "reader.latent": ("return query, q_pe, c_kv.sum()", "return query, q_pe"),
    "cache.staging_forbidden": ('Config(staging="never")', 'Config(staging="auto")'),
    "staging.gains_nothing": (
        "Config(targets=('v3', 'identity')), 128 heads, pairs in kr_cache",
        "halves in kr_cache",
    ),
    "contract": ("kv_cache: [BlockNum, 8, 1, 512]", "kv_cache: [BlockNum, 16, 1, 512]"),
    "graph.not_functional": (
        "seen = q_pe.sum(); q_pe.mul_(2)",
        "seen = q_pe.sum(); q_pe = q_pe * 2",
    ),
    "graph.branch": (
        "torch.cond(flag, prologue, other, args)",
        "prologue(*args); torch.cond(flag, ..)",
    ),
    "graph.unread": ("prologue(..)  # its results are dropped", "return prologue(..)"),
    "step.choice": ("rms_norm(c_kv.clamp(-50, 50), g_kv)", _LATENT_NORMED),
    "step.random": ("rms_norm(F.dropout(c_kv, 0.1), g_kv)", _LATENT_NORMED),
    "step.unknown": ("rotate(my_operator(k_pe), cos, sin)", _KEY_ROTATED),
    "tokens.cut": ("(x @ W_dq)[:n]", "x[:n] @ W_dq"),
    "tokens.mixed": (
        "k_pe[:16] = k_pe[:16] / 2  # dynamic=True",
        "compile for a fixed number of tokens",
    ),
    "slots.unproven": (
        "cache[slots - 1] = rows  # staging='never'",
        "cache[slots_minus_one] = rows  # an input",
    ),
    "stream.mixed": ("q on stream 11, k on stream 12", "both on one stream"),
    "proof.differs": (
        "q_nope @ W_uk[None]  # [N, B, D], as many sequences as heads",
        "q_nope @ W_uk[:, None]",
    ),
    "verify.mismatch": ("-", _REPORT),
    "pass.failed": ("-", _REPORT),
    "autograd": ("model(x)", "with torch.no_grad(): model(x)"),
    "target.unlisted": ('Config(targets=("identity",))', 'Config(targets=("v3", "identity"))'),
    "skip": ('Config(skip=("layers.1",))', "Config()"),
}
