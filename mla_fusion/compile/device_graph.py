"""Captures the graph that a compiler's backend receives, without running anything.

``capture`` takes a function through dynamo and AOT autograd as torchair does: the graph is
functionalised and for inference only, and input mutations stay as ``copy_``. On device npu the
real dispatcher and torchair's decompositions are used, but no pass of torchair. Device cpu needs
neither torch_npu nor torchair.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from mla_fusion.compat import (
    TorchRuntimeError,
    Unsupported,
    UserError,
    aot_module_simplified,
    in_tracing_mode,
    quiet_fakes,
)
from mla_fusion.compile.dynamo import mark_numbers, naming, specialise
from mla_fusion.compile.fakes import relocate
from mla_fusion.fx.module_path import describe_frame, frames_outside_torch

Inputs = list[Any]


class CaptureError(RuntimeError):
    """A function could not be captured as one graph; the message holds the reason that torch
    gives.
    """


class _Done(BaseException):
    """Raised by the first call of a compiled function: the graph is captured by then."""


def capture(
    module_or_fn: Callable[..., Any],
    *args: Any,
    device: str = "npu",
    dynamic: bool = False,
    as_backend: bool = False,
) -> tuple[GraphModule, Inputs]:
    """Returns the AOT inference graph of one call, and its example inputs (fake tensors).

    Arguments, parameters and buffers may lie on any device, meta included. Nothing is allocated,
    and the caller's objects do not change.

    dynamic     as torch.compile's; tensors may also carry ``torch._dynamo.mark_dynamic``
    as_backend  True: as in ``mf.backend``, epsilons that are attributes of modules stay numbers
                under ``dynamic``, and the numbers of the model's vectors are read

    Raises CaptureError if the function is more than one graph.
    """
    captured: list[tuple[GraphModule, Inputs]] = []
    decompositions: dict[Any, Any] = {}
    if device.partition(":")[0] == "npu":
        from mla_fusion.compile.torchair_bridge import default_decompositions

        decompositions = default_decompositions()

    def backend(gm: GraphModule, inputs: Inputs) -> Callable[..., Any]:
        if as_backend:
            specialise(gm)
        name_inputs = naming(gm)

        def compiler(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            name_inputs(gm)
            if as_backend:
                mark_numbers(gm, inputs)
            captured.append((gm, list(example_inputs)))
            return stop

        return aot_module_simplified(
            gm,
            inputs,
            fw_compiler=compiler,
            inference_compiler=compiler,
            decompositions=decompositions,
            keep_inference_input_mutations=True,
        )

    trace(backend, module_or_fn, args, device=device, dynamic=dynamic)
    return captured[0]


def stop(*args: Any) -> Any:
    """Stands for a compiled graph. A call means that compilation is complete."""
    raise _Done


def trace(
    backend: Callable[..., Any],
    module_or_fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    device: str,
    dynamic: bool,
) -> None:
    """Calls ``module_or_fn`` once under torch.compile with ``backend``, over fake tensors on
    ``device``.

    The backend's graphs must call :func:`stop`. Raises CaptureError if that does not happen.
    """
    check_arguments(module_or_fn, args)
    target, fakes = relocate(module_or_fn, args, device)

    def on_graph(gm: GraphModule, inputs: Inputs) -> Callable[..., Any]:
        return backend(gm, in_tracing_mode(inputs))

    torch.compiler.reset()  # neither uses compiled code of the caller nor leaves any
    with quiet_fakes(), torch.no_grad():
        compiled = torch.compile(
            target, backend=on_graph, fullgraph=True, dynamic=True if dynamic else None
        )
        try:
            compiled(*fakes)
        except _Done:
            return
        except (Unsupported, UserError, TorchRuntimeError) as error:
            raise CaptureError(f"{_name(module_or_fn)} {_why(str(error))}") from error
        finally:
            torch.compiler.reset()
    raise CaptureError(f"{_name(module_or_fn)} holds no tensor operation, so there is no graph")


def check_arguments(target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raises CaptureError if a function does not take so many arguments."""
    function = target.forward if isinstance(target, torch.nn.Module) else target
    try:
        inspect.signature(function).bind(*args)
    except ValueError:  # it has no signature: a call will show
        return
    except TypeError as error:
        raise CaptureError(
            f"{_name(target)} does not take these {len(args)} arguments: {error}"
        ) from error


_RAISED = re.compile(r"(?:raised exception|\bgot) (\w+\(.*)")


def _why(text: str) -> str:
    """Returns what the function raised, or what broke the graph, and the user's line.

    text  dynamo's error message
    """
    cause, _, stack = text.partition("from user code:")
    frames = frames_outside_torch(stack)
    where = f"\n  at {describe_frame(frames[-1])}" if frames else ""
    raised = _RAISED.search(cause)
    if raised is not None:
        return f"fails when it is run: {raised[1].rstrip()}{where}"
    broken = cause.partition("  Developer debug context")[0].rstrip()
    return f"does not compile to one graph (a graph break): {broken}{where}"


def _name(target: Any) -> str:
    """Returns the name of a function, or of the class of an object."""
    return getattr(target, "__qualname__", None) or type(target).__name__
