"""Holds the codes of rejections, each with its meaning and what would make the prologue fuse.

``observe/record.py`` makes a ``Rejection`` of a ``Departure``.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_fusion.graph.departure import UNKNOWN

CODES: dict[str, tuple[str, str]] = {
    # code: (meaning, what would make it fuse)
    "q_lora.absent": (
        "The query is projected from the hidden state directly; the kernel needs W_dq, RMSNorm "
        "and W_uq_qr.",
        "Nothing: the kernel has no form without a query LoRA.",
    ),
    "q_lora.interrupted": (
        "A step that the kernel does not have, such as a gate or a second norm, stands between "
        "the query latent's norm and W_uq_qr.",
        "Move the step: gather x or the query, and leave c_q to the kernel.",
    ),
    "kv_latent.absent": (
        "A normed query latent was found, but no kv latent (RMSNorm of W_dkv x beside a rotated "
        "W_kr x) on the same x.",
        "Keep kv_a_proj, its norm, RoPE and the query projections in one graph, on one x, with no"
        " other step between.",
    ),
    "rope.absent": (
        "The latents were found, but the query or the key is not rotated as the kernel rotates.",
        "Rotate q_pe and k_pe with tables that are inputs of, or computed in, the same graph.",
    ),
    "rope.tables_differ": (
        "Query and key are rotated by tables that the pass cannot prove equal.",
        "Use one cos and one sin tensor for both, and one order of pairs: halves read other "
        "columns of a table than neighbours do.",
    ),
    "rope.normed_key": (
        "The key or the query is normalised before it is rotated; the kernel rotates W_kr x and "
        "W_qr c_q as they are.",
        "Nothing: the kernel has no norm there.",
    ),
    "rope.heads_differ": (
        "The query has more or fewer rotated parts than heads; the kernel rotates one part for "
        "each head.",
        "Project one rotated part for each head: repeat the columns of its weight.",
    ),
    "absorb.absent": (
        "q_nope is not multiplied by W_uk in this graph, or a step stands in front of that "
        "product, so nothing here is the kernel's query.",
        "Multiply q_nope by W_uk (bmm, matmul or einsum) and attend over latents: docs/absorb.md "
        "shows how, and mla_fusion.models.hf.optimize does it to a Hugging Face model. To fuse "
        "without: Config(targets=('v3', 'identity')) adds a product.",
    ),
    "norm.absent": (
        "A latent is not normalised by RMSNorm: it has another norm, no norm, or an "
        "unknown operator.",
        "Write RMSNorm with plain operators, F.rms_norm or npu_rms_norm; the kernel has no other "
        "norm. Epsilon is added to the mean square, under the root, and the weight multiplies "
        "last: x * rsqrt(mean(x^2) + eps) * w.",
    ),
    "norm.gamma_absent": (
        "A latent is normalised without a weight.",
        "Give the norm a weight of ones, as a parameter.",
    ),
    "norm.gamma_dtype": (
        "A norm weight is not bfloat16, or stands beside a number that is no power of two; "
        "rounding may change results.",
        "Store norm weights in bfloat16, and compute in bfloat16 what is made of one (1 + w). "
        "Multiply by a number behind W_uq_qr, and divide by the mean of squares, not by their sum. "
        "mla_fusion.backend() also takes a float32 weight whose values are all bfloat16 numbers, "
        "and checks that.",
    ),
    "norm.of_input": (
        "What a norm multiplies a latent by is computed from activations; the kernel multiplies "
        "by a weight.",
        "Give the norm its own weight, the same for all tokens.",
    ),
    "norm.low_precision": (
        "A step of the norm, up to the root of its statistic, is computed below float32, which the "
        "kernel does not reproduce.",
        "Upcast to float32 behind the projection: before squaring, and before any factor. Cast "
        "down the normed row, not what it is multiplied by.",
    ),
    "norm.runtime_eps": (
        "The norm's epsilon is an input of the graph, so its value is unknown at compile time.",
        "Make it a Python float (self.eps = 1e-6), not a tensor or an argument. If dynamic=True "
        "made it an input: compile through mla_fusion.backend(), or set "
        "torch._dynamo.config.specialize_float = True.",
    ),
    "linear.bias": (
        "A projection has a bias; the kernel adds none.",
        "Remove a bias of zeros. Another bias stays unfused.",
    ),
    "linear.scaled": (
        "A projection is an addmm with alpha or beta other than 1, or a weight multiplies its "
        "columns behind it.",
        "Scale the weight instead.",
    ),
    "linear.symbolic": (
        "The number of columns of a projection is known only when the graph runs.",
        "Mark the number static (torch._dynamo.mark_static, or dynamic=False): the heads of a "
        "kernel call are fixed.",
    ),
    "linear.hidden": (
        "A projection is an unknown operator, a sum of products (with an adapter, for example), "
        "one by an argument of the call, or one of values whose quantisation is not read.",
        "Use mm, linear or npu_quant_matmul, one for all tokens, hold weights as parameters, and "
        "merge adapters into them.",
    ),
    "quant.static": (
        "A projection is quantised with a scale fixed ahead of time; the kernel quantises per "
        "token.",
        "Use npu_dynamic_quant and pass its scale as pertoken_scale.",
    ),
    "quant.weights_only": (
        "A weight is int8 and its activation is not (W8A16); the kernel has no such mode.",
        "Quantise the activation too (npu_dynamic_quant), or hold the weight in bfloat16.",
    ),
    "quant.dynamic": (
        "c_q is not quantised as the kernel quantises it. In int8 the kernel takes "
        "round(c_q * 127 / max|c_q|) for each token, and multiplies the product by "
        "max|c_q| / 127 and by one scale for each column. Float8 has 448 in place of 127, "
        "hifloat8 32768; mxfp8 has a power of two for every 32 neighbours.",
        "Quantise c_q by npu_dynamic_quant, in mxfp8 by npu_dynamic_mx_quant; plain operators "
        "will do in int8, for each token, symmetric, rounded to the nearest. Multiply the product "
        "by the scales alone.",
    ),
    "quant.mixed": (
        "The projections are quantised in a combination of formats that is no weight_quant_mode "
        "of the kernel.",
        "Quantise W_uq_qr alone to int8 (mode 1), or W_dq, W_uq_qr and W_dkv_kr together, to one "
        "format.",
    ),
    "quant.tokens_differ": (
        "Two projections of one value read quantised forms of it that the pass cannot prove equal.",
        "Quantise the value once, with one smooth_scales.",
    ),
    "quant.scale": (
        "A quantised product has other scales than the kernel's. The kernel multiplies by one "
        "float for each column and one for each token; in mxfp8 by a power of two for every block "
        "of 32 of each.",
        "Pass the token scales that the quantisation returned, one float32 or bfloat16 scale for "
        "each column of the weight, and no offset.",
    ),
    "dtype.region": (
        "A product is not computed in bfloat16, or a value between products is neither bfloat16 "
        "nor float32.",
        "Run the model in bfloat16: model.to(torch.bfloat16), and its caches and tables with it.",
    ),
    "scale.unequal": (
        "q_nope, q_pe or k_pe are scaled by different factors, or by one that the model does not "
        "state as a number, which no attribute of the kernel expresses.",
        "Scale the whole query by one number that the model states (not a tensor or an argument), "
        "or q_nope and the rotated q_pe by one for each token; fold factors of heads or columns "
        "into the weight, others into the softmax scale; or scale query and query_rope.",
    ),
    "reader.latent": (
        "Something else reads a value that the kernel does not return (raw c_q, unrotated q_pe or"
        " k_pe, raw c_kv, what rounding leaves of c_kv).",
        "Read the normed latent, which the kernel returns, in its place. Where a fused cache "
        "operator reads the value: change what the message names behind 'not in place' "
        "(docs/rejections.md, Why a fusion is staged).",
    ),
    "cache.staging_forbidden": (
        "The kernel cannot write this cache exactly, and Config.staging is 'never'.",
        "Allow staging, or give the graph caches of shape [BlockNum, BlockSize, 1, width].",
    ),
    "staging.gains_nothing": (
        "The kernel cannot write this cache, and a staged call would save no time, by an estimate.",
        "Change what the message names behind 'not in place' (docs/rejections.md, Why a fusion is "
        "staged). Config(staging='always') stages it all the same.",
    ),
    "contract": (
        "The operator's host check would refuse the call.",
        "Change what the message names, or use a release or a chip that takes it. "
        "Config(cann=.., soc=..) names one that is not here.",
    ),
    "graph.not_functional": (
        "An operator changes a value of the graph in place, so what its readers see depends on "
        "order.",
        "Functionalise first: AOT autograd, or ExportedProgram.run_decompositions().",
    ),
    "graph.branch": (
        "A prologue, or a step of one, stands in a body that the pass does not open: of a "
        "condition, of a loop, or of a region that writes into parts of its inputs other than "
        "entries.",
        "Compute the prologue before the branch, or decide outside of the compiled function; give "
        "a region whole caches, or pool[i].",
    ),
    "graph.unread": (
        "Nothing reads what the prologue computes.",
        "Remove the dead code: nothing is lost.",
    ),
    "step.choice": (
        "A step of the prologue picks by the values it reads (a clamp, a mask, a rounding), so "
        "the kernel would compute something else for some inputs.",
        "Leave the step out, or move it: in front of x, or behind the query.",
    ),
    "step.random": (
        "A step of the prologue draws random numbers, which the kernel does not.",
        "Compile in evaluation mode (model.eval()), without dropout and noise.",
    ),
    "step.unknown": (
        "The pass does not know what a step of the prologue computes.",
        "Write the step with operators of torch; or describe your operator, with "
        "mf.register_operator. A collective between W_dq and the absorbed query has no place in "
        "the kernel: give each device W_dq and W_dkv whole, and share the heads out.",
    ),
    "tokens.cut": (
        "The graph projects x, and then selects some of the tokens; the kernel projects every "
        "token that it is given.",
        "Slice x, not what is projected from it: proj(x[:n]), not proj(x)[:n]; the results are "
        "equal. Decoded rows and prefilled rows (x[n:]) are then two prologues, each judged by "
        "itself.",
    ),
    "tokens.mixed": (
        "The number of tokens is symbolic, and the pass cannot show that a step treats all tokens "
        "alike.",
        "Keep slices, joins and masks along the tokens out of the prologue. With a fixed number "
        "of tokens, those that change nothing are accepted.",
    ),
    "slots.unproven": (
        "The cache slots may be negative or repeat, and the new rows may not be staged "
        "(Config.staging is 'never').",
        "Give the slots as one input of the graph, or allow staging.",
    ),
    "stream.mixed": (
        "Nodes of the prologue carry different stream labels.",
        "Keep the prologue on one stream.",
    ),
    "proof.differs": (
        "A value that the kernel would replace is not, in exact arithmetic, what the kernel "
        "computes.",
        "Compute the value that the message names as the operator's document does. Almost the "
        "same (a cap far out, a term below rounding, another epsilon) is not the same.",
    ),
    "verify.mismatch": (
        "The region and its replacement gave different numbers on seeded inputs, or did not run.",
        "If a step does not run, see whether it takes inputs of these shapes. Otherwise this is a "
        "defect of the pass: please report the graph.",
    ),
    "pass.failed": (
        "The pass itself failed here; the prologue stays as it is.",
        "This is a defect of the pass: please report the graph and the traceback in the log.",
    ),
    "autograd": (
        "The graph records gradients; the kernel has no backward.",
        "Compile under torch.no_grad().",
    ),
    "target.unlisted": (
        "Config.targets leaves out the target that takes this prologue.",
        "Add 'v3' to Config.targets.",
    ),
    "skip": ("Config.skip asked to leave this prologue alone.", "Remove it from Config.skip."),
}


@dataclass(frozen=True)
class Rejection:
    """One prologue that stays as it is.

    code     stable; the part before ":" is a key of ``CODES`` (``contract:dims.he``)
    message  one sentence with dims and node names
    nodes    names of the nodes concerned
    layer    module path of the prologue, from node meta; if the model is one layer, its class
    source   the line of the model that the first node came from, if the graph carries it
    score    how much of a prologue was found, from 0 to 1: the nearest miss has the highest
    """

    code: str
    message: str
    nodes: tuple[str, ...] = ()
    layer: str = ""
    source: str = ""
    score: float = 0.0

    @property
    def where(self) -> str:
        """Returns the layer, or the first nodes if it has no name."""
        return self.layer or ", ".join(self.nodes[:2]) or "unnamed"

    @property
    def remedy(self) -> str:
        """Returns what would make the prologue fuse."""
        remedy = CODES[self.code.partition(":")[0]][1]
        hint = " If that operator is your own: mf.register_operator(op, fn) says what it computes."
        asks = UNKNOWN in self.message and "register_operator" not in remedy
        return remedy + hint * asks


def message(code: str, detail: str) -> str:
    """Returns the meaning of a code, with what was found. Raises KeyError if the code is
    unknown.
    """
    return f"{CODES[code.partition(':')[0]][0]} ({detail})"
