"""Would a compiled decode step have the kernel's prologue? Asked of the pass itself, on the
converted forward.

The forward is traced once for each kind of attention, on fake tensors in bfloat16, over pages as
``MlaPagedCache`` has them: one token of each of two sequences. Nothing is allocated, and the module
is not touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mla_fusion.compat import FakeTensorMode, make_fx
from mla_fusion.config import Config
from mla_fusion.models.hf.examine import arguments_of, described
from mla_fusion.models.hf.latent_attention import LatentForm
from mla_fusion.pipeline import explain
from mla_fusion.report.report import Report

BATCH, LENGTH, BLOCK_SIZE = 2, 32, 16


class Answer(NamedTuple):
    """kernel: "" where the pass would fuse the prologue, else ``code: detail``; placement: as the
    report has it.
    """

    kernel: str
    placement: str = ""


def ask(module: nn.Module, form: LatentForm, forward: Callable[..., Any]) -> Answer:
    try:
        report = _report(module, form, forward)
    except Exception as error:  # code of any kind: whatever it raises, its step cannot be foretold
        return Answer(f"pass.failed: its step cannot be traced: {described(error)}")
    if report.fused:
        return Answer("", report.fused[0].placement.partition(":")[0])
    worst = max(report.rejected, key=lambda item: item.score, default=None)
    if worst is None:
        return Answer("kv_latent.absent: no part of it was found")
    return Answer(f"{worst.code.removeprefix('contract:')}: {worst.message}")


def _report(module: nn.Module, form: LatentForm, forward: Callable[..., Any]) -> Report:
    with FakeTensorMode():
        stand_in = _in_bfloat16(module)
        weight = getattr(stand_in, form.kv_up).weight
        pools = [
            weight.new_empty(BATCH * LENGTH // BLOCK_SIZE, BLOCK_SIZE, 1, width)
            for width in (form.dims.rank, form.dims.rope)
        ]
        slots, mask = torch.empty(BATCH, dtype=torch.int64), weight.new_empty(BATCH, 1, 1, LENGTH)
        stand_in.forward = MethodType(forward, stand_in)
        held = dict((*stand_in.named_parameters(), *stand_in.named_buffers()))

        def step(
            held: dict[str, Tensor], pools: list[Tensor], slots: Tensor, given: dict[str, Any]
        ) -> Any:
            cache = {"past_key_values": _Pages(pools, slots)}
            return torch.func.functional_call(stand_in, held, kwargs=given | cache)[0]

        errors: list[Exception] = []
        for given in arguments_of(stand_in, weight, form.dims.rope, form.hidden, BATCH, 1):
            del given["past_key_values"]
            if "attention_mask" in given:
                given["attention_mask"] = mask
            try:
                gm = make_fx(torch.func.functionalize(step), tracing_mode="fake")(
                    held, pools, slots, given
                )
                return explain(gm, Config(verify="off"))
            # its tables are of another kind
            except (RuntimeError, AttributeError, TypeError, ValueError) as error:
                errors.append(error)
        raise errors[0]


def _in_bfloat16(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are fake."""
    memo: dict[int, Any] = {}
    for value in (*module.parameters(), *module.buffers()):
        dtype = (
            torch.bfloat16
            if value.is_floating_point() and isinstance(value, nn.Parameter)
            else value.dtype
        )
        fake = torch.empty(value.shape, dtype=dtype)
        memo[id(value)] = (
            nn.Parameter(fake, requires_grad=False) if isinstance(value, nn.Parameter) else fake
        )
    return copy.deepcopy(module, memo)


class _Pages:
    """A cache of one layer: rows by slot, read as ``[B, 1, L, width]``; an indexer's keys
    likewise.
    """

    def __init__(self, pools: list[Tensor], slots: Tensor) -> None:
        self.pools, self.slots = pools, slots

    def update(
        self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        for pool, states in zip(self.pools, (keys, values), strict=True):
            width = pool.shape[-1]
            pool.view(-1, width)[self.slots] = states.reshape(-1, width)
        first, second = (pool.view(BATCH, 1, LENGTH, -1) for pool in self.pools)
        return first, second

    def update_indexer(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The keys themselves, as often as there are tokens: what becomes of them is no part of the
        prologue.
        """
        return states.expand(BATCH, LENGTH, -1)

    def get_seq_length(self, *args: Any) -> int:
        return LENGTH - 1
