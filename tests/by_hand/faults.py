"""One hand-written integration; each fault changes the arguments of the right call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.catalogue import base, prologues
from tests.catalogue.base import DR, HCKV, D

Arguments = dict[str, Any]
Fault = Callable[[Arguments], Arguments]
npu = torch.ops.npu
HEADS = 4


class Hand(nn.Module):
    """The prologue of ``model`` as one call; attention is the model's."""

    def __init__(self, model: base.Prologue, *faults: Fault, op: str = "npu_mla_prolog_v3") -> None:
        super().__init__()
        self.model, self.faults, self.op = model, faults, op

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        m = self.model
        arguments: Arguments = {
            "token_x": x,
            "weight_dq": m.q_a_proj.weight.T.contiguous(),
            "weight_uq_qr": m.q_b_proj.weight.T.contiguous(),
            "weight_uk": m.w_uk().contiguous(),
            "weight_dkv_kr": m.kv_a_proj_with_mqa.weight.T.contiguous(),
            "rmsnorm_gamma_cq": m.q_a_layernorm.weight,
            "rmsnorm_gamma_ckv": m.kv_a_layernorm.weight,
            "rope_sin": sin,
            "rope_cos": cos,
            "kv_cache": kv_cache,
            "kr_cache": kr_cache,
            "cache_index": slots,
            "rmsnorm_epsilon_cq": m.q_a_layernorm.eps,
            "rmsnorm_epsilon_ckv": m.kv_a_layernorm.eps,
            "cache_mode": "PA_BSND",
        }
        for fault in self.faults:
            arguments = fault(arguments)
        query, query_rope, *_ = getattr(npu, self.op)(**arguments)
        return base.attend(query, query_rope, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))


def model() -> base.Prologue:
    return prologues.PagedRotateHalf(HEADS)


def on(name: str, function: Callable[[Tensor], Tensor]) -> Fault:
    return lambda arguments: {**arguments, name: function(arguments[name]).contiguous()}


def given(**values: Any) -> Fault:
    return lambda arguments: {**arguments, **values}


def to_half(columns: Tensor) -> Tensor:
    return columns.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def to_pairs(columns: Tensor) -> Tensor:
    return columns.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def rope_of_heads(order: Callable[[Tensor], Tensor]) -> Fault:
    def change(weight: Tensor) -> Tensor:
        heads = weight.unflatten(-1, (HEADS, D + DR))
        return torch.cat([heads[..., :D], order(heads[..., D:])], -1).flatten(-2)

    return on("weight_uq_qr", change)


def rope_of_key(order: Callable[[Tensor], Tensor]) -> Fault:
    return on(
        "weight_dkv_kr", lambda weight: torch.cat([weight[:, :HCKV], order(weight[:, HCKV:])], -1)
    )


def swapped(arguments: Arguments) -> Arguments:
    return {**arguments, "rope_cos": arguments["rope_sin"], "rope_sin": arguments["rope_cos"]}


def heads_first(weight: Tensor) -> Tensor:
    heads = weight.unflatten(-1, (HEADS, D + DR))
    return torch.cat([heads[..., :D].flatten(-2), heads[..., D:].flatten(-2)], -1)


def rope_first(weight: Tensor) -> Tensor:
    heads = weight.unflatten(-1, (HEADS, D + DR))
    return torch.cat([heads[..., D:], heads[..., :D]], -1).flatten(-2)


def reshaped(weight: Tensor) -> Tensor:
    """A linear layer's [out, in], called [in, out]."""
    return weight.T.contiguous().view(weight.shape)


# name: (the code that an audit finds, the argument that it names, the fault)
FAULTS: dict[str, tuple[str, str, Fault]] = {
    "q_rope_half": ("rope_columns.half", "weight_uq_qr", rope_of_heads(to_half)),
    "q_rope_twice": ("rope_columns.interleaved", "weight_uq_qr", rope_of_heads(to_pairs)),
    "k_rope_half": ("rope_columns.half", "weight_dkv_kr", rope_of_key(to_half)),
    "k_rope_twice": ("rope_columns.interleaved", "weight_dkv_kr", rope_of_key(to_pairs)),
    "tables_swapped": ("tables.swapped", "rope_cos, rope_sin", swapped),
    "key_first": (
        "columns.key_first",
        "weight_dkv_kr",
        on("weight_dkv_kr", lambda w: torch.cat([w[:, HCKV:], w[:, :HCKV]], -1)),
    ),
    "nope_then_rope": ("heads.nope_then_rope", "weight_uq_qr", on("weight_uq_qr", heads_first)),
    "rope_first": ("heads.rope_first", "weight_uq_qr", on("weight_uq_qr", rope_first)),
    "heads_last": (
        "heads.transposed",
        "weight_uq_qr",
        on("weight_uq_qr", lambda w: w.unflatten(-1, (HEADS, -1)).transpose(-1, -2).flatten(-2)),
    ),
    "w_uk_transposed": (
        "w_uk.transposed",
        "weight_uk",
        on("weight_uk", lambda w: w.transpose(1, 2).contiguous().view(w.shape)),
    ),
    "w_uk_heads": (
        "w_uk.heads",
        "weight_uk",
        on("weight_uk", lambda w: w.transpose(0, 1).contiguous().view(w.shape)),
    ),
    "dq_reshaped": ("weight.reshaped", "weight_dq", on("weight_dq", reshaped)),
    "uq_qr_reshaped": ("weight.reshaped", "weight_uq_qr", on("weight_uq_qr", reshaped)),
    "dkv_kr_reshaped": ("weight.reshaped", "weight_dkv_kr", on("weight_dkv_kr", reshaped)),
    "eps_cq_default": ("epsilon", "rmsnorm_epsilon_cq", given(rmsnorm_epsilon_cq=1e-5)),
    "eps_ckv_default": ("epsilon", "rmsnorm_epsilon_ckv", given(rmsnorm_epsilon_ckv=1e-5)),
    "eps_ckv_small": ("epsilon", "rmsnorm_epsilon_ckv", given(rmsnorm_epsilon_ckv=1e-8)),
}
# what is detected, and not in the table
UNEXPLAINED: dict[str, Fault] = {
    "slots_rolled": on("cache_index", lambda v: v.roll(1, 0)),
    "block_late": on("cache_index", lambda v: v + base.BLOCK_SIZE),
    "sine_negated": on("rope_sin", torch.neg),
    "gamma_offset": on("rmsnorm_gamma_ckv", lambda g: g + 1),
    "scaled": given(qc_qr_scale=0.5),
}


def args() -> tuple[Tensor, ...]:
    """Slots with room on both sides of them."""
    x, cos, sin, kv_cache, kr_cache, _ = base.paged_args()
    middle = torch.randperm(2 * base.BLOCK_SIZE)[: x.shape[0]] + base.BLOCK_SIZE
    return x, cos, sin, kv_cache, kr_cache, middle
