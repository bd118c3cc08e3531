"""Named tensors that every generated graph reads: weights in each storage form, tables, caches,
slots.

Half of the tokens are a thousand times smaller than the rest, so that the mean square of their
latents is about the epsilon of the norm: an epsilon that is lost or changed then shows in the
results.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from tests.catalogue.base import BLOCK_SIZE, BLOCKS, DR, DV, HCKV, HCQ, HE, D

Named = dict[str, Tensor]
POSITIONS = 16  # rows of the tables of all positions
KEPT_SLOTS = 16  # the last rows of the caches take no token, so that slots one too high exist


def draw(lead: tuple[int, ...], heads: int) -> Named:
    """All inputs for tokens of shape ``lead``; caches are fresh copies, so a run may write them."""
    drawn = _drawn(lead, heads)
    return {
        name: tensor.clone() if "cache" in name or name == "pool" else tensor
        for name, tensor in drawn.items()
    }


@lru_cache(maxsize=8)
def _drawn(lead: tuple[int, ...], heads: int) -> Named:
    generator = torch.Generator().manual_seed(heads)
    named = {**_weights(generator, heads), **_tables(generator, lead), **_caches(generator, lead)}
    tokens = torch.Size(lead).numel()
    scale = torch.where(torch.arange(tokens) % 2 == 0, 1.0, 1e-3)
    x = torch.randn(tokens, HE, generator=generator) * scale[:, None]
    named["x"] = x.view(*lead, HE)
    return {name: value.bfloat16() if name not in _WIDE else value for name, value in named.items()}


_WIDE = frozenset("slots positions freqs_cis all_freqs_cis inv_freq".split())


def _weights(generator: torch.Generator, heads: int) -> Named:
    def matrix(out: int, width: int) -> Tensor:
        return torch.randn(out, width, generator=generator) / width**0.5

    def gamma(width: int) -> Tensor:
        return 1 + 0.2 * torch.randn(width, generator=generator)

    flat = {
        "qkv_a": matrix(HCQ + HCKV + DR, HE),
        "q_b": matrix(heads * (D + DR), HCQ),
        "uq": matrix(heads * D, HCQ),
        "qr": matrix(heads * DR, HCQ),
        "kv_b": matrix(heads * (D + DV), HCKV) * 4,
        "indexer": matrix(64, HCQ),
    }
    flat |= {"q_a": flat["qkv_a"][:HCQ].clone(), "kv_a": flat["qkv_a"][HCQ:].clone()}
    flat |= {"dkv": flat["kv_a"][:HCKV].clone(), "kr": flat["kv_a"][HCKV:].clone()}
    turned = {f"{name}_t": weight.t().contiguous() for name, weight in flat.items()}
    uk = flat["kv_b"].view(heads, D + DV, HCKV)[:, :D].clone()
    gammas = {f"gamma_q{other}": gamma(HCQ) for other in ("", "_other")}
    gammas |= {f"gamma_kv{other}": gamma(HCKV) for other in ("", "_other")}
    return {**flat, **turned, "uk": uk, **gammas}


def _tables(generator: torch.Generator, lead: tuple[int, ...]) -> Named:
    def both(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
        angles = torch.rand(*shape, DR // 2, generator=generator) * 6.28
        twice = torch.cat([angles, angles], -1)
        return twice.cos(), twice.sin(), torch.polar(torch.ones_like(angles), angles)

    cos, sin, freqs = both(*lead)
    all_cos, all_sin, all_freqs = both(POSITIONS)
    positions = torch.randperm(POSITIONS, generator=generator)[: torch.Size(lead).numel()].view(
        lead
    )
    half = DR // 2
    return {
        "cos": cos,
        "sin": sin,
        "cos_half": cos[..., :half].clone(),
        "sin_half": sin[..., :half].clone(),
        "all_cos": all_cos,
        "all_sin": all_sin,
        "cos_sin": torch.cat([all_cos[:, :half], all_sin[:, :half]], -1),
        "freqs_cis": freqs,
        "all_freqs_cis": all_freqs,
        "inv_freq": 1.0 / (100.0 ** (torch.arange(0, DR, 2) / DR)),
        "positions": positions,
    }


def _caches(generator: torch.Generator, lead: tuple[int, ...]) -> Named:
    rows, tokens = BLOCKS * BLOCK_SIZE, torch.Size(lead).numel()
    slots = torch.randperm(rows - KEPT_SLOTS - 1, generator=generator)[:tokens] + 1
    slots[0] = 0  # so that slots one too low are negative
    kv, kr = (torch.randn(rows, width, generator=generator) for width in (HCKV, DR))
    batch, length = (1, tokens) if len(lead) == 1 else lead
    dense = {
        f"dense_{name}_cache": torch.randn(batch + 1, length + 5, width, generator=generator)
        for name, width in (("kv", HCKV), ("kr", DR))
    }
    return {
        "kv_cache": kv.view(BLOCKS, BLOCK_SIZE, 1, HCKV),
        "kr_cache": kr.view(BLOCKS, BLOCK_SIZE, 1, DR),
        "kv_rows_cache": kv.clone(),
        "kr_rows_cache": kr.clone(),
        "combined_cache": torch.cat([kv, kr], -1).view(BLOCKS, BLOCK_SIZE, 1, HCKV + DR),
        "pool": torch.randn(2, BLOCKS, BLOCK_SIZE, 1, HCKV + DR, generator=generator),
        **dense,
        "slots": slots.view(lead),
    }
