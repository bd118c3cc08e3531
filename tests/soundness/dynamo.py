"""A program through torch.compile itself, its token count marked dynamic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mla_fusion as mf

from .captures import PER_TOKEN, Program, _used
from .program import Named


def compiled(
    program: Program, example: Named, config: mf.Config
) -> tuple[Callable[[], list[mf.Report]], Callable[[Named], Any]]:
    """The reports made so far, and the compiled program.

    Where the program reads the int ``n``, it is compiled at a second value too: torch then makes it
    a symbol.
    """
    names = _used(program, example)
    torch._dynamo.reset()
    before = {id(report) for report in mf.reports()}

    def model(*given: Any) -> tuple[Tensor, ...]:
        return program(dict(zip(names, given, strict=True)))

    function = torch.compile(model, backend=mf.backend(config), fullgraph=True)

    def run(named: Named) -> Any:
        given = []
        for name in names:
            value = named[name]
            if name in PER_TOKEN and value.shape[0] > 1:
                value = value.clone()
                torch._dynamo.mark_dynamic(value, 0)
            given.append(value)
        return function(*given)

    return lambda: [report for report in mf.reports() if id(report) not in before], run
