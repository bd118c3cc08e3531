"""Reads from the torch_npu wheel what it needs of CANN.

The published wheel is linked against a dozen CANN libraries. The dynamic tables of the wheel's
shared objects have the names of the libraries, and of the symbols. So nothing here is a list that
ages. A symbol is CANN's if a library of the wheel leaves it undefined, and neither the wheel, nor
torch, nor the C and C++ runtimes define it.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
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
    """Something needs an NPU, and this machine has none; the message names what needs it."""

    def __init__(self, asked: str) -> None:
        super().__init__(
            f"{asked} needs an Ascend NPU, and this process runs with the offline stand-ins of "
            "mla_fusion: graphs can be captured, compiled and inspected here, not executed. Use "
            "CPU tensors, or fake tensors on device npu."
        )
        self.asked = asked


_DATA_TYPES = ("STT_OBJECT", "STT_COMMON")


@dataclass(frozen=True)
class Wheel:
    """Describes the installed torch_npu: its version, its directory and its shared objects."""

    version: str
    root: Path
    libraries: tuple[Path, ...]


@dataclass(frozen=True)
class Missing:
    """Lists the libraries and symbols that need stand-ins, by their names."""

    libraries: tuple[str, ...]
    functions: tuple[str, ...]
    objects: tuple[str, ...]
    thread_locals: tuple[str, ...]


def find_wheel() -> Wheel:
    """Returns the installed torch_npu. Does not import it. Raises OfflineError if there is none."""
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
    """Raises OfflineError for a torch_npu of another torch, which would have undefined symbols."""
    try:
        expected, installed = releases.numbers(wheel.version), releases.numbers(torch_version)
    except ValueError as error:
        raise OfflineError(f"torch_npu beside torch {torch_version}: {error}") from error
    if expected != installed:
        raise OfflineError(
            f"torch_npu {wheel.version} was built for torch {'.'.join(map(str, expected))}, and "
            f"torch {torch_version} is installed. Install a pair, such as this: "
            f"{releases.command(releases.for_torch(torch_version))}"
        )


def fingerprint(wheel: Wheel) -> str:
    """Returns a digest of the wheel's tables of symbols and dependencies. Equal digests have equal
    stand-ins.
    """
    digest = hashlib.sha256(wheel.version.encode())
    for path in wheel.libraries:
        digest.update(str(path.relative_to(wheel.root)).encode())
        with path.open("rb") as stream:
            elf = _elf(stream)
            for name in (".dynsym", ".dynstr", ".dynamic"):
                section = elf.get_section_by_name(name)
                if section is not None:
                    digest.update(section.data())
    return digest.hexdigest()[:20]


def find_missing(wheel: Wheel) -> Missing:
    """Returns the libraries and symbols that the wheel needs and this machine lacks.

    torch must be imported: the dynamic loader looks for symbols in its libraries, too.
    """
    needed, defined = set[str](), set[str]()
    kinds: dict[str, str] = {}  # of the symbols that a library leaves undefined
    for path in wheel.libraries:
        with path.open("rb") as stream:
            elf = _elf(stream)
            needed.update(
                tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")
            )
            for name, kind, is_defined in _symbols(elf):
                if is_defined:
                    defined.add(name)
                elif kinds.get(name, "STT_NOTYPE") == "STT_NOTYPE":
                    kinds[name] = kind
    providers, absent = [ctypes.CDLL(None)], list[str]()
    for name in sorted(needed.difference(path.name for path in wheel.libraries)):
        try:
            providers.append(ctypes.CDLL(name))
        except OSError:
            absent.append(name)
    functions, objects, thread_locals = list[str](), list[str](), list[str]()
    for name in sorted(kinds.keys() - defined):
        if any(hasattr(provider, name) for provider in providers):
            continue
        if kinds[name] == "STT_TLS":
            thread_locals.append(name)
        elif kinds[name] in _DATA_TYPES or _is_data(name):
            objects.append(name)
        else:
            functions.append(name)
    return Missing(tuple(absent), tuple(functions), tuple(objects), tuple(thread_locals))


def _elf(stream: Any) -> Any:
    """Returns the reader of a shared object."""
    try:
        from elftools.elf.elffile import ELFFile
    except ImportError as error:
        raise OfflineError(
            "reading torch_npu's symbol tables needs pyelftools: pip install pyelftools"
        ) from error
    return ELFFile(stream)


def _symbols(elf: Any) -> Iterator[tuple[str, str, bool]]:
    """Yields name and type of each dynamic symbol, and True if it is defined.

    Leaves out weak symbols without a definition: they need none.
    """
    for symbol in elf.get_section_by_name(".dynsym").iter_symbols():
        is_defined = symbol["st_shndx"] != "SHN_UNDEF"
        if symbol.name and (is_defined or symbol["st_info"]["bind"] != "STB_WEAK"):
            yield symbol.name, symbol["st_info"]["type"], is_defined


def _is_data(name: str) -> bool:
    """Returns True if a mangled name denotes data. A linker often leaves undefined data untyped.

    The C++ runtime's demangler decides: a function's name has an argument list.
    """
    if not name.startswith("_Z"):
        return False
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_char_p  # its memory is not freed: this happens once for each wheel
    text = demangle(name.encode(), None, None, None)
    return text is not None and b"(" not in text
