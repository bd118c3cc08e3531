"""Builds inert stand-ins for the CANN libraries: generates C, and compiles it once per wheel.

Each library that torch_npu is linked against becomes an empty shared object of the same name, which
satisfies the loader. One more object defines the symbols. A function does nothing: it returns zero,
or an error if success would mean that memory or a result exists. A few functions have a body. They
answer torch_npu's questions: which device is selected, and for which chip and which CANN release
graphs are compiled.

The result is cached for the user. Two processes may build at once: each builds in a directory of
its own, and only one can rename it to the final name.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from mla_fusion.compile.offline.symbols import (
    Missing,
    OfflineError,
    Wheel,
    find_missing,
    fingerprint,
)

SYMBOLS = "libmla_fusion_standins.so"

# the chip and the release of offline compilation, for converters and shape functions of torch_npu
SOC_NAME = "Ascend910_9391"
CANN_VERSION = "9.1.0"

# ACL_ERROR_RT_DRV_INTERNAL_ERROR: the real library's error if there is no driver
_NO_DRIVER = 507899
_FAILING = tuple(
    "aclrtMalloc aclrtMem aclrtReserve aclrtMap aclopCompileAndExecute rtKernelLaunch".split()
)

# Device and stream guards are noexcept: without a device to select they would end the process. So
# there is a device that can be selected and does nothing: the operator behind a guard is then
# refused by name. Functions of system parameters are looked up by name at run time, so no symbol
# table has them. Functions with ``made`` store a handle.
_BODIES = f"""
int aclrtGetDeviceCount(unsigned *count) {{ *count = 1; return 0; }}
int aclrtSetDevice(int device) {{ return 0; }}
int aclrtGetDevice(int *device) {{ *device = 0; return 0; }}
const char *aclrtGetSocName(void) {{ return "{SOC_NAME}"; }}
const char *aclGetRecentErrMsg(void) {{ return "no CANN: mla_fusion stand-in"; }}
int aclrtGetSysParamOpt(int option, long *value) {{ *value = 0; return 0; }}
int aclrtCtxGetSysParamOpt(int option, long *value) {{ *value = 0; return 0; }}
int aclrtSetSysParamOpt(void) {{ return 0; }}
int aclrtCtxSetSysParamOpt(void) {{ return 0; }}
int aclrtSetDeviceSatMode(void) {{ return 0; }}
int aclrtSetOpExecuteTimeOut(void) {{ return 0; }}
int aclrtSetOpWaitTimeout(void) {{ return 0; }}
int aclrtSetStreamOverflowSwitch(void) {{ return 0; }}
int aclrtGetCurrentContext(void **made) {{ *made = mla_fusion_handle; return 0; }}
int aclrtCreateStream(void **made) {{ *made = mla_fusion_handle; return 0; }}
int aclrtCreateStreamWithConfig(void **made) {{ *made = mla_fusion_handle; return 0; }}
int aclrtCreateEventExWithFlag(void **made) {{ *made = mla_fusion_handle; return 0; }}
int aclInit(const char *path) {{ return 0; }}
int aclFinalize(void) {{ return 0; }}
struct cann_version {{
  char version[128], major[64], minor[64], release[64], patch[64], reserved[256];
}};
int aclsysGetCANNVersion(int package, struct cann_version *out) {{
  memset(out, 0, sizeof *out);
  strcpy(out->version, "{CANN_VERSION}");
  sscanf(out->version, "%[^.].%[^.].%s", out->major, out->minor, out->release);
  return 0;
}}
"""

COMPILERS = ("cc", "gcc", "clang")


def source(missing: Missing, bodies: str) -> str:
    """Returns the C text that defines every missing symbol, and the functions with a body."""
    lines = [
        "#include <stdio.h>",
        "#include <string.h>",
        "static char mla_fusion_handle[64];",
        "long mla_fusion_inert(void) { return 0; }",
        f"long mla_fusion_no_driver(void) {{ return {_NO_DRIVER}; }}",
        bodies,
    ]
    defined = re.findall(r"(\w+)\(.*\) {", bodies)
    for name in missing.functions:
        if name not in defined:
            target = "mla_fusion_no_driver" if name.startswith(_FAILING) else "mla_fusion_inert"
            lines.append(f'long {name}(void) __attribute__((alias("{target}")));')
    lines += [_object(name) for name in missing.objects]
    lines += [f"__thread char {name}[4096];" for name in missing.thread_locals]
    return "\n".join(lines) + "\n"


def _object(name: str) -> str:
    """Returns the definition of data of unknown size: zeros, or pointers that C++ may follow."""
    if name.startswith("_ZTV"):
        slots = ", ".join(["(void *)mla_fusion_inert"] * 62)
        return f"void *{name}[64] = {{0, 0, {slots}}};"
    if name.startswith("_ZTI"):
        base = "_ZTVN10__cxxabiv117__class_type_infoE"
        return (
            f"extern void *{base}[] __attribute__((weak)); void *{name}[8] = {{&{base}[2], "
            f'"{name[4:]}"}};'
        )
    return f"char {name}[4096] __attribute__((aligned(64)));"


def cache_root() -> Path:
    """Returns the directory that has the stand-ins."""
    if folder := os.environ.get("MLA_FUSION_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mla_fusion")


def standins(wheel: Wheel) -> Path:
    """Returns the directory with the stand-ins for this wheel. Builds them the first time."""
    home = cache_root() / "standins" / f"{wheel.version}-{fingerprint(wheel)}-{_recipe()}"
    if not home.is_dir():
        _publish(find_missing(wheel), home)
    return home


def _recipe() -> str:
    """Returns a digest of this file: another generator makes other stand-ins."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]


def find_compiler() -> str | None:
    """Returns the path of a C compiler, or None."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _publish(missing: Missing, home: Path) -> None:
    """Builds the stand-ins in a directory of its own, and renames that to ``home``."""
    compiler = find_compiler()
    if compiler is None:
        raise OfflineError(
            "the offline runtime builds stand-ins for the CANN libraries and found no C compiler "
            f"({', '.join(COMPILERS)}). Install one, such as with: apt install gcc libc6-dev"
        )
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=home.parent))
    except OSError as error:
        raise OfflineError(
            f"the cache directory {home.parent} cannot be written ({error}); "
            "set MLA_FUSION_CACHE to a directory that can"
        ) from error
    try:
        build(missing, scratch, compiler)
        scratch.rename(home)
    except OSError:
        # another process has published the same stand-ins first
        if not home.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def build(
    missing: Missing,
    directory: Path,
    compiler: str,
    bodies: str = _BODIES,
    symbols: str = SYMBOLS,
) -> None:
    """Compiles the library ``symbols`` and an empty library per missing name into ``directory``."""
    text = directory / "standins.c"
    text.write_text(source(missing, bodies))
    empty = directory / "empty.c"
    empty.write_text("/* only the name of this library is needed */\n")
    _compile(compiler, text, directory / symbols)
    for name in missing.libraries:
        # torch_npu also looks up symbols in a library by name, hence the dependency
        _compile(compiler, empty, directory / name, directory / symbols)


def _compile(compiler: str, text: Path, library: Path, *depends: Path) -> None:
    """Compiles a shared library that is linked to others. Raises OfflineError if that fails."""
    options = "-shared -fPIC -O1 -w -Wl,-rpath,$ORIGIN -Wl,--no-as-needed".split()
    files = map(str, (library, text, *depends))
    command = [compiler, *options, f"-Wl,-soname,{library.name}", "-o", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OfflineError(
            f"building the stand-in {library.name} failed: "
            f"{' '.join(command)}\n{done.stderr.strip()}"
        )
