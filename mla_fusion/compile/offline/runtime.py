"""Loads the real torch_npu over the stand-ins, and stops torchair before it needs a device.

Four things in the packages need a device. Each is replaced once, here:

* ``torch_npu.npu._lazy_init`` opens the device. The replacement names the function that called it.
* Some kernels make device tensors. The replacements name the operator. Every other kernel needs a
  tensor that only these could have made.
* torchair starts its engine, and asks for the current device and for the operators of its CANN.
* A compiled graph is called.

Everything between - dispatcher registrations, meta functions, FX passes, converters, GE graph
passes - is the published code, untouched.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from mla_fusion._autoload import cann_location, keep_torch_importable
from mla_fusion.compile.offline.standins import SOC_NAME, SYMBOLS, standins
from mla_fusion.compile.offline.symbols import (
    NpuNotAvailable,
    OfflineError,
    check_versions,
    find_wheel,
)
from mla_fusion.machine import compiled_for

# Names of chips, and the numbers of torch_npu's SocVersion.
_CHIPS = {"A2": ("Ascend910B1", 220), "A3": (SOC_NAME, 250), "A5": ("Ascend950PR", 260)}

_COMPILERS = ("torchair", "npugraph_ex", "torch_npu.dynamo")

_state: dict[str, Any] = {"standins": None, "libraries": []}


def activate() -> None:
    """Makes torch_npu and torchair importable and usable for compilation on a machine without CANN.

    The first ``import torch_npu`` after ``import mla_fusion`` does the same; this does it now.

    Does nothing if CANN is present, and nothing the second time. Afterwards ``import torch_npu``,
    ``import torchair``, fake tensors on device npu and compilation work. A call that needs the
    device raises NpuNotAvailable. Raises OfflineError, which says what is missing, if that is not
    possible.
    """
    if is_active() or cann_location() is not None:
        return
    keep_torch_importable()
    if "torch_npu" in sys.modules:
        raise OfflineError(
            "torch_npu was imported without CANN before mla_fusion: import mla_fusion first"
        )
    find_wheel()  # says what to install
    import_module("torch_npu")  # the finder of ``_lazy`` does it within ``standins_loaded``


@contextlib.contextmanager
def standins_loaded() -> Iterator[None]:
    """Lets torch_npu be imported inside the context, as :func:`activate` says."""
    import torch

    wheel = find_wheel()
    import_module("mla_fusion.releases").require()  # here: it imports torch
    check_versions(wheel, torch.__version__)
    _check_requirements()
    # nothing is ever queued for a device, and the thread that clears the queue polls: a tenth of a
    # core, for good
    os.environ["TASK_QUEUE_ENABLE"] = "0"
    home = standins(wheel)
    paths = [home / SYMBOLS, *sorted(home.glob("lib*.so"))]
    _state["libraries"] = [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in paths]
    with _quiet(), _current_directory_not_searched():
        yield
    _refuse_devices(torch)
    _stop_torchair()
    _state["standins"] = home


def is_active() -> bool:
    """Returns True if this process runs on the stand-ins."""
    return _state["standins"] is not None


def standins_directory() -> Path | None:
    """Returns the directory of the stand-ins in use, or None."""
    return _state["standins"]


def _check_requirements() -> None:
    """Raises OfflineError if packages are absent: torchair's import would fail obscurely."""
    packages = {"google.protobuf": "protobuf", "numpy": "numpy", "yaml": "pyyaml"}
    absent = []
    for module, package in packages.items():
        try:
            import_module(module)
        except ImportError:
            absent.append(package)
    if absent:
        raise OfflineError(f"torchair needs {', '.join(absent)}: pip install 'mla-fusion[offline]'")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops torch_npu's remark that CANN's directory is not set, which is the point here."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield
    for line in printed.getvalue().splitlines():
        if "ASCEND_HOME_PATH" not in line:
            print(line)


@contextlib.contextmanager
def _current_directory_not_searched() -> Iterator[None]:
    """Keeps torch_npu from searching the current directory for a file with CANN's version.

    It searches ASCEND_HOME_PATH, which is not set.
    """
    here, walk = os.path.realpath(""), os.walk

    def elsewhere(top: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Walks other directories."""
        return iter(()) if top == here else walk(top, *args, **kwargs)

    os.walk = elsewhere
    try:
        yield
    finally:
        os.walk = walk


def _refuse_devices(torch: ModuleType) -> None:
    """Replaces what opens a device, and the kernels that make device tensors."""
    npu = import_module("torch_npu.npu")
    index_of = npu._get_device_index

    def device_index(device: Any, *args: Any, **kwargs: Any) -> int:
        """Returns the index of a device. There is no current device."""
        index = index_of(device, *args, **kwargs)
        if index is None:
            _refuse_device()
        return index or 0

    replacements: dict[str, Callable[..., Any]] = {
        "_get_device_index": device_index,
        "_lazy_init": _refuse_device,
        # only guards see the stand-ins' device
        "device_count": lambda: 0,
        "is_available": lambda: False,
        "get_device_name": lambda device_name=None: _chip()[0],
    }
    if hasattr(npu, "is_bf16_supported"):  # torch.autocast asks, even to be disabled
        replacements["is_bf16_supported"] = lambda including_emulation=False: True
    for name, replacement in replacements.items():
        _replace(name, getattr(npu, name), replacement)
    utils = import_module("torch_npu.npu.utils")
    _replace("get_soc_version", utils.get_soc_version, lambda: _chip()[1])
    fake_tensor = import_module("torch._subclasses.fake_tensor")
    # it allocates on the first device of a fake tensor
    if hasattr(fake_tensor, "init_gpu_context"):
        fake_tensor.__dict__["init_gpu_context"] = _nothing
    override = import_module("mla_fusion.compat").override  # here: it imports torch
    libraries: dict[str, Any] = {}
    with warnings.catch_warnings():
        # torch warns once about a kernel that is overridden; here that is intended
        warnings.simplefilter("ignore")
        for name in _tensor_makers(torch):
            namespace, _, operator = name.partition("::")
            if namespace not in libraries:
                libraries[namespace] = torch.library.Library(namespace, "IMPL", "PrivateUse1")
            override(libraries[namespace], operator, _refusal(name))
    _state["registrations"] = libraries


def _chip() -> tuple[str, int]:
    """Returns name and number of the chip that is compiled for."""
    return _CHIPS[compiled_for()]


def _nothing(*args: Any, **options: Any) -> str:
    """Replaces torch's ``init_gpu_context`` (a fake tensor needs no device context), torchair's
    ``initialize_graph_engine`` (a graph that is never loaded needs no engine) and its
    ``is_cann_compat``, whose result "" means that no operator is absent.
    """
    return ""


def _replace(name: str, original: Any, replacement: Any) -> None:
    """Replaces a function of torch_npu in all of its modules."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch_npu") and vars(module).get(name) is original:
            setattr(module, name, replacement)


def _tensor_makers(torch: ModuleType) -> list[str]:
    """Returns the operators that make a tensor on a device, and have a kernel for npu."""
    makers = {
        f"{schema.name}.{schema.overload_name}".rstrip(".")
        for schema in torch._C._jit_get_all_schemas()
        if any(argument.name == "device" for argument in schema.arguments)
        and any("Tensor" in str(result.type) for result in schema.returns)
    }
    return [
        name
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
        if name in makers
    ]


def _refuse_device() -> None:
    """Replaces ``torch_npu.npu._lazy_init``. Raises NpuNotAvailable with the calling function.

    torch's C++ calls it too, before an operator whose allocation is refused by name, so that call
    passes. So do a compiler's questions, such as which stream is current: the stand-ins answer
    these.
    """
    frame: FrameType | None = sys._getframe(1)
    caller = None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_COMPILERS):
            return
        if module.startswith("torch_npu"):
            caller = f"torch.npu.{_public_name(frame)}"
        elif module != __name__:
            break
        frame = frame.f_back
    if caller is not None:
        raise NpuNotAvailable(caller)


def _public_name(frame: FrameType) -> str:
    """Returns ``synchronize``, or ``Stream`` if the function is that class's ``__new__``."""
    name = frame.f_code.co_name
    if not name.startswith("__"):
        return name
    owner = frame.f_locals.get("cls") or type(frame.f_locals.get("self"))
    return owner.__name__


def _refusal(operator: str) -> Callable[..., Any]:
    """Returns a kernel that raises NpuNotAvailable with the operator and the size."""
    name = operator.partition(".")[0]

    def refuse(first: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Raises. The first argument is a size, or a tensor of that size."""
        size = list(first if isinstance(first, (list, tuple)) else getattr(first, "shape", ()))
        raise NpuNotAvailable(f"{name} on device npu" + (f" of size {size}" if size else ""))

    return refuse


def _stop_torchair() -> None:
    """Imports torchair and npugraph_ex, and replaces the engine's start and a graph's execution."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    import_module("torchair")
    backend = import_module("torchair.core._backend")
    atexit.unregister(backend.finalize_graph_engine)
    backend.__dict__["_cached_device_id"] = 0
    for name in ("torchair.core._backend", "torchair._ge_concrete_graph.fx2ge_converter"):
        import_module(name).initialize_graph_engine = _nothing  # type: ignore[attr-defined]
    import_module("torchair._ge_concrete_graph.compat_ir").__dict__["is_cann_compat"] = _nothing
    _refuse_execution(import_module("torchair.npu_fx_compiler"))
    import_module("npugraph_ex").get_npu_backend  # noqa: B018  # a lazy module loads on first attribute
    _refuse_execution(import_module("npugraph_ex.npu_fx_compiler"))
    # torchair's signal handlers end its engine; there is none, so Python handles Ctrl-C
    with contextlib.suppress(ValueError):  # outside the main thread torchair sets no handlers
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _refuse_execution(module: ModuleType) -> None:
    """Replaces the call of compiled graphs."""
    compiled = module._CompiledFxGraph
    concrete = module.ConcreteGraphBase
    run = compiled.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a graph that needs no device. Raises NpuNotAvailable for any other."""
        if isinstance(self.runner, concrete):
            name = getattr(getattr(self.runner, "graph", None), "name", None) or ""
            raise NpuNotAvailable(f"running the compiled graph {name}".rstrip())
        return run(self, *args, **kwargs)

    compiled.__call__ = call
