"""The calls of ``calls.txt``: what names in them are, and the operators of npu in plain torch."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Line:
    """
    may_be_opaque  the reading need not be known, but where it is, it is right
    """

    call: str
    wanted: str
    may_be_opaque: bool

    @property
    def operator(self) -> str:
        return self.call.partition("(")[0]

    @property
    def is_static(self) -> bool:
        """Rows of 576 elements are for few tokens; torch guards on the size in take_along_dim."""
        is_wide = "kv" in self.wanted
        return is_wide or self.may_be_opaque or self.call.startswith("take_along_dim")


def lines_of(text: str) -> list[Line]:
    found = []
    for line in text.split("\n\n", 1)[1].strip().splitlines():
        call, _, wanted = line.removeprefix("? ").partition("=>")
        found.append(Line(call.strip(), (wanted or call).strip(), line.startswith("? ")))
    return found


LINES = lines_of(Path(__file__).with_name("calls.txt").read_text())


FP8 = torch.float8_e4m3fn

# -- sizes and tensors. A shape is a string of sizes; a digit is itself.

ACTIVATIONS = {"x": "TN", "y": "TN", "h": "THD", "z": "T2N", "v": "TV", "kv": "T11W"}
DERIVED = {
    "c": "view_as_complex.default(view.default(x, [T, C, 2]))",
    "c2": "view_as_complex.default(view.default(y, [T, C, 2]))",
    "h4": "unsqueeze.default(h, 2)",
    "x3": "unsqueeze.default(x, 1)",
    "y3": "unsqueeze.default(y, 1)",
    "abs_x": "add.Tensor(abs.default(x), 0.01)",
}
FLOATS = """
p TN; p2 HTK; k TC; a T2D; tab RD; cache RN; cache4 1RHD; blocks PQN; cache5 PQ1N; cache6 PQ1N
cos4 T11D; sin4 T11D; cos8 T11E; sin8 T11E; k_cache PQ1E; c_cache PQ1L; lim T1
"""
MODEL = "g N; b K; w KN; m NK; m2 NK; m3 3N; u HDK; d DD; p1 N; s D; lim1 1; gamma L; s8 L"
ABOVE_ZERO = ("lim", "lim1", "s8")


def shapes_of(text: str) -> dict[str, str]:
    return dict(one.split() for one in re.split("[;\n]", text.strip()))


def sizes_of(seed: int, tokens: int | None) -> dict[str, int]:
    rng = random.Random(seed)
    tokens = tokens or rng.choice((3, 5))
    heads, width = rng.choice((2, 3)), rng.choice((4, 6))
    sizes = {"T": tokens, "H": heads, "D": width, "N": heads * width, "C": heads * width // 2}
    sizes |= {"K": rng.choice((5, 7)), "Q": 4, "P": tokens // 4 + 32, "V": 128}
    return sizes | {"R": tokens + 125, "W": 576, "L": 512, "E": 64}


def shape_of(text: str, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(int(one) if one.isdigit() else sizes[one] for one in text)


@dataclass(frozen=True)
class Tensors:
    """
    given   by name, in float64
    shapes  as strings of sizes
    model   the names of parameters
    """

    given: dict[str, Tensor]
    shapes: dict[str, str]
    model: set[str]


def tensors_of(seed: int, sizes: dict[str, int]) -> Tensors:
    random_numbers = torch.Generator().manual_seed(seed)
    shapes, model = shapes_of(FLOATS), shapes_of(MODEL)
    shapes |= {f"{name}_in": "TK" for name in ACTIVATIONS}
    model |= {f"{name}_weight": "K" + shape[1:] for name, shape in ACTIVATIONS.items()}
    given = {}
    for name, shape in (shapes | model).items():
        size = shape_of(shape, sizes)
        given[name] = torch.randn(size, generator=random_numbers, dtype=torch.float64)
        if name in ABOVE_ZERO:
            given[name] = given[name].abs() + 0.1

    def whole(least: int, most: int, shape: str) -> Tensor:
        return torch.randint(least, most, shape_of(shape, sizes), generator=random_numbers)

    shapes |= dict.fromkeys("i i2 small slots block place".split(), "T")
    shapes |= {"z2": "2T", "mask": "TN", "mask2": "TN", "i8": "TK"}
    given |= {"i": whole(0, sizes["R"], "T"), "i2": whole(1, 9, "T"), "small": whole(0, 2, "T")}
    given |= {"z2": whole(0, sizes["R"], "2T"), "i8": whole(-128, 128, "TK").to(torch.int8)}
    given |= {"mask": whole(0, 2, "TN") == 1, "mask2": whole(0, 2, "TN") == 1}
    given["m8"] = whole(-128, 128, "KN").to(torch.int8)
    given["f8"] = torch.randn(shape_of("TE", sizes), generator=random_numbers).to(FP8)
    given["w8"] = torch.randn(shape_of("EN", sizes), generator=random_numbers).to(FP8)
    given["e8t"] = whole(-3, 3, "T12").float().exp2().to(torch.float8_e8m0fnu)
    given["e8n"] = whole(-3, 3, "1N2").float().exp2().to(torch.float8_e8m0fnu)
    shapes |= {"f8": "TE", "e8t": "T12", "i32": "TN"}
    model |= {"w8": "EN", "e8n": "1N2", "m8": "KN", "b32": "N"}
    given["i32"] = whole(-999, 999, "TN").to(torch.int32)
    given["b32"] = whole(-999, 999, "N").to(torch.int32)
    slots = torch.randperm(sizes["R"], generator=random_numbers)[: sizes["T"]]
    given |= {"slots": slots, "block": slots // sizes["Q"], "place": slots % sizes["Q"]}
    return Tensors(given, shapes | model, set(model))


# -- what the operators of npu are


def normed(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    return x * step(x, epsilon) * gamma


def step(x: Tensor, epsilon: float) -> Tensor:
    return (x.square().mean(-1, True) + epsilon).rsqrt()


def centred(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normed rows of a layer norm, their mean, and what they were multiplied by."""
    mean = x.mean(-1, True)
    scale = step(x - mean, epsilon)
    return (x - mean) * scale, mean, scale


def paired(x: Tensor) -> Tensor:
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def put(cache: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    flat = cache.flatten(0, 1).index_copy(0, slots, rows.to(cache.dtype).view(-1, *cache.shape[2:]))
    return flat.view(cache.shape)


def int8(x: Tensor) -> Tensor:
    return x.round().clamp(-128, 127).to(torch.int8)


def fp8(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(FP8)


def rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, True) / 127
    return int8(x / scale), scale.squeeze(-1)


def rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, True) / 448
    return fp8(x / scale), scale.squeeze(-1)


def tiles_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    values, scale = rows_int8(x.unflatten(-1, (-1, 128)))
    return values.flatten(-2), scale


def tiles_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    values, scale = rows_fp8(x.unflatten(-1, (-1, 128)))
    return values.flatten(-2), scale


def spread(scale: Tensor) -> Tensor:
    """Of e8m0 [rows, k / 64, 2], one for each element."""
    return scale.double().flatten(1).repeat_interleave(32, 1)


def step_of(x: Tensor) -> Tensor:
    return x.abs().amax(-1, True) / 127


def blocks_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.unflatten(-1, (-1, 32))
    scale = (blocks.abs().amax(-1, True).log2().floor() - 8).exp2()
    return fp8(blocks / scale).flatten(-2), scale.view(*x.shape[:-1], -1, 2)


def key_caches(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    c_cache: Tensor,
    turns: int = 0,
) -> tuple[Tensor, ...]:
    """Caches, then rows; or turned by so many."""
    latent, key = kv.split((512, 64), -1)
    rows = turned(paired(key), cos, sin), normed(latent, gamma, 1e-5)
    caches = put(k_cache, slots, rows[0]), put(c_cache, slots, rows[1])
    found = *caches, *rows
    return (*found[turns:], *found[:turns])


# -- calls


class Names(dict[str, Any]):
    """Tensors, sizes and dtypes; any other name is an operator of aten."""

    def __init__(self, sizes: dict[str, int], given: dict[str, Any], is_traced: bool) -> None:
        super().__init__(globals() | sizes | given)
        self["T"] = given["slots"].shape[0]
        self["npu"], self["prims"], self["I64"] = torch.ops.npu, torch.ops.prims, torch.int64
        self["I8"], self["I32"], self["F8"] = torch.int8, torch.int32, FP8
        self["F16"], self["F32"], self["C64"] = torch.float64, torch.float64, torch.complex128
        if is_traced:
            self["F16"], self["F32"], self["C64"] = torch.bfloat16, torch.float32, torch.complex64
        self["half"] = lambda tensor: tensor.to(self["F16"])
        self["f32"] = lambda tensor: tensor.to(self["F32"])
        self["tensor"], self["INF"] = self.tensor, float("inf")

    def __missing__(self, name: str) -> Any:
        if name in ACTIVATIONS:
            flat = self[f"{name}_in"] @ self[f"{name}_weight"].flatten(1)
            self[name] = flat.view([self[one] for one in ACTIVATIONS[name]])
        elif name in DERIVED:
            self[name] = self.run(DERIVED[name])
        elif name.isdigit():
            self[name] = int(name)
        elif hasattr(torch.ops.aten, name):
            return getattr(torch.ops.aten, name)
        else:
            raise KeyError(name)
        return self[name]

    def tensor(self, given: Any) -> Tensor:
        found = torch.tensor(given)
        return found.to(self["F32"]) if found.is_floating_point() else found

    def run(self, text: str) -> Any:
        found = eval(text, {}, self)
        return list(found) if isinstance(found, tuple) else found
