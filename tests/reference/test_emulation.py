"""CPU kernels of the NPU operators of unfused graphs, against float64 and hand-placed rows."""

from __future__ import annotations

import pytest
import torch

from mla_fusion import reference as kernels

BF16 = torch.bfloat16


def noise(*sizes: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """De-interleave, then rotate-half, as DeepSeek's published model spells it."""
    x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rounded_once(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """``found`` is bfloat16 rounding of ``exact``, up to a float32 error before that."""
    error = (found.double() - exact).abs()
    return bool((error <= exact.abs() * 2.0**-8 * 1.01 + 1e-6 + exact.abs() * 1e-5).all())


def test_rms_norm() -> None:
    x, gamma = noise(3, 5, 32), noise(32, seed=1)
    y, rstd = kernels.npu_rms_norm(x, gamma, 1e-3)
    exact = 1 / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt()
    assert rounded_once(y, x.double() * exact * gamma.double())
    assert rstd.dtype == torch.float32 and rstd.shape == (3, 5, 1)
    torch.testing.assert_close(rstd.double(), exact, rtol=1e-6, atol=0)


def test_add_rms_norm_norms_the_rounded_sum() -> None:
    a, b, gamma = noise(4, 32), noise(4, 32, seed=1), noise(32, seed=2)
    y, rstd, total = kernels.npu_add_rms_norm(a, b, gamma, 1e-6)
    assert torch.equal(total, a + b)
    assert torch.equal(y, kernels.npu_rms_norm(a + b, gamma, 1e-6)[0])
    assert torch.equal(
        kernels.npu_add_rms_norm(a, torch.zeros_like(a), gamma)[0],
        kernels.npu_rms_norm(a, gamma)[0],
    )
    assert rstd.shape == (4, 1)


def test_interleave_rope_takes_cos_first_and_broadcasts_heads() -> None:
    x, cos, sin = noise(2, 4, 3, 16), noise(2, 1, 3, 16, seed=1), noise(2, 1, 3, 16, seed=2)
    y = kernels.npu_interleave_rope(x, cos, sin)
    assert rounded_once_sum(y, rotate(x.double(), cos.double(), sin.double()), x)


def rounded_once_sum(found: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor) -> bool:
    tolerance = exact.abs() * 2.0**-8 * 1.01 + scale.abs().max().double() ** 2 * 1e-5
    return bool(((found.double() - exact).abs() <= tolerance).all())


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul(mode: str) -> None:
    x, cos, sin = noise(2, 3, 4, 16), noise(1, 3, 1, 16, seed=1), noise(1, 3, 1, 16, seed=2)
    y = kernels.npu_rotary_mul(x, cos, sin, mode)
    wide = x.double()
    rotated = torch.empty_like(wide)
    for i in range(8):
        low, high = (i, 8 + i) if mode == "half" else (2 * i, 2 * i + 1)
        rotated[..., low], rotated[..., high] = -wide[..., high], wide[..., low]
    assert rounded_once_sum(y, wide * cos.double() + rotated * sin.double(), x)
    matrix = torch.zeros(16, 16, dtype=BF16)
    for i in range(8):
        low, high = (i, 8 + i) if mode == "half" else (2 * i, 2 * i + 1)
        matrix[high, low], matrix[low, high] = -1, 1
    assert torch.equal(kernels.npu_rotary_mul(x, cos, sin, mode, matrix), y)
    with pytest.raises(ValueError, match="rotary_mode"):
        kernels.npu_rotary_mul(x, cos, sin, "quarter")


def test_transpose_batchmatmul() -> None:
    x, w = noise(5, 4, 32), noise(4, 32, 6, seed=1)
    y = kernels.npu_transpose_batchmatmul(x, w, perm_x1=[1, 0, 2])
    assert y.shape == (5, 4, 6) and y.is_contiguous()
    assert torch.equal(y, torch.bmm(x.transpose(0, 1), w).transpose(0, 1))
    split = kernels.npu_transpose_batchmatmul(x, w, perm_x1=[1, 0, 2], batch_split_factor=2)
    assert torch.equal(split, y.view(5, 2, 12).transpose(0, 1))
    assert torch.equal(
        kernels.npu_transpose_batchmatmul(x, w.mT, perm_x1=(1, 0, 2), perm_x2=(0, 2, 1)), y
    )
    with pytest.raises(ValueError, match="perm_y"):
        kernels.npu_transpose_batchmatmul(x, w, perm_x1=[1, 0, 2], perm_y=[0, 1, 2])


def test_scatter_nd_update() -> None:
    cache, rows = noise(6, 2, 3), noise(2, 2, 3, seed=1)
    out = kernels.npu_scatter_nd_update(cache, torch.tensor([[4], [1]]), rows)
    assert torch.equal(out[4], rows[0]) and torch.equal(out[1], rows[1])
    assert torch.equal(out[[0, 2, 3, 5]], cache[[0, 2, 3, 5]])
    deep = kernels.npu_scatter_nd_update(cache, torch.tensor([[4, 1], [1, 0]]), rows[:, 0])
    assert torch.equal(deep[4, 1], rows[0, 0]) and torch.equal(deep[1, 0], rows[1, 0])


def test_scatter_pa_kv_cache() -> None:
    key, value, caches = (
        noise(2, 1, 8),
        noise(2, 1, 4, seed=1),
        (noise(3, 4, 1, 8, seed=2), noise(3, 4, 1, 4, seed=3)),
    )
    out = kernels.npu_scatter_pa_kv_cache_functional(
        key, value, *caches, torch.tensor([9, 2]), cache_mode="Norm"
    )
    for rows, cache, written in zip((key, value), caches, out, strict=True):
        assert torch.equal(written[2, 1], rows[0]) and torch.equal(written[0, 2], rows[1])
        kept = [slot for slot in range(12) if slot not in (9, 2)]
        assert torch.equal(written.flatten(0, 1)[kept], cache.flatten(0, 1)[kept])
    with pytest.raises(ValueError, match="PA_NZ"):
        kernels.npu_scatter_pa_kv_cache(key, value, *caches, torch.tensor([9, 2]))
    with pytest.raises(ValueError, match="compress_lens"):
        lens = torch.tensor([1])
        kernels.npu_scatter_pa_kv_cache(
            key, value, *caches, lens, cache_mode="Norm", compress_lens=lens
        )


def test_dynamic_quant_then_quant_matmul() -> None:
    x, smooth = noise(4, 64), noise(64, seed=1).abs() + 0.5
    quantised, scale = kernels.npu_dynamic_quant(x, smooth_scales=smooth)
    wide = x.float() * smooth.float()
    assert torch.equal(scale, wide.abs().amax(-1) / 127)
    assert (quantised.float() * scale[:, None] - wide).abs().max() <= scale.max() * 0.5001
    weight = torch.randint(
        -127, 128, (64, 8), dtype=torch.int8, generator=torch.Generator().manual_seed(2)
    )
    channel = torch.rand(8)
    y = kernels.npu_quant_matmul(quantised, weight, channel, pertoken_scale=scale, output_dtype=15)
    exact = (quantised.double() @ weight.double()) * channel.double() * scale.double()[:, None]
    assert rounded_once(y, exact)
    assert kernels.npu_quant_matmul(quantised, weight, channel, output_dtype=3).dtype == torch.int32
    assert kernels.npu_quant_matmul(quantised, weight, channel).dtype == torch.int8


def test_dynamic_block_quant() -> None:
    """Each 128 neighbours by their own scale; the last block may be shorter."""
    x = noise(3, 300)
    quantised, scale = kernels.npu_dynamic_block_quant(x)
    assert quantised.shape == (3, 300) and scale.shape == (3, 3)
    for block in range(3):
        part = slice(128 * block, min(128 * block + 128, 300))
        assert torch.equal(scale[:, block], x[:, part].float().abs().amax(-1) / 127)
        wide = quantised[:, part].double() * scale[:, block : block + 1].double()
        assert (wide - x[:, part].double()).abs().max() <= 0.5001 * scale[:, block].max()
    assert torch.equal(kernels.npu_dynamic_block_quant(x, min_scale=1.0)[1], torch.ones(3, 3))
    with pytest.raises(ValueError, match="1 x 128"):
        kernels.npu_dynamic_block_quant(x, col_block_size=64)


def test_quantize() -> None:
    x, scales = 30 * noise(4, 64).float(), noise(64, seed=1).float().abs() + 0.5
    divided = kernels.npu_quantize(x, scales, None, 1, -1)
    assert torch.equal(divided, (x / scales).round().clamp(-128, 127).to(torch.int8))
    shifted = kernels.npu_quantize(x, scales[:1], torch.tensor([3]), 12, -1, False)
    assert torch.equal(shifted, (x * scales[0] + 3).round().clamp(-128, 127).to(torch.int8))
    with pytest.raises(ValueError, match="int8"):
        kernels.npu_quantize(x, scales, None, 5)


@pytest.mark.parametrize("mode", ["Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"])
def test_kv_rmsnorm_rope_cache(mode: str) -> None:
    batch, length, dv, dk, block = 2, 20, 64, 16, 16
    kv, gamma = noise(batch, 1, length, dv + dk), noise(dv, seed=1)
    cos, sin = noise(batch, 1, length, dk, seed=2), noise(batch, 1, length, dk, seed=3)
    if mode == "Norm":
        caches = noise(batch, 1, 24, dk, seed=4), noise(batch, 1, 24, dv, seed=5)
        index = torch.stack([torch.randperm(24)[:length] for _ in range(batch)])
        index[1, 3] = -1
        slots = (index + torch.tensor([[0], [24]])).masked_fill(index < 0, -1).flatten()
    else:
        caches = noise(6, block, 1, dk, seed=4), noise(6, block, 1, dv, seed=5)
        if "BLK" in mode:
            blocks = [4, 0, 3, -1]
            index = torch.tensor([-1 if b < 0 else b * block for b in blocks])
            slots = torch.tensor(
                [index[2 * b + s // block] + s % block if index[2 * b + s // block] >= 0 else -1
                 for b in range(batch) for s in range(length)]
            )  # fmt: skip
        else:
            index = torch.randperm(6 * block)[: batch * length]
            index[5] = -1
            slots = index
    k_embed, y, k_out, ckv_out = kernels.npu_kv_rmsnorm_rope_cache_v2_functional(
        kv, gamma, cos, sin, index, *caches, epsilon=1e-3, cache_mode=mode, is_output_kv=True
    )
    wide = kv.double()
    exact_k = rotate(wide[..., dv:], cos.double(), sin.double())
    ckv = wide[..., :dv]
    exact_y = ckv / (ckv.square().mean(-1, keepdim=True) + 1e-3).sqrt() * gamma.double()
    assert rounded_once_sum(k_embed, exact_k, kv) and rounded_once(y, exact_y)
    for out, before, rows in ((k_out, caches[0], k_embed), (ckv_out, caches[1], y)):
        width = out.shape[-1]
        if mode.endswith("NZ"):
            out, before = (
                t.view(6, width // 16, block, 16).permute(0, 2, 1, 3).reshape(6, block, 1, width)
                for t in (out, before)
            )
        expected = before.clone().reshape(-1, width)
        expected[slots[slots >= 0]] = rows.reshape(-1, width)[slots >= 0]
        assert torch.equal(out.reshape(-1, width), expected)


def rows_and_slots() -> list[torch.Tensor]:
    tables = [noise(2, 1, 1, 16), noise(2, 1, 1, 16)]
    return [noise(2, 1, 1, 80), noise(64), *tables, torch.tensor([3, 7])]


def test_kv_rmsnorm_rope_cache_v1_writes_its_inputs_and_returns_copies() -> None:
    args = rows_and_slots()
    caches = noise(2, 16, 1, 16), noise(2, 16, 1, 64)
    wanted = kernels.npu_kv_rmsnorm_rope_cache_v2_functional(*args, *caches, cache_mode="PA")
    k_out, ckv_out, _, _ = kernels.npu_kv_rmsnorm_rope_cache(*args, *caches, cache_mode="PA")
    assert torch.equal(k_out, wanted[2]) and torch.equal(ckv_out, wanted[3])
    assert torch.equal(caches[0], k_out) and torch.equal(caches[1], ckv_out)
    assert caches[0].data_ptr() != k_out.data_ptr()


def test_quantised_kv_cache_multiplies_by_its_scale() -> None:
    args = rows_and_slots()
    caches = (
        torch.zeros(2, 16, 1, 16, dtype=torch.int8),
        torch.zeros(2, 16, 1, 64, dtype=torch.int8),
    )
    plain = torch.zeros(2, 16, 1, 16), torch.zeros(2, 16, 1, 64)
    scales = {"k_rope_scale": torch.rand(16) * 30, "c_kv_scale": torch.rand(64) * 30}
    kernels.npu_kv_rmsnorm_rope_cache_v2(*args, *caches, cache_mode="PA", **scales)
    kernels.npu_kv_rmsnorm_rope_cache_v2(*args, *plain, cache_mode="PA")
    for found, wide, scale in zip(caches, plain, scales.values(), strict=True):
        assert torch.equal(found, (wide * scale).round().clamp(-128, 127).to(torch.int8))
