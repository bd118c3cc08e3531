"""Certificates that claim less than the fusion does, or more than was proved: the checker refuses
them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest

from .test_check import changed, refusal


def claim(certificate: dict[str, Any], output: str, how: Callable[[int], Any]) -> None:
    """Claims what ``how`` makes of the value, and of the kernel's result, instead of these."""
    (known,) = (one for one in certificate["claims"] if one["output"] == output)
    for side in ("value", "is"):
        certificate["values"].append(how(known[side]))
        known[side] = len(certificate["values"]) - 1


@pytest.mark.parametrize("by", [["number", [], "2", None], ["leaf", [], [1, 1, 1], "y"]])
def test_a_number_for_each_token_of_which_nothing_is_said(by: list[Any]) -> None:
    report, certificate = changed()
    place = len(certificate["values"])
    shape = [1, 1, 1]
    certificate["values"] += [by, ["move", [place], shape, 0, shape, shape]]
    claim(certificate, "query", lambda value: ["mul", [value, place + 1]])
    assert "computed from a result" in refusal(report)


def test_an_element_that_is_claimed_twice() -> None:
    """One of thousands, in the place of another."""
    report, certificate = changed()
    shape = [8, 2, 512]
    places = [*range(prod(shape) - 1), 0]
    claim(certificate, "query", lambda value: ["move", [value], shape, 0, [prod(shape)], [places]])
    assert "claimed in part" in refusal(report)


def test_a_head_of_the_models_that_is_said_to_stand_behind_them() -> None:
    report, certificate = changed()
    report["fused"][0]["dims"] |= {"N": 1, "N_padded": 2}
    for output, width in (("query", 512), ("query_rope", 64)):
        how = [8, 1, width], 0, [8, width], [2 * width, 1]
        claim(certificate, output, lambda value, how=how: ["move", [value], *how])  # type: ignore[misc]
    assert "heads beyond N" in refusal(report)
