"""The same prologue given to the matchers that torch ships: Inductor's and torch.fx's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from model import Sizes, functional_prologue, layer_arguments
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx


class InductorPattern:
    """The prologue's functional part as one ``register_replacement``; the cache writes cannot be
    part of it.

    The matcher drops a write inside a pattern as dead code, so the model's own writes stay in the
    graph and the replacement is the staged form: the kernel writes small buffers in mode TND.
    """

    def __init__(self, sizes: Sizes) -> None:
        from torch._inductor.pattern_matcher import PatternMatcherPass, register_replacement

        self._pass = PatternMatcherPass()

        def search(*args: Tensor) -> Any:
            return functional_prologue(sizes, *args)

        def replace(
            x: Tensor,
            w_dq: Tensor,
            g_q: Tensor,
            w_uq: Tensor,
            w_dkv: Tensor,
            g_kv: Tensor,
            *rest: Tensor,
        ) -> Any:
            cos, sin, kv_b = rest
            w_uk = kv_b.view(sizes.heads, -1, sizes.latent)[:, : sizes.nope]
            caches = (
                x.new_empty(x.shape[0], 1, sizes.latent),
                x.new_empty(x.shape[0], 1, sizes.rope),
            )
            weights = (w_dq.t(), w_uq.t(), w_uk, w_dkv.t(), g_q, g_kv)
            out = torch.ops.npu.npu_mla_prolog_v3_functional(
                x, *weights, sin, cos, *caches, cache_mode="TND"
            )
            return out[0], out[1], out[5].view(-1, sizes.latent), out[6].view(-1, sizes.rope)

        example = layer_arguments(sizes)
        names = [f"input_{place}" for place in range(len(example))]
        register_replacement(
            _named(search, names), _named(replace, names), example, _traced, self._pass
        )

    def apply(self, gm: GraphModule) -> int:
        """Rewrite; the number of prologues replaced."""
        matches = self._pass.apply(gm.graph)
        gm.graph.eliminate_dead_code()
        gm.recompile()
        return int(matches)


class SubgraphPattern:
    """The same pattern for torch.fx's SubgraphMatcher, which only finds; nothing is rewritten."""

    def __init__(self, sizes: Sizes) -> None:
        self._pattern = _traced(
            lambda *args: functional_prologue(sizes, *args), layer_arguments(sizes)
        ).graph

    def apply(self, gm: GraphModule) -> int:
        """The number of prologues found."""
        from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

        return len(SubgraphMatcher(self._pattern).match(gm.graph))


def _traced(function: Callable[..., Any], args: Any, **_: Any) -> GraphModule:
    """As AOT autograd traces for this backend: no decompositions."""
    gm = make_fx(function, tracing_mode="real")(*args)
    gm.graph.eliminate_dead_code()
    return gm


def _named(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """Inductor's matcher reads the names of parameters, so a function of ``*args`` needs some."""
    namespace: dict[str, Any] = {"function": function}
    exec(f"def named({', '.join(names)}):\n    return function({', '.join(names)})", namespace)
    return namespace["named"]  # type: ignore[no-any-return]
