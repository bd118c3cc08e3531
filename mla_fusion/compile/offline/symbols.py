"""What the torch_npu wheel expects of CANN, read from the wheel itself.

The published wheel is linked against a dozen CANN libraries. Their names and the symbols wanted
from them stand in the dynamic tables of the wheel's own shared objects, so nothing here is a list
that ages: a symbol is wanted from CANN if some library of the wheel leaves it undefined and neither
the wheel, nor torch, nor the C and C++ runtimes define it.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mla_fusion import releases


class OfflineError(ImportError):
    """torch_npu cannot be loaded without CANN here; the message says what to install or to
    change.
    """


class NpuNotAvailable(RuntimeError):
    """Something needed an NPU that this machine does not have; the message names what was asked
    for.
    """

    def __init__(self, asked: str) -> None:
        super().__init__(
            f"{asked} needs an Ascend NPU, and this process runs with the offline stand-ins of "
            "mla_fusion: "
            "graphs can be captured, compiled and inspected here, not executed. "
            "Use CPU tensors, or fake tensors on device npu."
        )
        self.asked = asked


_DATA_TYPES = ("STT_OBJECT", "STT_COMMON")


@dataclass(frozen=True)
class Wheel:
    """The installed torch_npu: its version, its directory and the shared objects that it brings."""

    version: str
    root: Path
    libraries: tuple[Path, ...]


@dataclass(frozen=True)
class Missing:
    """What has to be stood in for: libraries by name, and symbols by what they are."""

    libraries: tuple[str, ...]
    functions: tuple[str, ...]
    objects: tuple[str, ...]
    thread_locals: tuple[str, ...]


def find_wheel() -> Wheel:
    """The installed torch_npu, found without importing it."""
    spec = find_spec("torch_npu")
    if spec is None or not spec.submodule_search_locations:
        raise OfflineError(
            "torch_npu is not installed. The offline runtime uses the published wheel: "
            f"{releases.command(releases.for_torch(metadata.version('torch')))}"
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    try:
        version = metadata.version("torch_npu")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return Wheel(version, root, tuple(sorted(root.rglob("*.so"))))


def check_versions(wheel: Wheel, torch_version: str) -> None:
    """Refuse a torch_npu built for another torch: loading it would end in undefined symbols or
    worse.
    """
    try:
        built_for, found = releases.numbers(wheel.version), releases.numbers(torch_version)
    except ValueError as error:
        raise OfflineError(f"torch_npu beside torch {torch_version}: {error}") from error
    if built_for != found:
        wanted = ".".join(map(str, built_for))
        beside = releases.for_torch(torch_version)
        raise OfflineError(
            f"torch_npu {wheel.version} was built for torch {wanted}, and torch {torch_version} "
            "is installed. "
            f"Install a pair, such as this: {releases.command(beside)}"
        )


def fingerprint(wheel: Wheel) -> str:
    """A digest of every symbol and dependency table of the wheel: it changes exactly when stand-ins
    must.
    """
    digest = hashlib.sha256(wheel.version.encode())
    for path in wheel.libraries:
        digest.update(str(path.relative_to(wheel.root)).encode())
        with path.open("rb") as stream:
            elf = _elf(stream)
            for section in (".dynsym", ".dynstr", ".dynamic"):
                found = elf.get_section_by_name(section)
                if found is not None:
                    digest.update(found.data())
    return digest.hexdigest()[:20]


def find_missing(wheel: Wheel) -> Missing:
    """The libraries and symbols that the wheel wants and that nothing on this machine provides.

    torch must be imported: its libraries are asked for symbols through the dynamic loader.
    """
    needed: set[str] = set()
    defined: set[str] = set()
    wanted: dict[str, str] = {}
    for path in wheel.libraries:
        with path.open("rb") as stream:
            elf = _elf(stream)
            needed.update(
                tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")
            )
            for name, kind, here in _symbols(elf):
                if here:
                    defined.add(name)
                elif wanted.get(name, "STT_NOTYPE") == "STT_NOTYPE":
                    wanted[name] = kind
    own = {path.name for path in wheel.libraries}
    loaded, absent = _load(sorted(needed - own))
    providers = [ctypes.CDLL(None), *loaded]
    left = sorted(
        name for name in wanted.keys() - defined if not any(hasattr(lib, name) for lib in providers)
    )
    thread_locals = tuple(name for name in left if wanted[name] == "STT_TLS")
    objects = tuple(name for name in left if wanted[name] in _DATA_TYPES or _names_data(name))
    functions = tuple(name for name in left if name not in thread_locals and name not in objects)
    return Missing(tuple(absent), functions, objects, thread_locals)


def _elf(stream: Any) -> Any:
    try:
        from elftools.elf.elffile import ELFFile
    except ImportError as error:
        raise OfflineError(
            "reading torch_npu's symbol tables needs pyelftools: pip install pyelftools"
        ) from error
    return ELFFile(stream)


def _symbols(elf: Any) -> Iterator[tuple[str, str, bool]]:
    """(name, type, defined here) of each dynamic symbol; undefined weak ones need no definition."""
    for symbol in elf.get_section_by_name(".dynsym").iter_symbols():
        here = symbol["st_shndx"] != "SHN_UNDEF"
        if symbol.name and (here or symbol["st_info"]["bind"] != "STB_WEAK"):
            yield symbol.name, symbol["st_info"]["type"], here


def _load(names: Iterable[str]) -> tuple[list[ctypes.CDLL], list[str]]:
    loaded, absent = [], []
    for name in names:
        try:
            loaded.append(ctypes.CDLL(name))
        except OSError:
            absent.append(name)
    return loaded, absent


def _names_data(name: str) -> bool:
    """Does a mangled name denote data? A linker leaves undefined data untyped as often as
    functions.

    The C++ runtime's own demangler decides: a function's name has an argument list.
    """
    if not name.startswith("_Z"):
        return False
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_char_p  # whose memory is not freed: once for each wheel
    text = demangle(name.encode(), None, None, None)
    return text is not None and b"(" not in text
