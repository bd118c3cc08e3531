"""Asks the pass whether it would fuse a compiled decode step of a converted forward.

The forward is traced once for each kind of attention, on fake tensors in bfloat16, over pages like
those of ``MlaPagedCache``: one token of each of two sequences. Nothing is allocated, and the module
is not touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.compat import FakeTensorMode, make_fx
from mla_fusion.config import Config
from mla_fusion.models.hf.examine import arguments_of
from mla_fusion.models.hf.latent_attention import LatentForm
from mla_fusion.models.hf.latent_forward import CACHE
from mla_fusion.pipeline import explain
from mla_fusion.report.report import Report
from mla_fusion.report.text_tables import first_line

BATCH, LENGTH, BLOCK_SIZE = 2, 32, 16


def ask(module: nn.Module, form: LatentForm, forward: Callable[..., Any]) -> tuple[str, str]:
    """Returns "" if the pass would fuse the prologue, else ``code: detail``; and the placement of
    the report.
    """
    try:
        report = _report(module, form, forward)
    except Exception as error:  # code of any kind raises anything
        return f"pass.failed: its step cannot be traced: {first_line(error)}", ""
    if report.fused:
        return "", report.fused[0].placement.partition(":")[0]
    nearest = max(report.rejected, key=lambda item: item.score, default=None)
    if nearest is None:
        return "kv_latent.absent: no part of it was found", ""
    return f"{nearest.code.removeprefix('contract:')}: {nearest.message}", ""


def _report(module: nn.Module, form: LatentForm, forward: Callable[..., Any]) -> Report:
    with FakeTensorMode():
        attention = _in_bfloat16(module)
        attention.forward = MethodType(forward, attention)
        weight = getattr(attention, form.kv_up).weight
        pools = [
            weight.new_empty(BATCH * LENGTH // BLOCK_SIZE, BLOCK_SIZE, 1, width)
            for width in (form.dims.rank, form.dims.rope)
        ]
        state = dict((*attention.named_parameters(), *attention.named_buffers()))
        slots = torch.empty(BATCH, dtype=torch.int64)
        arguments = arguments_of(
            attention, weight, form.complex_tables, batch=BATCH, tokens=1, length=LENGTH
        )

        def step(
            state: dict[str, Tensor], pools: list[Tensor], slots: Tensor, arguments: dict[str, Any]
        ) -> Any:
            arguments = arguments | {CACHE: _Pages(pools, slots)}
            return torch.func.functional_call(attention, state, kwargs=arguments)[0]

        functional = torch.func.functionalize(step)
        gm = make_fx(functional, tracing_mode="fake")(state, pools, slots, arguments)
        return explain(gm, Config(verify="off"))


def _in_bfloat16(module: nn.Module) -> nn.Module:
    """Returns a copy whose parameters, in bfloat16, and buffers are fake."""
    memo: dict[int, Any] = {id(value): torch.empty_like(value) for value in module.buffers()}
    for value in module.parameters():
        dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
        memo[id(value)] = nn.Parameter(torch.empty(value.shape, dtype=dtype), requires_grad=False)
    return copy.deepcopy(module, memo)


@dataclass(frozen=True)
class _Pages:
    """A cache of one layer. Rows are written by slot, and read as ``[B, 1, L, width]``."""

    pools: list[Tensor]
    slots: Tensor

    def update(self, *states: Any, **kwargs: Any) -> list[Tensor]:
        for pool, new in zip(self.pools, states, strict=False):
            width = pool.shape[-1]
            pool.view(-1, width)[self.slots] = new.reshape(-1, width)
        return [pool.view(BATCH, 1, LENGTH, -1) for pool in self.pools]

    def update_indexer(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns as many copies of the new keys as there are tokens: what an indexer reads is no
        part of the prologue.
        """
        return states.expand(BATCH, LENGTH, -1)

    def get_seq_length(self, *args: Any) -> int:
        return LENGTH - 1
