"""Mutated dumps, and a process that reads them under watch. ``benchmarks/fuzz_dumps.py`` runs as
many as wanted.

A mutation keeps enough of a dump that readers get far: names, literals, annotations and whole lines
are replaced or nested, beside truncation and damage of single bytes.
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.dumps import costly

FIXTURES = Path(__file__).parent / "fixtures"
SECONDS = 10  # of processor, for one reader
WAIT = 120  # for all readers of one file, beside whatever else the machine does
MEMORY = 12 << 30  # bytes of addresses; torch alone takes several GiB

_NAMES = """
torch.os.system torch.builtins.exec torch.builtins.eval torch.ops.load_library torch.hub.load
torch.load torch.save torch.utils.cpp_extension.load_inline torch.jit.load
torch.classes.load_library torch.sys.exit torch.ops.aten.save.default
torch.ops.aten.from_file.default torch.ops.aten.__class__ torch.ops.aten.mm.__init__ torch._inductor
torch.distributed.rpc torch.ops.import_module torch.ops.higher_order.cond
torch.ops.prim.Print.default torch.ops.aten.bernoulli.p torch.sym_max torch.ops.aten.unbind.int
torch.ops.aten.split.Tensor torch.ops.aten.nonzero.default torch.ops.aten.item.default
torch.ops.aten.resize_.default torch.ops.aten.set_.source_Tensor torch.ops.aten.einsum.default
torch.ops.aten.mm torch.ops.aten.repeat.default torch.ops.aten.zeros.default
torch.ops.aten.arange.default torch.float32 torch.float8_e4m3fn torch.ops.npu.npu_rms_norm.default
torch.ops.npu.npu_rotary_mul.default torch.ops.c10d.barrier.default os.system self.forward
self.__class__.forward self.__dict__ device slice tensor Sym getattr eval __import__ RmsNorm
TensorMove SplitV ConcatV2 Pack Unpack Gather Const Reshape Range Fill Assign Transpose MatMul
MlaPrologV3 NetOutput Data Identity BroadcastTo
""".split()
_PLAIN = """
0 1 -1 2 3 64 1000000000 1000000000000 9223372036854775807 9223372036854775808 -9223372036854775808
1e308 1e-06 nan inf -inf 0.5 True None 10**1000000000 2**10**9 (1).__class__ 1j [1] [] () ''
'x'*9999999999 {1:2} {[1]:2} ...
""".split()
_NUMBERS = [*_PLAIN, "9" * 5000, "-" * 300 + "1"]
_SIZES = [
    "s0", "s0*s1", "Max(1, s0)", "s0**400", "9**9**9", "(s0+s1+s2+s3)**8", "u0", "FloorDiv(s0, 0)",
    "s0 % 0", "²", "-1",
]  # fmt: skip
_LETTERS = ("\x00", "²", "é", "\u2028", "\U0001f40d", "\t", "\r")
_LINES = [
    'x = torch.os.system("echo RAN")', 'torch.os.system("echo RAN")', "import os",
    "exec('print(1)')",
    "x = torch.ops.aten.zeros.default([1000000000000])", "# File: " + "a:1 in " * 3000,
    "x = 10 ** 10 ** 10",
    "op {", "}", 'input: "b:0"', "attr {", "node {", "x = ge.Const([[[1]]], dtype=3)",
    "raise SystemExit", "a" * 5000,
    "x" + " " * 5000 + "y", "return (x,)", 'dim: 1000000000000', 'dim: -1',
    'i: 99999999999999999999999999',
]  # fmt: skip
_WORD = re.compile(rb"[A-Za-z_][\w.]*")
_NUMBER = re.compile(rb"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.])")
_SHAPE = re.compile(rb"\[([\d, s+*]*)\]")
_STRING = re.compile(rb"\"[^\"\n]*\"|'[^'\n]*'")


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The dump with one to four mutations."""
    for _ in range(draw.choice((1, 1, 1, 2, 3, 4))):
        mutate = costly.mutated if draw.random() < 0.03 else draw.choice(_MUTATIONS)
        content = mutate(content, draw)
    return content


def _replaced(
    content: bytes, pattern: re.Pattern[bytes], by: Iterable[str], draw: random.Random
) -> bytes:
    places = list(pattern.finditer(content))
    if not places:
        return content
    place, other = draw.choice(places), draw.choice(places)
    text = other[0] if draw.random() < 0.3 else draw.choice(list(by)).encode()
    if draw.random() < 0.1:  # everywhere
        return content.replace(place[0], text)
    return content[: place.start()] + text + content[place.end() :]


def _nested(content: bytes, draw: random.Random) -> bytes:
    places = list(_NUMBER.finditer(content)) or list(_WORD.finditer(content))
    if not places:
        return content
    place, depth = draw.choice(places), draw.choice((1, 2, 50, 150, 300, 3000))
    opens, closes = draw.choice(
        ((b"[", b"]"), (b"(", b")"), (b"-", b""), (b"{", b"}"), (b"a(", b")"), (b"x.", b""))
    )
    return (
        content[: place.start()]
        + opens * depth
        + place[0]
        + closes * depth
        + content[place.end() :]
    )


def _of_lines(content: bytes, draw: random.Random) -> bytes:
    lines = content.split(b"\n")
    place, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
    kind = draw.randrange(5)
    if kind == 0:
        lines.insert(place, indent + draw.choice(_LINES).encode())
    elif kind == 1:
        del lines[place]
    elif kind == 2:
        lines[place:place] = [lines[other]] * draw.choice((1, 2, 100))
    elif kind == 3:
        lines[place], lines[other] = lines[other], lines[place]
    else:
        del lines[min(place, other) : min(place, other) + draw.randrange(20)]
    return b"\n".join(lines)


def _damaged(content: bytes, draw: random.Random) -> bytes:
    if not content:
        return content
    changed, place = bytearray(content), draw.randrange(len(content))
    kind = draw.randrange(5)
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content[:place] + draw.randbytes(draw.choice((1, 8, 400))) + content[place:]
    if kind == 2:
        return content[:place] + draw.choice(_LETTERS).encode() + content[place:]
    for _ in range(draw.choice((1, 3))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


_MUTATIONS = (
    lambda content, draw: _replaced(content, _WORD, _NAMES, draw),
    lambda content, draw: _replaced(content, _NUMBER, _NUMBERS, draw),
    lambda content, draw: _replaced(content, _NUMBER, _SIZES, draw),
    lambda content, draw: _replaced(
        content, _SHAPE, [f"[{one}, 4]" for one in (*_NUMBERS[:9], *_SIZES)], draw
    ),
    lambda content, draw: _replaced(
        content, _STRING, [f'"{one}"' for one in (*_SIZES, *_NAMES, "bf16[2]", "")], draw
    ),
    _nested,
    _of_lines,
    _damaged,
)


def cases(
    contents: dict[str, bytes], seed: int, numbers: Iterable[int]
) -> Iterator[tuple[int, str, bytes]]:
    """(number, name, content): the same for the same seed and number, whatever else is drawn."""
    names = sorted(contents, key=lambda name: (len(contents[name]), name))
    small = [name for name in names if len(contents[name]) < 30_000] or names
    for number in numbers:
        draw = random.Random(f"{seed} {number}")
        name = draw.choice(names if number % 20 == 0 else small)
        yield number, name, mutated(contents[name], draw)


def fixtures() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(FIXTURES.iterdir())}


# -- the process that reads


@dataclass(frozen=True)
class Outcome:
    """Of one file. seconds: of the slowest reader; said: by reader, "read", "refused: .." or
    "failed: <error and last frames>"; bad: what ran."""

    file: str
    seconds: float
    said: dict[str, str]
    bad: list[str]

    @property
    def harmless(self) -> bool:
        failed = any(said.startswith("failed") for said in self.said.values())
        return not self.bad and self.seconds < SECONDS and not failed


class Worker:
    """Reads files in a process of its own, which an audit hook watches; a file that hangs ends the
    process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[str] | None = None

    def outcomes(self, files: Iterable[Path]) -> list[Outcome]:
        """By every reader."""
        try:
            return [self.outcome(file) for file in files]
        finally:
            self.close()

    def outcome(self, file: Path, number: int = 0) -> Outcome:
        """``number``: of the case; the slow readers get a share of them, and all of 0."""
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{number} {file}\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], WAIT)
        line = process.stdout.readline() if ready else ""
        if line:
            return Outcome(str(file), **json.loads(line))
        self.close()
        return Outcome(
            str(file),
            float(WAIT),
            {"process": "failed: it ended" if ready else "failed: it hangs"},
            [],
        )

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _READER, str(FIXTURES), str(MEMORY)]
        root = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True,
            cwd=self.folder, env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        return self._process


_READER = r"""
import json, logging, os, resource, sys, tempfile, time, traceback
out = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a dump made print would not pass for an answer
import mla_fusion as mf  # before torch, where torch_npu is installed without CANN
import torch
from mla_fusion.tools.dumps import rebuild_fx, rebuild_ge
from mla_fusion.inspect import DumpError, NotRebuilt, diff, read, summarise

torch.set_num_threads(1)
fixtures = sys.argv[1]
def rebuilder(dump):
    return (rebuild_fx if dump.is_fx else rebuild_ge).Rebuilder(dump)
READERS = {
    "rebuild": lambda dump: rebuilder(dump).graph_module(),
    "diff": lambda dump: diff(dump, WHOLE[dump.is_fx]).to_json(),
    "inspect": lambda dump: str(summarise(dump)),  # explains it too, without verification
    "explain": lambda dump: mf.explain(dump.path),
}
# the pass takes most of the time: one dump in so many
SHARES = {"inspect": 3, "explain": 15}
WHOLE = {True: read(f"{fixtures}/fx_before.txt"), False: read(f"{fixtures}/fused.txt")}
for name in sorted(os.listdir(fixtures)):  # what is imported on first use
    for call in READERS.values():
        call(read(f"{fixtures}/{name}"))
import torch._inductor.sizevars  # by torch itself, to tell its own frames in a guard
tempfile.gettempdir()  # tries a file
bad, logged = [], []


class Kept(logging.Handler):
    def emit(self, record):
        raised = record.exc_info and traceback.format_exception(*record.exc_info)[-3:]
        logged.append(raised or record.getMessage())


logging.getLogger("mla_fusion").addHandler(Kept())
logging.getLogger("mla_fusion").propagate = False


def watch(event, args):
    if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork",
                 "ctypes.dlopen",
                 "socket.connect", "pickle.find_class", "os.remove", "os.mkdir", "os.rename"):
        bad.append(f"{event} {args[:1]}")
    elif event == "import" and not within(LIBRARIES):
        bad.append(f"import {args[0]}")
    elif event == "open" and isinstance(args[1], str) and set("wax+") & set(args[1]):
        bad.append(f"open {args[:2]}")
    elif event == "exec" and args[0].co_filename == "<string>" and called_by(("mla_fusion",)):
        bad.append("exec")
    elif event == "compile" and args[1] == "<string>" and called_by(("mla_fusion",)):
        bad.append(f"compile {args[0][:80]}")


def within(packages):
    # Is a library at work, which loads what it needs?
    frame = sys._getframe(2)
    while frame is not None and not any(
        f"/{name}/" in frame.f_code.co_filename for name in packages
    ):
        frame = frame.f_back
    return frame is not None


def called_by(packages):
    # Is the nearest frame that is none of Python's own in one of these?
    frame = sys._getframe(2)
    while frame is not None and ("importlib" in frame.f_code.co_filename
                                 or "lib/python" in frame.f_code.co_filename
                                 and "site-packages" not in frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and any(f"/{name}/" in frame.f_code.co_filename for name in packages)


LIBRARIES = ("site-packages/torch", "site-packages/sympy", "site-packages/torch_npu")
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
sys.addaudithook(watch)
print("ready", file=out, flush=True)
for line in sys.stdin:
    number, _, path = line.rstrip("\n").partition(" ")
    said, seconds = {}, 0.0
    bad.clear(), logged.clear()
    dump = None
    for name, call in {"read": read, **READERS}.items():
        if (dump is None) != (name == "read") or int(number) % SHARES.get(name, 1):
            continue
        started = time.process_time()  # whatever else the machine does
        try:
            found = call(path if name == "read" else dump)
            dump = found if name == "read" else dump
            said[name] = "read"
        except Exception as error:
            # which explain words
            expected = isinstance(error, (DumpError, NotRebuilt)) or name == "rebuild"
            last = traceback.extract_tb(error.__traceback__)[-4:]
            frames = [f"{f.filename[-40:]}:{f.lineno}" for f in last]
            failed = f"failed: {error!r} {frames}"[:600]
            said[name] = f"refused: {error}"[:200] if expected else failed
        if logged:
            said[name] = f"failed: logged {logged}"[:900]
        logged.clear()
        seconds = max(seconds, time.process_time() - started)
    print(json.dumps({"seconds": seconds, "said": said, "bad": bad[:5]}), file=out, flush=True)
"""
