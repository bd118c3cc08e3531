"""Certificates that would be accepted by a chance far above that which is said, or of another call:
the checker refuses them.
"""

from __future__ import annotations

from typing import Any

import pytest

from mla_fusion.prove import check

from .test_check import changed, outcomes, refusal


def behind(certificate: dict[str, Any], first: list[Any]) -> None:
    """Puts values before all others."""
    count = len(first)
    values = [
        [op, [at + count for at in operands], *rest]
        for op, operands, *rest in certificate["values"]
    ]
    certificate["values"] = first + values
    certificate["arguments"] = {
        name: place + count for name, place in certificate["arguments"].items()
    }
    for claim in certificate["claims"]:
        claim |= {side: claim[side] + count for side in ("value", "is")}


def test_an_attribute_is_not_proved_by_a_number_that_the_kernel_does_not_read() -> None:
    report, certificate = changed()
    report["fused"][0]["attributes"]["new_mode"] = 7
    assert "new_mode is another" in refusal(report)
    certificate["exact"]["new_mode"] = ["number", "7"]
    assert "takes no new_mode" in refusal(report)


def test_another_weight_is_refused_after_a_quotient_by_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a point that is given up, one weight has been numbered and the other has not."""
    report, certificate = changed()
    weight = certificate["arguments"]["weight_dq"]
    _, (source,), *move = certificate["values"][weight]
    other = ["weight", [], certificate["values"][source][2], "another"]
    behind(certificate, [other, ["move", [0], *move], ["leaf", [], [1], "y"], ["inverse", [2]]])
    assert isinstance(outcomes(report)[0], check.Accepted), "as long as nothing reads it"
    reads = [entry for entry in certificate["values"] if weight + 4 in entry[1]]
    assert [op for op, *_ in reads] == ["matmul"]
    reads[0][1][1] = 1
    assert "is not what the kernel gives" in refusal(report)

    inverse, drawn = check.Num.inverse, list[check.Num]()

    def by_chance(number: check.Num) -> check.Num:
        drawn.append(number)
        return inverse(number if len(drawn) > 1 else number * 0)

    monkeypatch.setattr(check.Num, "inverse", by_chance)
    assert "is not what the kernel gives" in refusal(report)


def test_an_argument_of_so_high_a_degree_that_it_vanishes_at_many_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``y`` to the ``p - 1`` is 1 where p is the prime of the point."""
    report, certificate = changed()
    degree = (1 << 31) - 2  # and one more is prime
    monkeypatch.setattr(check.Random, "getrandbits", lambda *_: degree >> 2 & (1 << 28) - 1)
    first: list[list[Any]] = [["leaf", [], [1], "y"]]
    for bit in f"{degree:b}"[1:]:
        first.append(["mul", [len(first) - 1, len(first) - 1]])
        first += [["mul", [len(first) - 1, 0]]] * (bit == "1")
    first += [["number", [], "-1", None], ["add", [len(first) - 1, len(first)]]]
    zero = len(first) - 1
    behind(certificate, first)
    raise_argument(certificate, "rope_cos", zero)
    assert "too high a degree" in refusal(report)


def raise_argument(certificate: dict[str, Any], name: str, by: int) -> None:
    """Adds a value to an argument, which the model's values do not read."""
    place = certificate["arguments"][name] + 1
    values = certificate["values"]
    certificate["values"] = [
        *values[:place],
        ["add", [place - 1, by]],
        *(
            [op, [at + (at >= place) for at in operands], *rest]
            for op, operands, *rest in values[place:]
        ),
    ]
    arguments = certificate["arguments"]
    certificate["arguments"] = {k: at + (at >= place) for k, at in arguments.items()} | {
        name: place
    }
    for claim in certificate["claims"]:
        claim |= {side: claim[side] + (claim[side] >= place) for side in ("value", "is")}
