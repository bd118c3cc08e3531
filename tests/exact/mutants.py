"""Certificates with one thing changed that matters: each must be refused.

What changes nothing is left out by how a change is chosen, not by what becomes of it: the operands
of a sum or a product in the other order; a value that nothing claimed is made of; one that the
kernel is given too (both sides then read another input); what is made of a literal 0; a value for
itself in another shape; a name that only people read.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import cycle
from typing import Any

MUTATED = (  # spellings unlike each other, int8 among them
    "PagedSqrtNorm",
    "FusedQkvA",
    "Int8Attention",
    "PackedClipped",
    "MxFull",
    "StaticW8A8",
)


def mutants(report: Any, rng: random.Random, count: int) -> Iterator[tuple[str, Any]]:
    """What was changed, and the report with its first fusion's certificate, or attributes,
    changed.
    """
    kinds = [_literal, _operator, _operand, _move, _move, _claim, _argument, _attribute]
    turns = cycle(kinds)
    while count:
        changed, kind = copy.deepcopy(report), next(turns)
        what = kind(changed["fused"][0] if kind is _attribute else changed["certificates"][0], rng)
        if what:
            count -= 1
            yield what, changed


def _matters(certificate: Any) -> list[int]:
    """What claims are made of on the model's side, and what the kernel is given is not."""
    entries = certificate["values"]
    claimed = _above(entries, {claim["value"] for claim in certificate["claims"]})
    nothing = set[int]()
    for place, entry in enumerate(entries):
        if entry[0] in ("number", "integers") and (entry[2] == "0" or entry[3] == 0):
            nothing.add(place)
        if nothing.intersection(entry[1]):
            nothing.add(place)
    return sorted(claimed - _above(entries, set(certificate["arguments"].values())) - nothing)


def _above(entries: Any, used: set[int]) -> set[int]:
    for place in range(len(entries) - 1, -1, -1):
        if place in used:
            used.update(entries[place][1])
    return used


def _chosen(certificate: Any, rng: random.Random, *operations: str) -> Any:
    found = [
        place for place in _matters(certificate) if certificate["values"][place][0] in operations
    ]
    return certificate["values"][rng.choice(found)] if found else None


def _literal(certificate: Any, rng: random.Random) -> str:
    """A number, and what was written beside it: half as large again."""
    entry = _chosen(certificate, rng, "number", "root")
    if entry is None or entry[2] == "0":
        return ""
    times = Fraction(3, 2)
    was, entry[2] = entry[2], str(Fraction(entry[2]) * times)
    if entry[3] is not None:
        entry[3] *= float(times) ** (0.5 if entry[0] == "root" else 1)
    return f"{was} for {entry[2]}"


def _operator(certificate: Any, rng: random.Random) -> str:
    """Another operation of as many operands; a function of another name."""
    entry = _chosen(certificate, rng, "add", "mul", "neg", "inverse", "sqrt", "function", "matmul")
    others = {
        "add": "mul",
        "mul": "add",
        "neg": "inverse",
        "inverse": "sqrt",
        "sqrt": "neg",
        "matmul": "add",
    }
    if entry is None:
        return ""
    if entry[0] == "function":
        entry[2] += " of another"
        return f"the function {entry[2]}"
    was, entry[0] = entry[0], others[entry[0]]
    return f"{was} for {entry[0]}"


def _operand(certificate: Any, rng: random.Random) -> str:
    """Another operand: an input, or a number, that it is no other shape of."""
    entries = certificate["values"]
    entry = _chosen(certificate, rng, "add", "matmul", "function", "join")
    if entry is None:
        return ""
    place = rng.randrange(len(entry[1]))
    before = entries.index(entry)
    others = [
        at for at in range(before) if at != entry[1][place] and entries[at][0] in ("leaf", "number")
    ]
    same = entries[entry[1][place]][1] if entries[entry[1][place]][0] == "move" else []
    others = [at for at in others if at not in entry[1] and at not in same]
    if not others:
        return ""
    was, entry[1][place] = entry[1][place], rng.choice(others)
    return f"value {before} made of {entry[1][place]} for {was}"


def _move(certificate: Any, rng: random.Random) -> str:
    """Another first element, or two strides that differ in each other's place."""
    entry = _chosen(certificate, rng, "move")
    if entry is None:
        return ""
    *_, first, sizes, strides = entry
    pairs = [
        (a, b)
        for a in range(len(sizes))
        for b in range(a)
        if strides[a] != strides[b] and sizes[a] > 1 and sizes[b] > 1
    ]
    if pairs and rng.random() < 0.7:
        a, b = rng.choice(pairs)
        strides[a], strides[b] = strides[b], strides[a]
        return f"strides {strides}"
    entry[-3] = first + rng.choice((1, -1, 2))
    return f"first element {entry[-3]} for {first}"


def _claim(certificate: Any, rng: random.Random) -> str:
    """One left out, made twice, of another output, of another value, or arranged otherwise."""
    claims = certificate["claims"]
    place = rng.randrange(len(claims))
    what = rng.choice(("left out", "twice", "value", "result", "output"))
    other = claims[place - 1]
    if what == "left out":
        del claims[place]
    elif what == "twice":
        claims.append(dict(claims[place]))
    elif len(claims) == 1:
        return ""
    else:
        key = {"value": "value", "result": "is", "output": "output"}[what]
        if claims[place][key] == other[key]:
            return ""
        claims[place][key] = other[key]
    return f"a claim: {what}"


def _argument(certificate: Any, rng: random.Random) -> str:
    """Another value for an argument that is computed with."""
    arguments = certificate["arguments"]
    name = rng.choice(list(arguments))
    others = [other for other in arguments if arguments[other] != arguments[name]]
    if not others:
        return ""
    if rng.random() < 0.3:
        del arguments[name]
        return f"no {name}"
    other = rng.choice(others)
    arguments[name] = arguments[other]
    return f"{other} for {name}"


def _attribute(fusion: Any, rng: random.Random) -> str:
    """An epsilon, a scale or a mode that the report says."""
    attributes = fusion["attributes"]
    known = [name for name in attributes if name.endswith(("epsilon", "_cq", "_ckv", "scale"))]
    modes = [name for name in ("weight_quant_mode", "kv_cache_quant_mode") if name in attributes]
    if not known + modes:
        return ""
    name = rng.choice(known + modes)
    attributes[name] = attributes[name] + 1 if name in modes else attributes[name] * 1.001
    return f"{name} {attributes[name]}"
