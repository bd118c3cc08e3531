"""Proposals over the catalogue: what they claim holds in the field; with one thing changed it does
not.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from mla_fusion.exact import prove as exact
from mla_fusion.fx.normalise import normalised
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Form, Value
from mla_fusion.graph.read import Graph
from mla_fusion.propose.prologue import Proposal, proposals
from mla_fusion.propose.sites import Projections
from mla_fusion.targets import prolog
from tests.catalogue import ENTRIES, IN_PLACE, STAGED, Entry
from tests.exhaustive import one_in
from tests.harness import traced_graph

WHOLE = [
    entry
    for entry in ENTRIES.values()
    if "unabsorbed" not in entry.tags and set(entry.outcome) <= {IN_PLACE, STAGED}
]


def proposed(entry: Entry) -> tuple[Form, list[Proposal]]:
    graph = Graph(normalised(traced_graph(entry.model(), *entry.args()), boundary=True))
    found = proposals(Projections(graph))
    return graph.form, [one for one in found if isinstance(one, Proposal)]


def prove(form: Form, proposal: Proposal) -> None:
    claims = [proposal.with_definitions(form, claim) for claim in proposal.claims]
    exact.prove(proposal.activations, proposal.x.shape[0], claims)


@pytest.mark.parametrize("entry", one_in(1, WHOLE, first=1), ids=str)
def test_claims_of_every_prologue_hold(entry: Entry) -> None:
    form, found = proposed(entry)
    assert len(found) >= len(entry.outcome)
    for proposal in found[: len(entry.outcome)]:
        prove(form, proposal)
        assert not any(
            value.active
            for name, value in proposal.arguments.items()
            if isinstance(value, Value) and name not in ("token_x", "dequant_scale_x")
        )


def test_arguments_are_the_models_own() -> None:
    """Not what a substitution makes of them."""
    _, (proposal,) = proposed(ENTRIES["PagedRotateHalf"])
    a = proposal.arguments
    leaves = ("rope_cos", "rope_sin", "rmsnorm_gamma_cq", "rmsnorm_gamma_ckv", "token_x")
    assert {a[name].op for name in leaves} == {"leaf"}
    assert {a[f"weight_{name}"].op for name in ("dq", "uq_qr", "dkv_kr")} == {"permute"}
    assert a["rmsnorm_epsilon_cq"] == Fraction(1, 1_000_000)


def exchanged(form: Form, a: dict[str, Any]) -> dict[str, Any]:
    return {**a, "rope_cos": a["rope_sin"], "rope_sin": a["rope_cos"]}


def with_(name: str, change: Any) -> Any:
    return lambda form, a: {**a, name: change(form, a[name])}


def rolled(axis: int) -> Any:
    def roll(form: Form, value: Value) -> Value:
        size = value.shape[axis]
        return form.take(value, axis, [*range(1, size), 0])

    return roll


CHANGES = {
    "tables exchanged": exchanged,
    "another epsilon": with_("rmsnorm_epsilon_cq", lambda form, value: value * 10),
    "no epsilon": with_("rmsnorm_epsilon_ckv", lambda form, value: Fraction(0)),
    "columns of W_dq": with_("weight_dq", rolled(1)),
    "rows of W_dq": with_("weight_dq", rolled(0)),
    "columns of W_uq_qr": with_("weight_uq_qr", rolled(1)),
    "columns of W_dkv_kr": with_("weight_dkv_kr", rolled(1)),
    "heads of W_uk": with_("weight_uk", rolled(0)),
    "columns of W_uk": with_("weight_uk", rolled(2)),
    "gamma": with_("rmsnorm_gamma_ckv", rolled(0)),
    "the sign of sin": with_("rope_sin", lambda form, value: form.negated(value)),
    "tokens of cos": with_("rope_cos", rolled(0)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_call_with_one_thing_changed_is_no_proof(change: Any) -> None:
    form, (proposal,) = proposed(ENTRIES["PagedRotateHalf"])
    arguments = change(form, proposal.arguments)
    other = replace(proposal, arguments=arguments, definitions=prolog.prolog(form, arguments))
    prove(form, proposal)
    with pytest.raises(Departure):
        prove(form, other)
