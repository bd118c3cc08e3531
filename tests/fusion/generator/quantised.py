"""Mutants of quantised prologues: models of the catalogue with one change of their captured graph's
nodes.

No float64 run says what such a graph means, so that fused and unfused are held against each other,
on inputs of several sizes. What differs by more than a few steps of int8 must differ as much where
x is nudged by a rounding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.func import functional_call

from mla_fusion.compile.boundary import fuse_with_boundary
from mla_fusion.paging.tiles import unpack_rows
from tests.catalogue import ENTRIES
from tests.catalogue.base import DR, HCKV
from tests.soundness import captures, compare, modelled

from .changes import CHANGES
from .graphs import Case, Result, run
from .inputs import Named
from .judge import Judgement, Verdict
from .mutants import Mutant, change

ORIGINS = (
    *(
        "MxFull",
        "MxMerged",
        "MxChunked",
        "MxAttentionByOperator",
        "MxPacked",
        "Fp8Full",
        "Fp8Smooth",
        "HifFull",
    ),
    *("Full", "FullSmooth", "MergedDown", "IndexerReads", "PackedByOperators"),
    *("StaticW8A8", "StaticByOperators", "StaticFused", "PagedLite", "StaticInt8", "Int8Rows"),
)
ARGS = ("x", "cos", "sin", "kv_cache", "kr_cache", "slots")
DOT = "__"  # in names of weights, which name inputs of the graph
SIZES = (1.0, 30.0, 1e-3)  # of x; the last is one that the norms' eps is not small beside
NUDGES = tuple(2.0**-bits for bits in (8, 7, 6) for _ in range(2))


@dataclass(frozen=True)
class Quantised(Case):
    """``choices`` names the entry; weights are inputs."""

    def draws(self) -> Iterator[tuple[float, Named]]:
        for seed, size in enumerate(SIZES):
            yield size, _drawn(self.choices["entry"], seed, size)


@cache
def _weights(name: str) -> Named:
    torch.manual_seed(0)
    model = ENTRIES[name].model()
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name.replace(".", DOT): value.detach() for name, value in held.items()}


def _drawn(name: str, seed: int, size: float) -> Named:
    torch.manual_seed(seed)
    given = dict(zip(ARGS, ENTRIES[name].args(), strict=True))
    if _is_packed(given["kv_cache"]):  # bytes that are finite as whatever they are read
        given["kv_cache"] = torch.randint_like(given["kv_cache"].view(torch.int8), 60).view(
            given["kv_cache"].dtype
        )
    of_tokens = size * 2.0 ** (torch.arange(len(given["x"])) % 4).view(
        -1, *[1] * (given["x"].dim() - 1)
    )
    return {**_weights(name), **given, "x": (given["x"] * of_tokens).to(given["x"].dtype)}


@cache
def capture(name: str) -> Quantised:
    weights, model = _weights(name), ENTRIES[name].model()

    def program(named: Named) -> tuple[Tensor, ...]:
        held = {key.replace(DOT, "."): named[key] for key in weights}
        found = functional_call(model, held, tuple(named[key] for key in ARGS))
        return (found,) if isinstance(found, Tensor) else found

    captured = captures.static(program, _drawn(name, 0, 1.0))
    for node, given in zip(
        captured.graph.graph.find_nodes(op="placeholder"), captured.names, strict=True
    ):
        node.target = given
    captured.graph.recompile()
    return Quantised(captured.graph, {"entry": name})


def mutants(recipe: tuple[str, int], count: int = 16) -> Iterator[tuple[Mutant, Judgement]]:
    """Of one entry, as ``recipe`` names it and its seed."""
    name, seed = recipe
    rng, origin = random.Random(seed), capture(name)
    for _ in range(count):
        mutant = change(origin, rng.choice(list(CHANGES)), rng)
        if mutant is not None:
            yield mutant, judge(mutant)


def recipes(seed: int) -> Iterator[tuple[str, int]]:
    rng = random.Random(seed)
    while True:
        for name in rng.sample(ORIGINS, len(ORIGINS)):
            yield name, rng.randrange(1 << 30)


def judge(mutant: Mutant) -> Judgement:
    """Against the unfused mutant, on every input on which it is finite."""
    assert isinstance(mutant.case, Quantised)
    graph, wanted = mutant.case.graph, list[tuple[float, Named, list[Tensor]]]()
    means_another = False
    for size, given in mutant.case.draws():
        try:
            want = _values(run(graph, _fresh(given)))
        except Exception as error:  # a mutant may be any graph at all
            return Judgement(Verdict.INVALID, f"does not run: {type(error).__name__}: {error}")
        if all(bool(value.isfinite().all()) for value in want):
            wanted.append((size, given, want))
            usual = _values(run(mutant.origin.graph, _fresh(given)))
            means_another = means_another or bool(_different(want, usual))
    if not means_another:
        return Judgement(Verdict.INVALID, "it means what its origin means, or is finite nowhere")
    copy = mutant.case.copy().graph
    inputs = [node.meta["val"] for node in copy.graph.find_nodes(op="placeholder")]
    names = [str(node.target) for node in copy.graph.find_nodes(op="placeholder")]
    try:
        report, _, wrap = fuse_with_boundary(
            copy, inputs, ENTRIES[mutant.case.choices["entry"]].config(verify="off")
        )
    except Exception as error:  # the pass must never break a compilation
        return Judgement(Verdict.CRASHED, f"{type(error).__name__}: {error}")
    said = (
        "; ".join(f"[{rejection.code}] {rejection.message}" for rejection in report.rejected)
        or "nothing found"
    )
    if "[pass.failed]" in said:
        return Judgement(Verdict.CRASHED, said)
    if not report.fused:
        return Judgement(Verdict.DECLINED, said)
    fused = wrap(copy.forward)
    for size, given, want in wanted:
        named = _fresh(given)
        outputs = fused(*(named[name] for name in names))
        got = _values(
            Result(tuple(outputs), {name: named[name] for name in ARGS if "cache" in name})
        )
        wrong = _different(got, want)
        if wrong and compare.differs(got, want, _witness(graph, given)):
            return Judgement(Verdict.WRONG, f"x of {size}: {wrong}")
    return Judgement(Verdict.FUSED, report.fused[0].placement)


def _fresh(given: Named) -> Named:
    return {name: value.clone() if "cache" in name else value for name, value in given.items()}


def _values(result: Result) -> list[Tensor]:
    """Numbers of outputs and caches; of rows that are packed, of their parts."""
    found = []
    for value in (
        *result.outputs,
        *(result.caches[name] for name in ARGS if name in result.caches),
    ):
        if _is_packed(value):
            codes, key, scale = unpack_rows(value.reshape(-1, value.shape[-1]), hckv=HCKV, dr=DR)
            found += [
                codes.float().unflatten(-1, (len(scale[0]), -1)) * scale.unsqueeze(-1),
                key.float(),
            ]
        else:
            found.append(value if value.dtype in (torch.float64, torch.int64) else value.float())
    return found


def _is_packed(value: Tensor) -> bool:
    return value.dim() > 1 and value.shape[-1] == HCKV + 2 * DR + 16 and value.element_size() == 1


def _different(got: list[Tensor], want: list[Tensor]) -> str:
    return (
        "another number of values"
        if len(got) != len(want)
        else modelled.differs(tuple(got), tuple(want))
    )


def _witness(graph: torch.fx.GraphModule, given: Named) -> compare.Witness:
    def nudged() -> list[list[Tensor]]:
        generator, x, found = torch.Generator().manual_seed(0), given["x"], []
        for size in NUDGES:
            noise = 1 + size * torch.randn(x.shape, generator=generator)
            found.append(_values(run(graph, {**_fresh(given), "x": (x * noise).to(x.dtype)})))
        return found

    def exact() -> list[Tensor]:
        raise NotImplementedError

    return compare.Witness(exact, nudged)
