"""Watches the fused operators that a model calls by hand, and replaces arguments to undo a slip."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import traceback

from mla_fusion.compat import OpOverload, TorchDispatchMode, given_by_name
from mla_fusion.meta import ContractError, key_operator
from mla_fusion.meta.prolog import PROLOGS
from mla_fusion.tools.by_hand.memory import address
from mla_fusion.tools.by_hand.outcome import Finding

_AUDITED = {
    *(f"npu::{operator.name}" for operator in (*PROLOGS.values(), *key_operator.OPERATORS)),
    "atb::npu_mla_preprocess",
    "atb::npu_mla_preprocess.out",
}
_CACHES = ("kv_cache", "kr_cache", "ckv_cache", "k_cache", "kv_cache_rope")
_FOREIGN = (
    *(str(Path(str(module.__file__)).parent) for module in (torch, contextlib)),
    str(Path(__file__).parent),
    "<",
)

Arguments = dict[str, Any]  # of a call, by name


@dataclass(frozen=True)
class Call:
    """A call: its number, the operator, all arguments by name, and the caller's line."""

    number: int
    operator: str
    arguments: Arguments
    line: str

    def finding(self, code: str, message: str, argument: str = "", certain: bool = True) -> Finding:
        """Returns a finding at this call."""
        return Finding(code, message, argument, self.operator, self.number, self.line, certain)

    def caches(self, addresses: Mapping[int, str]) -> dict[str, str]:
        """Returns by argument the names of the tensors that are the call's caches, "" for a tensor
        without a name.
        """
        caches = {name: self.arguments.get(name) for name in _CACHES}
        return {
            name: addresses.get(address(value), "")
            for name, value in caches.items()
            if isinstance(value, Tensor) and value.numel()
        }


class Refused(Exception):
    """Raised for a call that the contract, or the operator, refuses."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


class Watch(TorchDispatchMode):
    """Calls ``visit`` with each call of a fused operator. It returns the arguments to replace.

    modules  the modules that run, by path, for the lines of calls
    """

    supports_higher_order_operators = True  # torch.cond and the like run unchanged

    def __init__(
        self, visit: Callable[[Call], Arguments], modules: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self._visit, self._count = visit, 0
        self._paths = {id(module): path for path, module in modules.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name() if isinstance(func, OpOverload) else ""
        if name not in _AUDITED:
            return func(*args, **(kwargs or {}))
        arguments = given_by_name(func, args, kwargs or {})
        call = Call(self._count, name.partition("::")[2], arguments, self._line())
        self._count += 1
        try:
            return func(**(arguments | self._visit(call)))
        except ContractError as error:
            finding = call.finding(f"contract:{error.code}", str(error), error.argument)
            raise Refused(finding) from error
        except Exception as error:
            raise Refused(call.finding("call.fails", str(error))) from error

    def _line(self) -> str:
        """Returns the line of the node that runs, or the innermost line on the stack that is not
        torch's or this package's, with the path of its module.
        """
        if trace := traceback.get_current_meta().get("stack_trace"):
            return "File " + str(trace.rpartition("File ")[2].partition("\n")[0])
        frame = sys._getframe()
        while frame.f_back and frame.f_code.co_filename.startswith(_FOREIGN):
            frame = frame.f_back
        code, path = frame.f_code, self._paths.get(id(frame.f_locals.get("self")))
        of = f" of {path}" if path else ""
        return f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}{of}'
