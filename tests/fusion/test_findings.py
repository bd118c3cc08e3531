"""What the generator once found: spellings that did not fuse, and mutants that were misread, each
by its choices.

A choice that is not named is the first of its axis. Mutants are judged with verification off, so
that the facts alone must tell them apart.
"""

from __future__ import annotations

import pytest

from tests.exhaustive import one_in

from .generator.graphs import capture
from .generator.judge import Verdict, judge
from .generator.prologue import Choices
from .generator.spellings import AXES

SPELLINGS: dict[str, Choices] = {
    "halves stacked before pairs": {
        "q_rotation": "stack_before_pairs",
        "k_rotation": "stack_before_pairs",
    },
    "halves flipped": {"q_rotation": "turned_by_flip", "k_rotation": "turned_by_flip"},
    "halves written into zeros": {
        "q_rotation": "halves_into_empty",
        "k_rotation": "halves_into_empty",
    },
    "pairs written into zeros": {
        "q_rotation": "strided_assignment",
        "k_rotation": "strided_assignment",
    },
    "complex product in halves": {
        "q_rotation": "real_and_imaginary",
        "k_rotation": "real_and_imaginary",
    },
    "real parts of a complex table": {
        "q_rotation": "even_odd",
        "k_rotation": "even_odd",
        "tables": "complex_given",
    },
    "one token: too few samples of a table": {"tokens": "one"},
    "one row of a table: too few samples": {
        "tokens": "three_by_one",
        "tables": "shared_by_sequences",
    },
    "beta is 0": {"q_product": "addmm_without_bias"},
    "zeros lent by c_q": {"up_product": "addmm_of_zeros", "query_scale": "before"},
    "tables lifted before they are joined": {
        "tables": "given_half",
        "q_arrangement": "heads_first",
    },
    "complex tables made for each side": {
        "q_rotation": "complex_product",
        "k_rotation": "complex_product",
        "k_arrangement": "heads_first",
    },
    "x permuted by einsum": {
        "tokens": "two_by_three",
        "q_product": "einsum_weight_first",
        "tables": "shared_by_sequences",
    },
    "x cast and permuted by einsum": {
        "tokens": "two_by_three",
        "x": "from_wide",
        "q_product": "einsum",
        "kv_product": "einsum",
        "tables": "shared_by_sequences",
    },
}

MUTANTS: dict[str, Choices] = {
    "heads in reverse": {"up": "nope_heads_reversed"},
    "heads of W_uk in reverse": {"absorb": "weight_heads_reversed"},
    "one projection reads half of x": {"down": "two", "kv_product": "sum_over_part"},
    "half of c_q is projected up": {"up_product": "sum_over_part"},
    "columns in halves, each of another half of c_q": {"up_product": "halves_of_halves"},
    "slots plus a negative number": {"write": "slots_plus_minus_one"},
    "slots times a negative number": {"write": "slots_before_zero_by_product"},
    "mean over half of one token": {"tokens": "one", "k_norm": "mean_over_half"},
    "mean without one column of one token": {"tokens": "one", "q_norm": "mean_without_last_column"},
    "a factor that is a tensor": {"up": "scaled_by_a_number"},
    "a factor of the latent that is a tensor": {"up": "latent_scaled_by_a_number"},
}


def _choices(given: Choices) -> Choices:
    return {**{axis: options[0] for axis, options in AXES.items()}, "heads": "2", **given}


@pytest.mark.parametrize("name", one_in(2, SPELLINGS))
def test_spelling_fuses(name: str) -> None:
    judgement = judge(capture(_choices(SPELLINGS[name])), verify="all")
    assert judgement.verdict is Verdict.FUSED, judgement.detail


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_not_misread(name: str) -> None:
    judgement = judge(capture(_choices(MUTANTS[name])), verify="off")
    assert judgement.verdict in (Verdict.FUSED, Verdict.DECLINED), judgement.detail
