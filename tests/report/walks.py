"""Models as remedies leave them, and reports of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from tests.catalogue import ENTRIES, base, misses_norms, misses_products, prologues
from tests.harness import graph_of, traced
from tests.plan import test_refusals as of_plan
from tests.propose.test_finder import InABranch

Base, paged_args, tables = base.Base, base.paged_args, base.tables
Told = Callable[[], mf.Report]


def told(graph: GraphModule, boundary: bool = False, **config: Any) -> mf.Report:
    return mf.explain(graph, mf.Config(verify="off", **config), boundary=boundary)


def of(
    model: Callable[[], nn.Module],
    args: Callable[[], tuple[Any, ...]] = paged_args,
    device: str = "",
    **config: Any,
) -> Told:
    # BASE is where many remedies lead
    return cache(lambda: told(_graph(model, args, device), **config))


@cache
def _graph(
    model: Callable[[], nn.Module], args: Callable[[], tuple[Any, ...]], device: str
) -> GraphModule:
    return graph_of(model(), *args(), device=device) if device else traced(model(), args())[0]


def entry(name: str, **config: Any) -> Told:
    found = ENTRIES[name]
    return of(found.model, found.args, **{"targets": found.targets, **config})


def compiled(
    model: Callable[[], nn.Module],
    args: Callable[[], tuple[Any, ...]] = paged_args,
    gradients: bool = False,
    **config: Any,
) -> Told:
    """As the backend has it."""

    def run() -> mf.Report:
        torch._dynamo.reset()
        with torch.set_grad_enabled(gradients):
            given = tuple(value.clone() for value in args())
            torch.compile(model(), backend=mf.backend(mf.Config(verify="off", **config)))(*given)
        return mf.reports()[-1]

    return run


def dynamic(model: Callable[[], nn.Module], tokens: int = 40) -> Told:
    def run() -> mf.Report:
        args = paged_args(tokens)
        for index in (0, 1, 2, 5):
            torch._dynamo.mark_dynamic(args[index], 0)
        return told(graph_of(model(), *args))

    return run


def edited(
    change: Callable[[GraphModule], None],
    model: Callable[[], nn.Module] = prologues.PagedRotateHalf,
) -> Told:
    def run() -> mf.Report:
        graph, _ = traced(model(), paged_args())
        change(graph)
        return told(graph)

    return run


# -- models after a remedy


def changed(of_class: type[nn.Module] = Base, **methods: Any) -> type[nn.Module]:
    return type("Changed", (of_class,), methods)


class EpsilonBehindTheRoot(base.HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)).to(
            x.dtype
        )


class EpsilonAsFloor(base.HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (
            wide * wide.pow(2).mean(-1, keepdim=True).clamp_min(self.eps).rsqrt()
        ).to(x.dtype)


class EpsilonUnderTheRoot(base.HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide / (wide.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()).to(
            x.dtype
        )


class RepeatedColumns(Base):
    """The rotated part of the first head is projected for each head."""

    def __init__(self) -> None:
        super().__init__()
        rows = self.q_b_proj.weight.data.view(self.heads, base.D + base.DR, base.HCQ)
        rows[:, base.D :] = rows[:1, base.D :].clone()


class ScaledColumns(Base):
    """The rotated columns of the weight are twice as large."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj.weight.data.view(self.heads, base.D + base.DR, base.HCQ)[:, base.D :] *= 2


class GammaOfOnes(misses_norms.NoGamma):
    def __init__(self) -> None:
        super().__init__()
        self.ones = nn.Parameter(torch.ones(base.HCQ).bfloat16())

    def down(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(self.q_a_proj(x), (base.HCQ,), self.ones, 1e-6)


class NumbersOfBfloat16(misses_norms.Fp32Gamma):
    def __init__(self) -> None:
        super().__init__()
        self.gamma.data = self.gamma.data.bfloat16().float()


class Gated(Base):
    """The query's latents are multiplied by what another projection makes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(base.HE, base.HCQ, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor, *rest: Tensor) -> Any:  # type: ignore[override]
        self.by = self.gate(x.relu())
        return super().forward(x, *rest)

    def down(self, x: Tensor) -> Tensor:
        return super().down(x) * self.by


class Merged(misses_products.AdaptedQuery):
    def __init__(self) -> None:
        super().__init__()
        adapted: Any = self.q_b_proj
        self.q_b_proj = adapted.layer
        self.q_b_proj.weight.data += 2 * adapted.up.weight.data @ adapted.down.weight.data


class Dropped(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kv_a_layernorm = nn.Sequential(nn.Dropout(0.1), self.kv_a_layernorm)  # type: ignore[assignment]


class Shifted(Base):
    """The keys of even tokens come before those of odd ones."""

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = super().latent(x)
        return c_kv, torch.cat([k_pe[::2], k_pe[1::2]])


class BeforeTheBranch(InABranch):
    def forward(self, flag: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        p = self.prologue
        q_nope, q_pe = p.split(p.q_b_proj(p.q_a_layernorm(p.q_a_proj(x))))
        c_kv, k_pe = p.latent(x)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        made = (
            p.absorb(q_nope),
            p.rotate(q_pe, c, s),
            c_kv,
            p.rotate(k_pe.unsqueeze(1), c, s).squeeze(1),
        )
        return torch.cond(flag, base.attend, lambda *made: base.attend(*made) * 0, made)


class JoinedAgain(Base):
    """Some of the tokens apart, and nothing done to them."""

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = super().latent(x)
        return c_kv, torch.cat([k_pe[:16], k_pe[16:]])


def sliced(
    self: Base, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, kr: Tensor, slots: Tensor
) -> Any:
    return Base.forward(self, x[:4], cos[:4], sin[:4], kv, kr, slots[:4])


def clamped_input(self: Base, x: Tensor, *rest: Tensor) -> Any:
    return Base.forward(self, x.clamp(-50, 50), *rest)


def clamped_query(self: Base, q_nope: Tensor) -> Tensor:
    return Base.absorb(self, q_nope).clamp(-50, 50)


def doubled_both(self: Base, q: Tensor) -> tuple[Tensor, Tensor]:
    return Base.split(self, 2.0 * q)


def doubled_weight(self: Base, x: Tensor) -> Tensor:
    return nn.functional.linear(x, 2.0 * self.q_a_proj.weight)


def of_normed(self: Base, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
    return c_q.sum(-1)


# -- arguments and graphs


def in_blocks(size: int) -> Callable[[], tuple[Tensor, ...]]:
    def args() -> tuple[Tensor, ...]:
        *rest, _, _, slots = paged_args()
        return (
            *rest,
            *(torch.zeros(64 // size, size, 1, width).bfloat16() for width in (base.HCKV, base.DR)),
            slots,
        )

    return args


def branched() -> tuple[Tensor, ...]:
    return torch.tensor(True), *paged_args()[:3]


def half_precision() -> tuple[Tensor, ...]:
    return tuple(value.half() if value.is_floating_point() else value for value in paged_args())


def with_heads(dynamic: bool) -> Told:
    def run() -> mf.Report:
        gm, _ = capture(
            of_plan.SomeHeads(4), *paged_args(), 2, device="cpu", dynamic=dynamic, as_backend=True
        )
        return told(gm)

    return run


def epsilon(specialised: bool = False, as_backend: bool = False) -> Told:
    def run() -> mf.Report:
        with torch._dynamo.config.patch(specialize_float=specialised):
            model, args = prologues.PagedRotateHalf(), paged_args()
            gm, _ = capture(model, *args, device="cpu", dynamic=True, as_backend=as_backend)
        return told(gm)

    return run


def labelled(first: str, others: str) -> Callable[[GraphModule], None]:
    """The first product carries one stream, the other nodes another."""

    def change(gm: GraphModule) -> None:
        product = next(node for node in gm.graph.nodes if "mm" in node.name)
        for node in gm.graph.nodes:
            node.meta["stream_label"] = first if node is product else others

    return change


def functional() -> mf.Report:
    program = torch.export.export(InPlace(), paged_args())
    return told(program.run_decompositions().graph_module)


def exported() -> mf.Report:
    gm = torch.export.export(InPlace(), paged_args()).module()
    assert isinstance(gm, GraphModule)
    return told(gm)


class InPlace(Base):
    def forward(self, x: Tensor, *rest: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x.mul_(2.0), *rest)
