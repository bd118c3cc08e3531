"""Where cos and sin come from: inputs, gathered by position, computed; and the width asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.catalogue.base import DR

from .inputs import Named

HALF = DR // 2


@dataclass(frozen=True)
class Tables:
    """cos and sin, [.., Dr] or [.., Dr/2]; or ``freqs``, complex [.., Dr/2]. ``lift`` puts the axis
    of heads in.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    freqs: Tensor | None = None
    lift: Callable[[Tensor], Tensor] = lambda table: table

    def lifted(self, lift: Callable[[Tensor], Tensor]) -> Tables:
        return replace(self, lift=lift)

    def half(self) -> tuple[Tensor, Tensor]:
        cos, sin = (
            (self.freqs.real, self.freqs.imag) if self.freqs is not None else (self.cos, self.sin)
        )
        assert cos is not None and sin is not None
        return self.lift(cos[..., :HALF]), self.lift(sin[..., :HALF])

    def full(self) -> tuple[Tensor, Tensor]:
        if self.cos is not None and self.sin is not None and self.cos.shape[-1] == DR:
            return self.lift(self.cos), self.lift(self.sin)
        cos, sin = self.half()
        return torch.cat([cos, cos], -1), torch.cat((sin, sin), -1)

    def pairs(self) -> tuple[Tensor, Tensor]:
        cos, sin = self.half()
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)

    def complex(self) -> Tensor:
        if self.freqs is not None:
            return self.lift(self.freqs)
        cos, sin = self.half()
        return torch.complex(cos.float(), sin.float())


Source = Callable[[Named], Tables]


def given(i: Named) -> Tables:
    return Tables(i["cos"], i["sin"])


def given_half(i: Named) -> Tables:
    return Tables(i["cos_half"], i["sin_half"])


def indexed(i: Named) -> Tables:
    return Tables(i["all_cos"][i["positions"]], i["all_sin"][i["positions"]])


def embedded(i: Named) -> Tables:
    return Tables(
        F.embedding(i["positions"], i["all_cos"]), F.embedding(i["positions"], i["all_sin"])
    )


def joined(i: Named) -> Tables:
    cos, sin = i["cos_sin"][i["positions"]].chunk(2, -1)
    return Tables(cos, sin)


def computed(i: Named) -> Tables:
    angles = i["positions"].unsqueeze(-1).float() * i["inv_freq"]
    both = torch.cat((angles, angles), -1)
    return Tables(both.cos().bfloat16(), both.sin().bfloat16())


def complex_given(i: Named) -> Tables:
    return Tables(freqs=i["freqs_cis"])


def complex_indexed(i: Named) -> Tables:
    return Tables(freqs=i["all_freqs_cis"][i["positions"]])


def polar(i: Named) -> Tables:
    angles = i["positions"].unsqueeze(-1).float() * i["inv_freq"]
    return Tables(freqs=torch.polar(torch.ones_like(angles), angles))


def shared_by_sequences(i: Named) -> Tables:
    """One row a position, for every sequence."""
    length = i["x"].shape[-2]
    return Tables(i["all_cos"][3 : 3 + length], i["all_sin"][3 : 3 + length])


SOURCES: dict[str, Source] = {
    f.__name__: f
    for f in (
        given,
        given_half,
        indexed,
        embedded,
        joined,
        computed,
        complex_given,
        complex_indexed,
        polar,
        shared_by_sequences,
    )
}
COMPLEX = frozenset(("complex_given", "complex_indexed", "polar"))
