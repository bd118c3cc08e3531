"""Lines that cost more than their length, for mutated dumps: growing expressions, long lists, many
symbols.
"""

from __future__ import annotations

import random

_COMPOSITES = """
chain_matmul cartesian_prod meshgrid block_diag cat stack einsum linalg_multi_dot broadcast_tensors
column_stack combinations hstack addmm _foreach_add tensordot
""".split()
_GROWING = (
    "aten.cat.default([{v}, zx])", "aten.cat.default([{v}, {v}], 1)", "aten.kron.default({v}, zx)",
    "aten.repeat.default({v}, [zs, zt])", "aten.repeat.default({v}, [9223372036854775807, 4])",
    "aten.constant_pad_nd.default({v}, [1, zs])", "aten.slice.Tensor({v}, 0, zt, zs, 2)",
    "aten.view.default({v}, [-1])", "aten.unsqueeze.default({v}, 0)", "aten.mm.default({v}, zx)",
    "aten.unfold.default({v}, 0, zs, zt)", "aten.mul.Tensor({v}, zx)", "aten.expand.default({v}, "
        "[zs, -1, -1])",
    "aten.lstm.input({v}, [{v}, {v}], [{v}, {v}], True, 9, 0.0, False, False, False)",
)  # fmt: skip
_ARITHMETIC = (
    "{a} * {b}", "{a} + {b}", "{a} - {b}", "{a} // {b}", "{a} % {b}", "{a} ** 3", "{a} * {a}",
    "{a} / {b}", "-{a}",
    "torch.sym_max({a}, {b})", "torch.sym_min({a}, {b})", "{a} == {b}", "{a} // 7", "{a} + 1",
)  # fmt: skip


def mutated(content: bytes, draw: random.Random) -> bytes:
    """What costs more than its length: growing expressions, long lists, many symbols."""
    lines = content.split(b"\n")
    head = next((place for place, line in enumerate(lines) if b"def forward(self" in line), None)
    count = draw.choice((5, 30, 60, 300, 1000, 2000))
    if head is None:  # a GE graph
        place = draw.randrange(len(lines))
        lines[place:place] = [lines[place]] * count
        return b"\n".join(lines)
    inputs = (
        b'def forward(self, zs: "Sym(s0)", zt: "Sym(s91)", zx: "f32[s0, s91]", zc: "f32[4, 4]", '
    )
    lines[head] = (
        lines[head]
        .replace(b"def forward(self, ", inputs)
        .replace(b"def forward(self)", inputs[:-2] + b")")
    )
    made = "\n        ".join(["", *draw.choice(_COSTS)(draw, count)])
    end = next(
        (place for place, line in enumerate(lines) if place > head and line.endswith(b":")), head
    )
    lines[end] += made.encode()
    return b"\n".join(lines)


def _arithmetic(draw: random.Random, count: int) -> list[str]:
    forms, known = draw.choices(_ARITHMETIC, k=draw.choice((1, 2, 4))), ["zs", "zt"]
    found = []
    for place in range(count):
        a, b = known[-1], draw.choice(known[-3:])
        found.append(f"za{place} = {forms[place % len(forms)].format(a=a, b=b)}")
        known.append(f"za{place}")
    return [*found, f"zv = torch.ops.aten.new_zeros.default(zc, [{known[-1]}, {known[-2]}])"]


def _long_lists(draw: random.Random, count: int) -> list[str]:
    name, item = draw.choice(_COMPOSITES), draw.choice(("zc", "zx", "zs", "4"))
    return [f"zl = torch.ops.aten.{name}.default([{(item + ', ') * count}])"]


def _many_symbols(draw: random.Random, count: int) -> list[str]:
    call = draw.choice(("neg.default(zc)", "mm.default(zc, zc)", "absent.default(zc)"))
    stated = [f'zm{place}: "f32[z{place}, 4]" = torch.ops.aten.{call}' for place in range(count)]
    more = [f"zn{place} = torch.ops.aten.mm.default(zm{place}, zc)" for place in range(count)]
    return stated + draw.choice(([], more))


def _growing(draw: random.Random, count: int) -> list[str]:
    forms, value = draw.choices(_GROWING, k=draw.choice((1, 2))), draw.choice(("zx", "zc"))
    found = []
    for place in range(count):
        found.append(f"zg{place} = torch.ops.{forms[place % len(forms)].format(v=value)}")
        value = f"zg{place}"
    return found


def _sizes(draw: random.Random, count: int) -> list[str]:
    """Annotations that nest."""
    sign, size = draw.choice(("+", "*", "//", "%", "Max", "Min")), "s0"
    for place in range(min(count, 60)):
        part = f"s{place % 9} + {place}"
        size = f"{sign}({size}, {part})" if sign.isalpha() else f"({size} {sign} ({part}))"
    return [
        f'zz{place}: "f32[{size}, s{place}]" = torch.ops.aten.neg.default(zc)'
        for place in range(min(count, 100))
    ]


_COSTS = (_arithmetic, _long_lists, _many_symbols, _growing, _sizes)
