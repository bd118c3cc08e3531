"""Load the real torch_npu over the stand-ins, and stop torchair where a device would begin.

Four things in the packages assume a device, and each is replaced once, here:

* ``torch_npu.npu._lazy_init`` opens the device. It now names what asked for one.
* The kernels that make device tensors out of none. They now name the operator; every other kernel
  needs a tensor that only these could have made.
* torchair's engine start-up, and the questions which device is current and which operators its CANN
  has.
* A compiled graph being called.

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
    """Make torch_npu and torchair importable and usable for compilation on a machine without CANN.

    The first ``import torch_npu`` behind ``import mla_fusion`` does the same; this does it now.

    Does nothing where CANN is present, and nothing the second time. Afterwards ``import
    torch_npu``, ``import torchair``, fake tensors on device npu and compilation work; a call that
    needs the device raises NpuNotAvailable. Raises OfflineError, saying what is missing, where that
    cannot be arranged.
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
    """torch_npu is imported inside; does what :func:`activate` says."""
    import torch

    wheel = find_wheel()
    import_module("mla_fusion.releases").require()  # here: it imports torch
    check_versions(wheel, torch.__version__)
    _check_requirements()
    # Nothing will ever be queued for a device, and the thread that clears the queue polls: a tenth
    # of a core, for good.
    os.environ["TASK_QUEUE_ENABLE"] = "0"
    home = standins(wheel)
    _state["libraries"] = [_load(home / SYMBOLS), *map(_load, sorted(home.glob("lib*.so")))]
    with _quiet(), _current_directory_not_searched():
        yield
    _refuse_devices(torch)
    _stop_torchair()
    _state["standins"] = home


def is_active() -> bool:
    """Whether this process runs on the stand-ins."""
    return _state["standins"] is not None


def standins_directory() -> Path | None:
    """Where the stand-ins in use lie, or None where none are in use."""
    return _state["standins"]


def _check_requirements() -> None:
    """torchair reads the metadata of these when it is imported, and fails obscurely without."""
    absent = []
    for module, package in (
        ("google.protobuf", "protobuf"),
        ("numpy", "numpy"),
        ("yaml", "pyyaml"),
    ):
        try:
            import_module(module)
        except ImportError:
            absent.append(package)
    if absent:
        raise OfflineError(f"torchair needs {', '.join(absent)}: pip install 'mla-fusion[offline]'")


def _load(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch_npu's remark that CANN's directory is not set, which is the point here."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        yield
    for line in said.getvalue().splitlines():
        if "ASCEND_HOME_PATH" not in line:
            print(line)


@contextlib.contextmanager
def _current_directory_not_searched() -> Iterator[None]:
    """torch_npu looks for a file with CANN's version below ASCEND_HOME_PATH, which is unset: all of
    this directory.
    """
    here, walk = os.path.realpath(""), os.walk

    def elsewhere(top: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return iter(()) if top == here else walk(top, *args, **kwargs)

    os.walk = elsewhere
    try:
        yield
    finally:
        os.walk = walk


def _refuse_devices(torch: ModuleType) -> None:
    npu = import_module("torch_npu.npu")
    index = npu._get_device_index

    def device_index(device: Any, *args: Any, **kwargs: Any) -> int:
        found = index(device, *args, **kwargs)
        if found is None:  # no index given, and there is no current device
            _refuse_device()
        return found or 0

    answers: dict[str, Callable[..., Any]] = {
        "_get_device_index": device_index,
        "_lazy_init": _refuse_device,
        # The guards' one device is nobody else's business.
        "device_count": lambda: 0,
        "is_available": lambda: False,
        "get_device_name": lambda device_name=None: _chip()[0],
    }
    if hasattr(npu, "is_bf16_supported"):  # torch.autocast asks, even where it is to be off
        answers["is_bf16_supported"] = lambda including_emulation=False: True
    for name, answer in answers.items():
        _replace(name, getattr(npu, name), answer)
    utils = import_module("torch_npu.npu.utils")
    _replace("get_soc_version", utils.get_soc_version, lambda: _chip()[1])
    fake_tensor = import_module("torch._subclasses.fake_tensor")
    # it allocates on the first device a fake tensor names
    if hasattr(fake_tensor, "init_gpu_context"):
        fake_tensor.__dict__["init_gpu_context"] = _nothing
    override = import_module("mla_fusion.compat").override  # here: it imports torch
    libraries: dict[str, Any] = {}
    with warnings.catch_warnings():
        # Overriding a registered kernel is announced once per process; here it is meant.
        warnings.simplefilter("ignore")
        for name in _tensor_makers(torch):
            namespace, _, operator = name.partition("::")
            if namespace not in libraries:
                libraries[namespace] = torch.library.Library(namespace, "IMPL", "PrivateUse1")
            override(libraries[namespace], operator, _refusing(name))
    _state["registrations"] = libraries


def _chip() -> tuple[str, int]:
    """Name and number of the chip that is compiled for."""
    return _CHIPS[compiled_for()]


def _nothing(*args: Any, **options: Any) -> str:
    """Stands for torch's ``init_gpu_context`` (a fake tensor needs no device context), torchair's
    ``initialize_graph_engine`` (a graph that is never loaded needs no engine) and its
    ``is_cann_compat``, of which "" is no complaint (no CANN is there that could lack an operator).
    """
    return ""


def _replace(name: str, original: Any, replacement: Any) -> None:
    """Replace a function of torch_npu wherever one of its modules holds it."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch_npu") and vars(module).get(name) is original:
            setattr(module, name, replacement)


def _tensor_makers(torch: ModuleType) -> list[str]:
    """The operators with a kernel for device npu that take a device and give a tensor: they make it
    where none was.
    """
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
    """Stands for ``torch_npu.npu._lazy_init``.

    Called from a Python function of torch_npu, it names that function. torch's own C++ calls it
    too, before an operator whose allocation will be refused by name, so that call passes. So do a
    compiler's questions, such as which stream is current: the stand-ins answer those.
    """
    frame: FrameType | None = sys._getframe(1)
    asked = None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_COMPILERS):
            return
        if module.startswith("torch_npu"):
            asked = f"torch.npu.{_public_name(frame)}"
        elif module != __name__:
            break
        frame = frame.f_back
    if asked is not None:
        raise NpuNotAvailable(asked)


def _public_name(frame: FrameType) -> str:
    """``synchronize``, or ``Stream`` where the function is that class's ``__new__``."""
    name = frame.f_code.co_name
    if not name.startswith("__"):
        return name
    owner = frame.f_locals.get("cls") or type(frame.f_locals.get("self"))
    return owner.__name__


def _refusing(operator: str) -> Callable[..., Any]:
    name = operator.partition(".")[0]

    def refuse(first: Any = None, *args: Any, **kwargs: Any) -> Any:
        size = (
            list(first) if isinstance(first, (list, tuple)) else list(getattr(first, "shape", ()))
        )
        raise NpuNotAvailable(f"{name} on device npu" + (f" of size {size}" if size else ""))

    return refuse


def _stop_torchair() -> None:
    """Import torchair and npugraph_ex and cut both ends off: the engine's start and a graph's
    execution.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    import_module("torchair")
    backend = import_module("torchair.core._backend")
    atexit.unregister(backend.finalize_graph_engine)
    backend.__dict__["_cached_device_id"] = 0
    for name in ("torchair.core._backend", "torchair._ge_concrete_graph.fx2ge_converter"):
        import_module(name).initialize_graph_engine = _nothing  # type: ignore[attr-defined]
    compat_ir = import_module("torchair._ge_concrete_graph.compat_ir")
    compat_ir.__dict__["is_cann_compat"] = _nothing
    _refuse_execution(import_module("torchair.npu_fx_compiler"))
    import_module("npugraph_ex").get_npu_backend  # noqa: B018  # a lazy module loads on first attribute
    _refuse_execution(import_module("npugraph_ex.npu_fx_compiler"))
    # torchair ends its engine from signal handlers of its own; there is no engine, so Ctrl-C stays
    # Python's.
    with contextlib.suppress(ValueError):  # not in the main thread, where torchair sets none either
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _refuse_execution(module: ModuleType) -> None:
    compiled = module._CompiledFxGraph
    concrete = module.ConcreteGraphBase
    run = compiled.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.runner, concrete):
            graph = getattr(self.runner, "graph", None)
            raise NpuNotAvailable(
                f"running the compiled graph {getattr(graph, 'name', '') or ''}".rstrip()
            )
        return run(self, *args, **kwargs)

    compiled.__call__ = call
