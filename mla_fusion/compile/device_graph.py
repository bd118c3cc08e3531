"""The graph that a compiler's backend is given, without running anything.

``capture`` takes a function through dynamo and AOT autograd as torchair would: functionalised,
inference only, input mutations kept as ``copy_``. On device npu it goes through the real dispatcher
with torchair's decompositions, and no pass of torchair has run. On device cpu neither torch_npu nor
torchair is needed, or touched.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.fx import GraphModule

from mla_fusion.compat import (
    TorchRuntimeError,
    Unsupported,
    aot_module_simplified,
    in_tracing_mode,
    quiet_fakes,
)
from mla_fusion.compile.dynamo import mark_numbers, naming, specialise
from mla_fusion.compile.fakes import relocate

Inputs = list[Any]

_TORCH = str(Path(torch.__file__).parent)


class CaptureError(RuntimeError):
    """A function could not be captured as one graph; the message holds the reason that torch
    gives.
    """


class _Done(BaseException):
    """Ends the first call of a compiled function: there is a graph by then, and nothing to run it
    on.
    """


def capture(
    module_or_fn: Callable[..., Any],
    *args: Any,
    device: str = "npu",
    dynamic: bool = False,
    as_backend: bool = False,
) -> tuple[GraphModule, Inputs]:
    """The AOT inference graph of one call, with its example inputs (fake tensors).

    Arguments, parameters and buffers may lie anywhere, the meta device included; nothing is
    allocated and nothing of the caller's is changed. ``dynamic`` means what it means to
    torch.compile; a dimension can also be marked with ``torch._dynamo.mark_dynamic``.
    ``as_backend``: as ``mf.backend`` sees to, epsilons that are attributes of modules stay numbers
    under ``dynamic``, and what vectors of the model hold is looked at. Raises CaptureError where
    the function is more than one graph.
    """
    found: list[tuple[GraphModule, Inputs]] = []
    decompositions: dict[Any, Any] = {}
    if device.partition(":")[0] == "npu":
        from mla_fusion.compile.torchair_bridge import default_decompositions

        decompositions = default_decompositions()

    def backend(gm: GraphModule, inputs: Inputs) -> Callable[..., Any]:
        if as_backend:
            specialise(gm)
        name = naming(gm)

        def compiler(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            name(gm)
            if as_backend:
                mark_numbers(gm, inputs)
            found.append((gm, list(example_inputs)))
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
    return found[0]


def stop(*args: Any) -> Any:
    """Stands for a compiled graph; being called means that compilation is complete."""
    raise _Done


def trace(
    backend: Callable[..., Any],
    module_or_fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    device: str,
    dynamic: bool,
) -> None:
    """Call ``module_or_fn`` once under torch.compile with ``backend``, over fake tensors on
    ``device``.
    """
    check_arguments(module_or_fn, args)
    target, fakes = relocate(module_or_fn, args, device)

    def on_graph(gm: GraphModule, inputs: Inputs) -> Callable[..., Any]:
        return cast("Callable[..., Any]", backend(gm, in_tracing_mode(inputs)))

    torch.compiler.reset()  # no code of the caller's is reused, and none is left behind
    with quiet_fakes(), torch.no_grad():
        compiled = torch.compile(
            target, backend=on_graph, fullgraph=True, dynamic=True if dynamic else None
        )
        try:
            compiled(*fakes)
        except _Done:
            return
        except (Unsupported, TorchRuntimeError) as error:
            raise CaptureError(f"{_name(module_or_fn)} {_why(str(error))}") from error
        finally:
            torch.compiler.reset()
    raise CaptureError(f"{_name(module_or_fn)} holds no tensor operation, so there is no graph")


def check_arguments(target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raise CaptureError where a function does not take so many."""
    called = target.forward if isinstance(target, torch.nn.Module) else target
    try:
        inspect.signature(called).bind(*args)
    except ValueError:  # it has no signature: the call will tell
        return
    except TypeError as error:
        raise CaptureError(
            f"{_name(target)} does not take these {len(args)} arguments: {error}"
        ) from error


_RAISED = re.compile(r"(?:raised exception|\bgot) (\w+\(.*)")
_LINE = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in '
    r"(?P<function>\S+)\n\s*(?P<code>.*)"
)


def _why(text: str) -> str:
    """Of what dynamo says: what the function raised, or what broke the graph, and the user's
    line.
    """
    said, _, stack = text.partition("from user code:")
    own = [found for found in _LINE.finditer(stack) if not found["file"].startswith(_TORCH)]
    where = (
        "\n  at {file}:{line} in {function}: {code}".format(**own[-1].groupdict()) if own else ""
    )
    raised = _RAISED.search(said)
    if raised is not None:
        return f"fails when it is run: {raised[1].rstrip()}{where}"
    broken = said.partition("  Developer debug context")[0].rstrip()
    return f"does not compile to one graph (a graph break): {broken}{where}"


def _name(target: Any) -> str:
    return getattr(target, "__qualname__", None) or type(target).__name__
