"""Registration of the ``npu::`` operators: schemas, opcheck, functionalisation, torch_npu."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from mla_fusion import meta
from tests.exhaustive import pairs
from tests.samples import SMALL_PREPROCESS, sample_call, sample_preprocess

npu = torch.ops.npu


def positional(arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    required, defaults = meta.signature("npu_mla_prolog_v3")
    options = {name: value for name, value in arguments.items() if name in defaults}
    return [arguments[name] for name in required], options


def kv_arguments() -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(0)

    def noise(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=make).to(torch.bfloat16)

    rope = [noise(3, 1, 2, 16), noise(3, 1, 2, 16)]
    return [
        noise(3, 1, 2, 80),
        noise(64),
        *rope,
        torch.arange(6),
        noise(4, 16, 1, 16),
        noise(4, 16, 1, 64),
    ]


@pytest.mark.parametrize(
    ("modes", "name"),
    pairs([(0, 0), (1, 2), (2, 1), (2, 3)], ["npu_mla_prolog_v3", "npu_mla_prolog_v3_functional"]),
)
def test_opcheck_passes_on_the_prologue(modes: tuple[int, int], name: str) -> None:
    wq, kv = modes
    call = sample_call(weight_quant_mode=wq, kv_cache_quant_mode=kv) | {"query_norm_flag": True}
    args, options = positional(call)
    torch.library.opcheck(getattr(npu, name).default, tuple(args), options)


@pytest.mark.parametrize(
    "name", ["npu_kv_rmsnorm_rope_cache_v2", "npu_kv_rmsnorm_rope_cache_v2_functional"]
)
def test_opcheck_passes_on_the_kv_cache_operators(name: str) -> None:
    options = {"cache_mode": "PA_BNSD", "is_output_kv": True}
    torch.library.opcheck(getattr(npu, name).default, tuple(kv_arguments()), options)


def test_opcheck_passes_on_the_small_operators() -> None:
    def noise(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes).to(torch.bfloat16)

    x = torch.randn(3, 4, 8).to(torch.bfloat16)
    gamma, rope = torch.randn(8).to(torch.bfloat16), torch.randn(3, 1, 8).to(torch.bfloat16)
    quantised, scale = npu.npu_dynamic_quant(x)
    weight = torch.randint(-9, 9, (8, 5), dtype=torch.int8)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (npu.npu_rms_norm, (x, gamma), {}),
        (npu.npu_add_rms_norm, (x, x.flip(0), gamma), {}),
        (
            npu.npu_interleave_rope,
            (x.transpose(0, 1)[None], rope.view(1, 1, 3, 8), rope.view(1, 1, 3, 8)),
            {},
        ),
        (npu.npu_rotary_mul, (x[None], rope.view(1, 3, 1, 8), rope.view(1, 3, 1, 8)), {}),
        (npu.npu_transpose_batchmatmul, (x, torch.randn(4, 8, 6).to(x)), {"perm_x1": [1, 0, 2]}),
        (npu.npu_scatter_nd_update, (x, torch.tensor([[2], [0]]), x[:2].clone()), {}),
        (npu.npu_scatter_nd_update_, (x.clone(), torch.tensor([[2], [0]]), x[:2].clone()), {}),
        *(
            (
                op,
                (x, x[..., :4], noise(2, 4, 4, 8), noise(2, 4, 4, 4), torch.tensor([5, 0, 2])),
                {"cache_mode": "Norm"},
            )
            for op in (npu.npu_scatter_pa_kv_cache, npu.npu_scatter_pa_kv_cache_functional)
        ),
        (npu.scatter_update, (x, torch.tensor([1, 0]), x[:2, :2].clone(), 1), {}),
        (npu.scatter_update_, (x.clone(), torch.tensor([[2, 1]]), x[:1, :2].clone(), 1), {}),
        *((npu.npu_dynamic_quant, (rows,), {}) for rows in (x, x.transpose(0, 1))),
        *((npu.npu_dynamic_quant, (x,), {"dst_type": number}) for number in (24, 292, 290)),
        (npu.npu_dynamic_mx_quant, (noise(3, 4, 128),), {"dst_type": 24}),
        (npu.npu_dynamic_mx_quant, (noise(3, 96),), {"dst_type": 292}),
        (npu.npu_dynamic_block_quant, (noise(3, 256),), {}),
        (npu.npu_dynamic_block_quant, (noise(3, 2, 200).transpose(0, 1),), {}),
        (npu.npu_quantize, (x, torch.rand(8) + 1, None, 1), {"axis": -1}),
        (
            npu.npu_quant_matmul,
            (quantised.flatten(0, 1), weight, torch.rand(5)),
            {"pertoken_scale": scale.flatten(), "output_dtype": 15},
        ),
        (npu.npu_format_cast, (x, 29), {}),
    ]
    for op, args, options in calls:
        torch.library.opcheck(op.default, args, options)


def test_shapes_of_a_product_in_blocks() -> None:
    """The other checks of opcheck compute with what they are given: torch cannot in float8."""
    mx, weight = (
        npu.npu_dynamic_mx_quant(torch.randn(rows, 128).bfloat16(), dst_type=24) for rows in (6, 5)
    )
    options = {
        "pertoken_scale": mx[1],
        "scale_dtype": 293,
        "pertoken_scale_dtype": 293,
        "output_dtype": 15,
    }
    args = mx[0], weight[0].t(), weight[1].transpose(0, 1)
    options["group_sizes"] = [1, 1, 32]
    torch.library.opcheck(npu.npu_quant_matmul.default, args, options, test_utils="test_faketensor")


@pytest.mark.parametrize("cache_mode", ["krope_ctkv", "int8_nzcache"])
def test_atb_preprocess_returns_fresh_caches_and_writes_those_given_as_results(
    cache_mode: str,
) -> None:
    op = torch.ops.atb.npu_mla_preprocess
    # torch_npu's own meta kernel, where another test has loaded it, knows C and R
    call = sample_preprocess(cache_mode=cache_mode, dims=SMALL_PREPROCESS | {"C": 512, "R": 64})
    before = call["kv_cache"].clone()
    torch.library.opcheck(op.default, (), call)
    fresh = op(**call)
    assert torch.equal(call["kv_cache"], before) and not torch.equal(fresh[1], before)
    outs = {"q_out0": torch.empty_like(fresh[0]), "q_out1": torch.empty_like(fresh[2])}
    outs |= {"kv_cache_out0": call["kv_cache"], "kv_cache_out1": call["kv_cache_rope"]}
    written = op.out(**call, **outs)
    assert all(torch.equal(a, b) for a, b in zip(written, fresh, strict=True))
    assert written[1] is call["kv_cache"] and written[0] is outs["q_out0"]
    on_meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    assert [(r.shape, r.dtype) for r in op(**on_meta)] == [(r.shape, r.dtype) for r in fresh]


def captured(fn: Any, *args: Any, dynamic: bool = False) -> torch.fx.GraphModule:
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, keep_inference_input_mutations=True)
    with torch.no_grad():
        torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    return graphs[-1]


def targets(gm: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_in_place_prologue_becomes_functional_and_copy(dynamic: bool) -> None:
    args, options = positional(sample_call())
    wanted = npu.npu_mla_prolog_v3_functional(*args, **options)

    def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, query_rope, *_ = npu.npu_mla_prolog_v3(*tensors, cache_index=options["cache_index"])
        return query, query_rope

    gm = captured(step, *args, dynamic=dynamic)
    found = targets(gm)
    assert found.count("npu.npu_mla_prolog_v3_functional.default") == 1
    assert "npu.npu_mla_prolog_v3.default" not in found and not any(
        "auto_functionalized" in t for t in found
    )
    assert found.count("aten.copy_.default") == 2
    assert torch.equal(args[9], wanted[5]) and torch.equal(args[10], wanted[6])


def test_in_place_prologue_on_a_view_of_a_pool_updates_the_pool() -> None:
    args, options = positional(sample_call())
    wanted = npu.npu_mla_prolog_v3_functional(*args, **options)
    pool = torch.stack((args[9], args[9]))

    def step(pool: torch.Tensor, kr: torch.Tensor) -> torch.Tensor:
        return npu.npu_mla_prolog_v3(*args[:9], pool[1], kr, cache_index=options["cache_index"])[0]

    before = pool[0].clone()
    captured(step, pool, args[10])
    assert torch.equal(pool[1], wanted[5]) and torch.equal(pool[0], before)


def test_in_place_kv_cache_becomes_functional_and_copy() -> None:
    args = kv_arguments()
    wanted = npu.npu_kv_rmsnorm_rope_cache_v2_functional(*args, cache_mode="PA")

    def step(*tensors: torch.Tensor) -> torch.Tensor:
        npu.npu_kv_rmsnorm_rope_cache_v2(*tensors, cache_mode="PA")
        return tensors[5] + 1

    found = targets(captured(step, *args))
    assert found.count("npu.npu_kv_rmsnorm_rope_cache_v2_functional.default") == 1
    assert found.count("aten.copy_.default") == 2
    assert torch.equal(args[5], wanted[2]) and torch.equal(args[6], wanted[3])


def test_in_place_scatter_is_functionalised() -> None:
    cache, rows = torch.zeros(4, 3), torch.ones(2, 3)

    def step(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return npu.npu_scatter_nd_update_(cache.view(-1, 3), torch.tensor([[1], [3]]), rows) * 2

    found = targets(captured(step, cache, rows))
    assert "npu.npu_scatter_nd_update.default" in found and "aten.copy_.default" in found
    assert cache.sum() == 6


# in a process of its own: here another test may have loaded torch_npu, whose definitions stay
_ALONE = """
from mla_fusion import compat, ops
from tests.samples import sample_call
import mla_fusion, torch
ops.provide()
ops.withdraw()
names = [f"npu::{name}" for name in ops.OPERATORS] + [f"atb::{name}" for name in ops.ATB_OPERATORS]
assert not any(map(compat.has_schema, names))
ops.provide()
assert all(map(compat.has_schema, names))
call = sample_call(lead=(2,))
required, defaults = mla_fusion.meta.signature("npu_mla_prolog_v3")
options = {name: value for name, value in call.items() if name in defaults}
args = [call[name] for name in required]
assert torch.ops.npu.npu_mla_prolog_v3_functional(*args, **options)[0].shape == (2, 4, 64)
print("withdrawn and back")
"""

_HELD = """
from mla_fusion import ops
import torch
packet, norm = torch.ops.npu.npu_rms_norm, torch.ops.npu.npu_rms_norm.default
graph = torch.fx.Graph()
x, gamma = graph.placeholder("x"), graph.placeholder("gamma")
graph.output(graph.call_function(norm, (x, gamma)))
module = torch.fx.GraphModule({}, graph)
given = torch.randn(2, 8), torch.ones(8)
want = norm(*given)[0]
ops.withdraw()
ops.provide()
assert torch.ops.npu.npu_rms_norm.default is not norm
found = [norm(*given), packet(*given), packet.default(*given)]
found += [torch.fx.Interpreter(module).run(*given)]
assert all(torch.equal(each[0], want) for each in found)
assert norm._schema.name == "npu::npu_rms_norm"
ops.withdraw()
ops.provide()
assert torch.equal(norm(*given)[0], want)
(node,) = graph.find_nodes(op="call_function", target=norm)
graph.lint()
graph.output_node().args = (x,)
graph.erase_node(node)
print("held operators run")
"""


@pytest.mark.exhaustive
def test_withdraw_removes_and_operators_held_since_before_run() -> None:
    """Their handles would point at a definition that is gone: what calls them would read freed
    memory. To provide them twice does nothing.
    """
    printed = run_python(_HELD + _ALONE)
    assert "held operators run" in printed and "withdrawn and back" in printed


_BESIDE_TORCH_NPU = """
import re
from importlib import metadata
import mla_fusion
import torch
from mla_fusion import ops
from mla_fusion.releases import RELEASES
from tests.samples import sample_call
from tests.samples import sample_preprocess
ours = {name: str(getattr(torch.ops.npu, name).default._schema) for name in ops.OPERATORS}
preprocess = torch.ops.atb.npu_mla_preprocess
ours |= {form: str(getattr(preprocess, form)._schema) for form in ("default", "out")}
mla_fusion.offline.activate()
import torch_npu
for form in ("default", "out"):
    assert str(getattr(torch.ops.atb.npu_mla_preprocess, form)._schema) == ours[form], form
for name in ops.ATB_OPERATORS:
    for key in ("CPU", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key("atb::" + name, key), (name, key)
call = sample_preprocess()
fresh = torch.ops.atb.npu_mla_preprocess(**call)
inferred = mla_fusion.meta.infer("npu_mla_preprocess", **call)
assert [(tuple(r.shape), r.dtype) for r in fresh] == inferred
expected = mla_fusion.reference.mla_preprocess(**call)
assert all(torch.equal(a, b) for a, b in zip(fresh, expected))
assert torch_npu.atb.npu_mla_preprocess(**call)[0].shape == fresh[0].shape
release = next((row for row in RELEASES if row.torch_npu == metadata.version("torch_npu")), None)
for name in ops.OPERATORS:
    theirs = str(getattr(torch.ops.npu, name).default._schema)
    is_older = release is not None and release.schema == "no dtypes"
    if is_older and name.startswith("npu_mla_prolog_v3"):
        ours[name], left_out = re.subn(r", int\\? \\w+_dtype=None", "", ours[name])
        assert left_out == 5, ours[name]
    assert theirs == ours[name], (theirs, ours[name])
    for key in ("CPU", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key("npu::" + name, key), (name, key)
call = sample_call()
required, _ = mla_fusion.meta.signature("npu_mla_prolog_v3")
args = [call[name] for name in required]
out = torch.ops.npu.npu_mla_prolog_v3_functional(*args, cache_index=call["cache_index"])
reference = mla_fusion.reference.npu_mla_prolog_v3_functional(**call)
assert all(torch.equal(a, b) for a, b in zip(out, reference))
functional = torch.ops.npu.npu_mla_prolog_v3_functional.default
torch.library.opcheck(functional, tuple(args), {"cache_index": call["cache_index"]})
print("same schemas")
"""


def run_python(script: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_beside_the_real_torch_npu_schemas_agree_and_kernels_work() -> None:
    assert "same schemas" in run_python(_BESIDE_TORCH_NPU)
