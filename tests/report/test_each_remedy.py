"""Each rejection code walked: a model that gets it, what its remedy says is done to the model, and
that fuses.

A remedy that names several ways has an entry for each. ``None``: the remedy says that there is
none.
"""

from __future__ import annotations

import pytest

from mla_fusion.report.rejection import CODES
from tests.catalogue import int8, misses_norms, prologues
from tests.exhaustive import one_in
from tests.plan import test_refusals as of_plan
from tests.propose.test_finder import InABranch

from .walks import (
    Base,
    BeforeTheBranch,
    Dropped,
    EpsilonAsFloor,
    EpsilonBehindTheRoot,
    EpsilonUnderTheRoot,
    GammaOfOnes,
    Gated,
    JoinedAgain,
    Merged,
    NumbersOfBfloat16,
    RepeatedColumns,
    ScaledColumns,
    Shifted,
    Told,
    branched,
    changed,
    clamped_input,
    clamped_query,
    compiled,
    doubled_both,
    doubled_weight,
    dynamic,
    edited,
    entry,
    epsilon,
    exported,
    functional,
    half_precision,
    in_blocks,
    labelled,
    of,
    of_normed,
    paged_args,
    sliced,
    with_heads,
)

PAGED = of(prologues.PagedRotateHalf)
BASE = of(Base)
# code: a report that has it; what its remedy says, and the report once that is done (None: there is
# nothing to do)
WALKS: dict[str, tuple[Told, dict[str, Told | None]]] = {
    "q_lora.absent": (entry("QueryOfHidden"), {"Nothing:": None}),
    "q_lora.interrupted": (entry("LatentClamped"), {"leave c_q to the kernel": BASE}),
    "kv_latent.absent": (entry("KeyNotNormed"), {"Keep kv_a_proj, its norm, RoPE": BASE}),
    "proof.differs": (entry("AMatrixForEachSequence"), {"as the operator's document does": BASE}),
    "rope.absent": (entry("RopeMixesHeads"), {"Rotate q_pe and k_pe with tables": BASE}),
    "rope.tables_differ": (
        entry("KeyOnePositionLater"),
        {"Use one cos and one sin tensor for both": BASE},
    ),
    "rope.normed_key": (entry("NormedKey"), {"Nothing:": None}),
    "rope.heads_differ": (
        entry("OneRotatedHead"),
        {"repeat the columns of its weight": of(RepeatedColumns)},
    ),
    "absorb.absent": (
        entry("Unabsorbed"),
        {
            "Multiply q_nope by W_uk": BASE,
            "Config(targets=('v3', 'identity'))": entry("Unabsorbed", targets=("v3", "identity")),
        },
    ),
    "norm.absent": (
        of(changed(norm=EpsilonBehindTheRoot)),
        {"Write RMSNorm": BASE, "under the root": of(changed(norm=EpsilonUnderTheRoot))},
    ),
    "norm.gamma_absent": (entry("NoGamma"), {"a weight of ones, as a parameter": of(GammaOfOnes)}),
    "norm.gamma_dtype": (
        entry("Fp32Gamma"),
        {
            "norm weights in bfloat16": of(lambda: misses_norms.Fp32Gamma().bfloat16()),
            "mla_fusion.backend() also takes": compiled(NumbersOfBfloat16),
        },
    ),
    "norm.of_input": (of(Gated), {"Give the norm its own weight": BASE}),
    "norm.low_precision": (
        entry("LowPrecision"),
        {"Upcast to float32 behind the projection": BASE},
    ),
    "norm.runtime_eps": (
        epsilon(),
        {
            "torch._dynamo.config.specialize_float = True": epsilon(specialised=True),
            "compile through mla_fusion.backend()": epsilon(as_backend=True),
        },
    ),
    "linear.bias": (entry("Bias"), {"Remove a bias of zeros": BASE}),
    "linear.scaled": (
        entry("ScaledAddmm"),
        {"Scale the weight instead": of(changed(down=doubled_weight))},
    ),
    "linear.symbolic": (with_heads(dynamic=True), {"dynamic=False": with_heads(dynamic=False)}),
    "linear.hidden": (entry("AdaptedQuery"), {"merge adapters into them": of(Merged)}),
    "quant.static": (
        entry("Static"),
        {"Use npu_dynamic_quant and pass its scale as pertoken_scale": of(int8.Full)},
    ),
    "quant.weights_only": (
        entry("WeightsOnly"),
        {
            "Quantise the activation too (npu_dynamic_quant)": of(int8.Full),
            "hold the weight in bfloat16": BASE,
        },
    ),
    "quant.dynamic": (
        entry("TruncatedLatent"),
        {"Quantise c_q by npu_dynamic_quant": of(int8.Partial)},
    ),
    "quant.mixed": (
        entry("QueryLatentAlone"),
        {
            "Quantise W_uq_qr alone to int8 (mode 1)": of(int8.Partial),
            "together, to one format": of(int8.Full),
        },
    ),
    "quant.tokens_differ": (
        entry("SmoothedOnce"),
        {"once, with one smooth_scales": of(int8.FullSmooth)},
    ),
    "quant.scale": (
        entry("OtherTokenScale"),
        {"Pass the token scales that the quantisation returned": of(int8.Full)},
    ),
    "dtype.region": (
        of(lambda: prologues.PagedRotateHalf().half(), half_precision),
        {"model.to(torch.bfloat16), and its caches and tables with it": PAGED},
    ),
    "scale.unequal": (
        entry("ScaledRope"),
        {
            "Scale the whole query by one number": of(changed(split=doubled_both)),
            "q_nope and the rotated q_pe by one for each token": entry("PartsByPosition"),
            "into the weight": of(ScaledColumns),
            "into the softmax scale": BASE,
        },
    ),
    "reader.latent": (
        entry("RawLatentRead"),
        {"Read the normed latent": of(changed(extra=of_normed))},
    ),
    "cache.staging_forbidden": (
        entry("ComplexDense", staging="never"),
        {
            "Allow staging": entry("ComplexDense"),
            "[BlockNum, BlockSize, 1, width]": of(Base, staging="never"),
        },
    ),
    "staging.gains_nothing": (
        of(of_plan.ManyHeads, targets=("v3", "identity")),
        {
            "names behind 'not in place'": of(
                of_plan.ManyHeads, targets=("v3", "identity"), kr_layout="half"
            ),
            "Config(staging='always')": of(
                of_plan.ManyHeads, targets=("v3", "identity"), staging="always"
            ),
        },
    ),
    "contract": (
        of(prologues.PagedRotateHalf, in_blocks(8), staging="never"),
        {
            "Change what the message names": of(
                prologues.PagedRotateHalf, in_blocks(16), staging="never"
            )
        },
    ),
    "graph.not_functional": (exported, {"ExportedProgram.run_decompositions()": functional}),
    "graph.branch": (
        of(InABranch, branched, device="cpu"),
        {"Compute the prologue before the branch": of(BeforeTheBranch, branched, device="cpu")},
    ),
    "step.choice": (
        entry("LatentOutliersCut"),
        {
            "Leave the step out": BASE,
            "in front of x": of(changed(forward=clamped_input)),
            "behind the query": of(changed(absorb=clamped_query)),
        },
    ),
    "step.random": (of(Dropped, device="cpu"), {"model.eval()": of(lambda: Dropped().eval())}),
    "step.unknown": (entry("OpaqueScale"), {"Write the step with operators of torch": BASE}),
    "tokens.cut": (entry("SlicedBehindTheProjections"), {"Slice x": of(changed(forward=sliced))}),
    "tokens.mixed": (
        dynamic(Shifted),
        {"out of the prologue": dynamic(Base), "fixed": of(JoinedAgain, lambda: paged_args(40))},
    ),
    "slots.unproven": (
        of(of_plan.SlotsLowered, staging="never"),
        {
            "as one input of the graph": of(Base, staging="never"),
            "allow staging": of(of_plan.SlotsLowered),
        },
    ),
    "stream.mixed": (
        edited(labelled("11", "0")),
        {"Keep the prologue on one stream": edited(labelled("11", "11"))},
    ),
    "autograd": (compiled(Base, gradients=True), {"Compile under torch.no_grad()": compiled(Base)}),
    "target.unlisted": (
        of(Base, targets=("identity",)),
        {"Add 'v3' to Config.targets": of(Base, targets=("v3", "identity"))},
    ),
    "skip": (of(Base, device="cpu", skip=("Base",)), {"Remove it from Config.skip": BASE}),
}
# no graph of a user has these
ALONE = {
    "graph.unread": "every entry eliminates dead code; a graph edited by hand may have it "
    "(commit/test_refusals.py)",
    "verify.mismatch": "a defect of the pass",
    "pass.failed": "a defect of the pass",
}


def test_every_code_is_walked_but_those_that_no_model_gets() -> None:
    assert WALKS.keys() | ALONE.keys() == CODES.keys() and not WALKS.keys() & ALONE.keys()
    assert all(
        "report the graph" in CODES[code][1]
        for code, why in ALONE.items()
        if why == "a defect of the pass"
    )


@pytest.mark.parametrize("code", one_in(6, WALKS))
def test_what_the_remedy_of_a_code_says_fuses(code: str) -> None:
    broken, ways = WALKS[code]
    left, *_ = (before := broken()).rejected
    assert (left.code.partition(":")[0], before.fused) == (code, []), left.message
    assert all(words in left.remedy for words in ways), left.remedy
    assert (None in ways.values()) == left.remedy.startswith("Nothing")
    for words, repaired in ways.items():
        after = repaired() if repaired else None
        assert after is None or (after.fused and not after.rejected), f"{words}: {after}"


# forms of public code: what each remedy leads to, to the end
CHAINS: dict[str, list[tuple[str, str, Told]]] = {
    "no norms, and keys expanded": [
        ("norm.absent", "Write RMSNorm", entry("Normless")),
        ("absorb.absent", "Multiply q_nope by W_uk", entry("Unabsorbed")),
        ("", "", BASE),
    ],
    "a factor of each token before the rotation": [
        (
            "scale.unequal",
            "and the rotated q_pe by one for each token",
            entry("ScaledBeforeRotation"),
        ),
        ("", "", entry("QueryByPosition")),
    ],
    "a reader of the key before its rotation": [
        ("reader.latent", "Read the normed latent", entry("OneColumnLater")),
        ("", "", entry("DlInfer")),
    ],
}


@pytest.mark.parametrize("form", CHAINS)
def test_remedies_lead_to_a_fused_graph(form: str) -> None:
    for code, words, told in CHAINS[form]:
        report = told()
        left = report.rejected[0] if report.rejected else None
        assert (left.code if left else "") == code and bool(report.fused) == (not code), str(report)
        assert left is None or words in left.remedy, left.remedy


@pytest.mark.parametrize("norm", [EpsilonBehindTheRoot, EpsilonAsFloor])
def test_the_place_of_an_epsilon_is_said(norm: type) -> None:
    (left, *_) = of(changed(norm=norm), device="cpu")().rejected
    assert left.code == "norm.absent" and "q_a_layernorm's mul" in left.message
    assert "under the root" in left.remedy


def test_an_operator_that_cannot_be_run_is_not_said_to_write() -> None:
    (left, *_) = entry("OpaqueScale")().rejected
    assert left.code == "step.unknown" and "writes" not in left.message
