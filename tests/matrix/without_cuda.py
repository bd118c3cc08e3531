"""Let a CUDA build of torch be imported without CUDA, and beside torch_npu: ``without_cuda.py
SITE_PACKAGES``.

The package index serves many releases of torch for x86-64 as CUDA builds only. Such a build asks
the loader for CUDA's libraries (3 GB of wheels), and that of torch 2.10 ends the process beside
torch_npu: both register a setting of the pinned-memory allocator under one name. Whoever uses
torch_npu has the CPU build.

So torch's own CUDA libraries are taken away, and inert libraries (every function returns zero)
stand for these and for all that they asked for, made as the offline runtime makes those of CANN;
torch then says that it has no CUDA. What this leaves out: the CPU build is compiled from the same
sources by itself, and has no ``+cu..`` in its version. All operators on CPU, dynamo, AOT autograd
and the dispatcher are those of the wheel. The product never does this: it is for the matrix alone.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from mla_fusion.compile.offline import standins
from mla_fusion.compile.offline.symbols import Wheel, find_missing

SYMBOLS = "libinert_cuda.so"  # the loader takes two libraries of one name for one
CUDA = re.compile(r"cuda|nvrtc|nvshmem")

# Called while torch is loaded, with results that are used: what one refers to is written, and what
# the other makes, an object of C++, is asked for its type (any that no binding knows).
_INERT = ", ".join(["(void *)mla_fusion_inert"] * 30)
BODIES = f"""
void *_ZN4c10d15get_gil_checkerEv(void) {{ static void *place[8]; return place; }}
extern void *_ZTIi[] __attribute__((weak));
static void *options[32] = {{0, _ZTIi, {_INERT}}};
void _ZN4c10d16ProcessGroupNCCL7OptionsC1Eb(void **made) {{ made[0] = options + 2; }}
"""

# torch looks for kernels where it was built for CUDA, of which there are none.
ANSWERS = {
    "version.py": (r"^cuda(: .*)? = .*", "cuda = None"),
    "backends/cuda/__init__.py": (r"return torch\._C\._has_cuda", "return False"),
}


def take_cuda_away(site_packages: Path) -> tuple[str, ...]:
    """Replace the CUDA libraries of the torch here; the names of those that stand there now."""
    home = site_packages / "torch" / "lib"
    if not (home / "libtorch_cuda.so").exists() or (home / SYMBOLS).exists():
        return ()
    for library in home.glob("*.so*"):
        if CUDA.search(library.name):
            library.unlink()
    kept = (*home.glob("*.so*"), *home.parent.glob("_C.*.so"))
    missing = find_missing(Wheel("torch", home.parent, tuple(sorted(kept))))
    compiler = next(found for found in map(shutil.which, standins.COMPILERS) if found)
    standins.build(missing, home, compiler, BODIES, SYMBOLS)
    for name, (said, now) in ANSWERS.items():
        text = (home.parent / name).read_text()
        (home.parent / name).write_text(re.sub(said, now, text, flags=re.MULTILINE))
    return missing.libraries


if __name__ == "__main__":
    for name in take_cuda_away(Path(sys.argv[1])):
        print(f"inert: {name}")
