"""Every operator that has a rule, read into Values, is what eager torch computes.

One line of the table is one call, ``=>`` what it is in torch where eager torch cannot run it in
float64. A capital letter is a size, and a small one a tensor (see ``_tensors``). Activations (x, y,
h, z) are products with a weight; in another setting they are inputs, and in a third the number of
tokens is a symbol.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import mla_fusion  # noqa: F401  # operators of npu
from mla_fusion.fx.module_path import ARGUMENT
from mla_fusion.graph.call import RULES, Pair
from mla_fusion.graph.form import order
from mla_fusion.graph.read import Graph, values_of
from tests.graph.real import Real, is_known, wide

CALLS = """
add.Tensor(x, y)
add.Tensor(x, y, alpha=3)
add.Tensor(x, g)
add.Tensor(x, 0.1)
add.Tensor(p, x, alpha=-0.5)
add.Tensor(i, i, alpha=2)
add.Tensor(i, 3)
add.Tensor(c, c)
sub.Tensor(x, y, alpha=2)
sub.Tensor(i, 5)
sub.Tensor(x, x)
sub.Tensor(c, c2)
subtract.Tensor(x, g)
rsub.Tensor(x, y, alpha=2)
rsub.Scalar(x, 1.5)
rsub.Scalar(i, 7)
neg.default(x)
neg.default(i)
neg.default(c)
negative.default(x)
mul.Tensor(x, y)
mul.Tensor(x, g)
mul.Tensor(x, 0.125)
mul.Tensor(x, x)
mul.Tensor(g, x)
mul.Tensor(i, 12)
mul.Tensor(i, i)
mul.Tensor(c, c2)
mul.Tensor(c, k)
mul.Tensor(k, c)
mul.Tensor(mask, mask2)
mul.Scalar(x, -3.0)
multiply.Tensor(x, p)
div.Tensor(x, p)
div.Tensor(x, 7)
div.Tensor(p, 3)
div.Tensor(c, 2.0)
div.Tensor_mode(i, 4, rounding_mode="floor")
div.Tensor_mode(i, 4, rounding_mode="trunc")
div.Tensor_mode(sub.Tensor(i, 9), 4, rounding_mode="trunc")
div.Tensor_mode(sub.Tensor(i, 9), 4, rounding_mode="floor")
div.Tensor_mode(x, 0.3, rounding_mode="floor")
div.Tensor_mode(x, y, rounding_mode="trunc")
divide.Tensor(x, 3.0)
true_divide.Tensor(x, g)
floor_divide.default(i, 3)
floor_divide.default(sub.Tensor(i, 9), 3)
floor_divide.default(x, 0.7)
remainder.Scalar(i, 4)
remainder.Scalar(sub.Tensor(i, 9), 4)
remainder.Tensor(i, i2)
fmod.Scalar(i, 4)
fmod.Scalar(sub.Tensor(i, 9), 4)
bitwise_right_shift.Tensor_Scalar(i, 2)
bitwise_right_shift.Tensor_Scalar(sub.Tensor(i, 9), 2)
__rshift__.Scalar(i, 1)
bitwise_left_shift.Tensor_Scalar(i, 3)
__lshift__.Scalar(i, 3)
bitwise_and.Scalar(i, 7)
bitwise_and.Scalar(sub.Tensor(i, 9), 7)
bitwise_and.Tensor(mask, mask2)
__and__.Scalar(i, 3)
pow.Tensor_Scalar(x, 2)
pow.Tensor_Scalar(x, 3.0)
pow.Tensor_Scalar(abs.default(x), 0.5)
pow.Tensor_Scalar(abs.default(x), -1.5)
pow.Tensor_Scalar(i, 2)
float_power.Tensor_Scalar(x, 2)
sqrt.default(mul.Tensor(x, x))
sqrt.default(pow.Tensor_Scalar(add.Tensor(mul.Tensor(x, -2.0), 40.0), 1))
rsqrt.default(add.Tensor(mul.Tensor(mul.Tensor(x, x), 0.1), 1e-6))
reciprocal.default(x)
square.default(x)
square.default(neg.default(x))
addcmul.default(x, y, g, value=0.5)
addcdiv.default(x, y, p, value=2)
lerp.Scalar(x, y, 0.3)
lerp.Tensor(x, y, g)
sigmoid.default(x)
exp.default(x)
sin.default(x)
cos.default(x)
tanh.default(x)
silu.default(x)
relu.default(x)
abs.default(x)
abs.default(neg.default(x))
absolute.default(x)
sum.default(x)
sum.dim_IntList(h, [1])
sum.dim_IntList(h, [0, -1], True)
sum.dim_IntList(mul.Tensor(h, -2.0), [1])
sum.dim_IntList(i, [0])
mean.default(x)
mean.dim(h, [-1], True)
mean.dim(h, [1, 2])
linalg_vector_norm.default(h, 2, [-1], True)
linalg_vector_norm.default(h, 2, [1])
norm.ScalarOpt_dim(h, 2, [-1], True)
var.correction(h, [-1], correction=0, keepdim=True)
var.correction(h, [-1])
var.dim(h, [-1], False)
std.correction(h, [-1], correction=1)
var_mean.correction(h, [-1], correction=0, keepdim=True)
var_mean.correction(h, [1], correction=1)
mm.default(x, m)
mm.default(x, t.default(w))
bmm.default(transpose.int(h, 0, 1), u)
bmm.default(h, transpose.int(h, 1, 2))
bmm.default(a, transpose.int(h, 1, 2))
matmul.default(x, m)
matmul.default(h, d)
matmul.default(z, m)
matmul.default(w, transpose.int(z, 1, 2))
matmul.default(unsqueeze.default(h, 2), u)
matmul.default(x, g)
matmul.default(m3, t.default(x))
_int_mm.default(i8, m8)
mv.default(x, g)
dot.default(g, select.int(x, 0, 1))
matmul.default(select.int(x, 0, 0), m)
matmul.default(select.int(h, 2, 0), select.int(u, 0, 0)[:H])
addmm.default(b, x, m)
addmm.default(b, x, m, beta=2, alpha=0.5)
baddbmm.default(p2, transpose.int(h, 0, 1), u, beta=0.5)
linear.default(x, w)
linear.default(z, w, b)
einsum.default("thd,hdk->thk", [h, u])
einsum.default("thd,hdk->htk", [h, u])
einsum.default("tn,kn->tk", [x, w])
einsum.default("hdk,thd->tkh", [u, h])
einsum.default("thd,thd->th", [h, h])
einsum.default("bsn,nk->bsk", [z, m])
view_as_complex.default(view.default(x, [T, N // 2, 2]))
view_as_real.default(c)
view_as_real.default(mul.Tensor(c, c2))
complex.default(x, y)
polar.default(p, x)
_conj.default(c)
conj.default(c)
_conj_physical.default(c)
conj_physical.default(c)
real.default(c)
imag.default(c)
view_as_complex_copy.default(view.default(x, [T, C, 2]))
view_as_real_copy.default(mul.Tensor(c, c2))
_to_copy.default(c, dtype=C64)
view.default(c, [-1])
select.int(c, 1, 0)
cat.default([c, c2], 1)
unsqueeze.default(c, 1)
view.default(x, [T, H, D])
view.default(mul.Tensor(x, 3.0), [-1])
view.default(square.default(x), [T, D, H])
_unsafe_view.default(h, [T, N])
reshape.default(transpose.int(h, 1, 2), [T, N])
reshape.default(view.default(x, [T, H, D]), [T, D, H])
unsqueeze.default(x, 1)
unsqueeze.default(x, -1)
squeeze.dim(unsqueeze.default(x, 1), 1)
squeeze.dims(unsqueeze.default(x, 1), [1])
squeeze.default(unsqueeze.default(x, 1))
flatten.using_ints(h, 1)
unflatten.int(x, 1, [H, D])
view_copy.default(x, [T, H, D])
view_as.default(x, h)
ravel.default(h)
unsqueeze_copy.default(x, 1)
squeeze_copy.dim(unsqueeze.default(x, 1), 1)
_reshape_copy.default(x, [T, D, H])
_reshape_alias.default(x, [T, H, D], [N, D, 1])
expand.default(unsqueeze.default(x, 1), [T, 3, N])
expand.default(x, [2, -1, -1])
expand_copy.default(unsqueeze.default(x, 1), [T, 3, N])
expand_as.default(g, x)
broadcast_to.default(x, [2, T, N])
permute.default(h, [1, 0, 2])
permute.default(permute.default(h, [1, 2, 0]), [2, 0, 1])
permute.default(unsqueeze.default(x, 1), [1, 0, 2])
permute_copy.default(h, [2, 0, 1])
t.default(x)
t_copy.default(x)
numpy_T.default(x)
mT.default(h)
matrix_H.default(x)
adjoint.default(h)
transpose.int(h, 0, -1)
transpose.int(square.default(h), 1, 2)
transpose_copy.int(h, 1, 2)
swapaxes.default(h, 1, 2)
swapdims.default(h, 0, 1)
slice.Tensor(x, 1, 1, 3)
slice.Tensor(x, 1, 1, 9223372036854775807, 2)
slice.Tensor(x, -1, -3, -1)
slice.Tensor(slice.Tensor(x, 1, 1, N, 2), 1, 1, N, 2)
slice.Tensor(cat.default([x, y], 1), 1, N - 2, N + 2)
slice.Tensor(cat.default([x, y], 1), 1, 1, N + 3, 2)
slice.Tensor(expand.default(g, [T, N]), 1, 1, 3)
slice_copy.Tensor(x, 1, 1, 3)
narrow.default(x, 1, 2, 2)
narrow.default(x, 1, -3, 2)
narrow_copy.default(x, 1, 1, 3)
select.int(h, 1, 1)
select.int(h, 2, -1)
select_copy.int(h, 1, 1)
split.Tensor(x, 3, 1)
split_with_sizes.default(x, [1, N - 1], 1)
split_with_sizes.default(h, [1, D - 1], -1)
split.sizes(x, [2, N - 2], 1)
chunk.default(x, 2, 1)
tensor_split.sections(x, 2, 1)
tensor_split.indices(x, [1, 3], -1)
unsafe_split.Tensor(x, 2, 1)
unsafe_chunk.default(x, 2, 1)
split_copy.Tensor(x, 3, 1)
split_with_sizes_copy.default(x, [1, N - 1], 1)
unbind.int(h, 1)
unbind.int(h, -1)
unbind_copy.int(h, 1)
cat.default([x, y], 1)
cat.default([x, p], -1)
cat.default([mul.Tensor(x, 2.0), mul.Tensor(y, 2.0)], 1)
cat.default([slice.Tensor(x, 1, 0, 2), slice.Tensor(x, 1, 2, 4)], 1)
cat.default([square.default(x), square.default(y)], 1)
cat.default([mm.default(x, m), mm.default(x, m2)], 1)
cat.default([i, i2], 0)
cat.default([f32(p), half(p)], 0)
concat.default([x, y], 1)
concatenate.default([x, y], 1)
stack.default([x, y], 1)
stack.default([x, p], -1)
clone.default(x)
alias.default(x)
alias_copy.default(x)
detach.default(x)
detach_copy.default(x)
contiguous.default(x)
resolve_conj.default(x)
resolve_neg.default(x)
lift_fresh.default(x)
lift_fresh_copy.default(x)
npu.npu_format_cast.default(x, 29) => x
_to_copy.default(x, dtype=F16)
_to_copy.default(_to_copy.default(x, dtype=F16), dtype=F32)
_to_copy.default(_to_copy.default(p, dtype=F16), dtype=F32)
_to_copy.default(i, dtype=I32)
_to_copy.default(i, dtype=I8)
_to_copy.default(i, dtype=F32)
_to_copy.default(view.default(i, [T, 1]), dtype=F32)
_to_copy.default(mask, dtype=F32)
_to_copy.default(mask, dtype=I64)
_to_copy.default(x, dtype=I32)
_to_copy.default(x, dtype=torch.bool)
_to_copy.default(mul.Tensor(clamp.default(x, -1, 1), 100.0), dtype=F8)
to.dtype(x, F16)
type_as.default(x, half(p))
prims.convert_element_type.default(x, F16)
copy.default(p, x)
copy.default(x, g)
fill.Scalar(x, 2.5)
fill.Tensor(x, select.int(g, 0, 0))
full.default([T, 3], 0.5)
full_like.default(x, 3)
new_full.default(x, [2, 3], 1.5)
scalar_tensor.default(2.5)
zeros.default([T, 2])
zeros_like.default(x)
new_zeros.default(x, [T, 2])
zero.default(x)
ones.default([T, 2], dtype=I64)
ones_like.default(x)
new_ones.default(x, [T, 2])
arange.default(T)
arange.start(2, T + 2)
arange.start_step(1, 12, 3)
arange.start_step(0, D, 2, dtype=F32)
arange.start_step(0.5, 3.0, 0.5)
prims.iota.default(T, start=1, step=2, dtype=I64, device="cpu", requires_grad=False)
add.Tensor(x, unsqueeze.default(arange.default(T), 1))
mul.Tensor(x, tensor([1.0, -1.0] * (N // 2)))
index.Tensor(x, [None, tensor([2, 0, 1])])
roll.default(x, [1], [1])
roll.default(x, [-2], [-1])
roll.default(h, [1, 3], [1, 2])
flip.default(h, [-1])
flip.default(h, [1, 2])
repeat.default(x, [1, 2])
repeat.default(x, [2, 1, 3])
tile.default(x, [2])
repeat_interleave.self_int(x, 2, 1)
repeat_interleave.self_int(h, 3, -2)
repeat_interleave.self_int(x, 2)
diagonal.default(bmm.default(h, transpose.int(h, 1, 2)), 0, 1, 2)
diagonal_copy.default(bmm.default(h, transpose.int(h, 1, 2)), 0, 1, 2)
constant_pad_nd.default(x, [1, 2])
constant_pad_nd.default(x, [-1, 2], 0.5)
constant_pad_nd.default(h, [0, 1, 2, -1], 3)
pad.default(x, [1, 1])
unfold.default(x, 1, 2, 2)
unfold.default(h, 1, 1, 1)
index_select.default(x, 1, tensor([3, 0]))
index_select.default(tab, 0, i)
index_select.default(mul.Tensor(x, 3.0), 0, small)
embedding.default(tab, i)
embedding.default(tab, z2)
gather.default(h, 2, expand.default(tensor([[[1, 0, 3]]]), [T, H, 3]))
gather.default(x, 0, expand.default(view.default(small, [T, 1]), [T, N]))
gather.default(x, 1, expand.default(tensor([2, 0]), [T, 2]))
take_along_dim.default(x, expand.default(tensor([[2, 0]]), [T, 2]), 1)
index.Tensor(tab, [i])
index.Tensor(tab, [z2])
index.Tensor(blocks, [block, place])
index.Tensor(h, [None, select.int(tensor([[1, 0]]), 0, 0)])
index.Tensor(h, [small])
index.Tensor(h, [None, None, tensor([0, 2])])
index.Tensor(x, [None, tensor(-1)])
_unsafe_index.Tensor(x, [None, tensor([0, 2])])
index_put.default(cache, [slots], x)
index_put.default(blocks, [block, place], mul.Tensor(x, 2.0))
index_put.default(cache, [slots], half(x))
index_put.default(unsqueeze.default(cache, 0), [tensor([0]), slots], x)
_unsafe_index_put.default(cache, [slots], x)
index_copy.default(cache, 0, slots, x)
index_copy.default(cache4, 1, slots, view.default(x, [1, T, H, D]))
scatter.src(cache, 0, expand.default(view.default(slots, [T, 1]), [T, N]), x)
npu.npu_scatter_nd_update.default(cache, view.default(slots, [T, 1]), x) => \
 index_put.default(cache, [slots], x)
npu.npu_scatter_nd_update.default(blocks, stack.default([block, place], -1), x) => \
 index_put.default(blocks, [block, place], x)
slice_scatter.default(x, slice.Tensor(y, 1, 0, 2), 1, 1, 3)
slice_scatter.default(x, slice.Tensor(y, 1, 0, 2), 1, 0, 4, 2)
slice_scatter.default(x, y, 1)
select_scatter.default(h, select.int(h, 1, 0), 1, -1)
where.self(mask, x, y)
where.ScalarOther(mask, x, 0.5)
where.self(eq.Scalar(x, 0), x, y)
masked_fill.Scalar(x, mask, -3.5)
masked_fill.Tensor(x, mask, tensor(2.0))
eq.Tensor(i, i2)
eq.Scalar(x, 0)
ne.Scalar(i, 3)
round.default(mul.Tensor(x, 5.0))
clamp.default(x, -0.5, 0.5)
clamp.default(x, None, 0.5)
clamp.default(clamp.default(x, -0.5, 0.5), 0.0, 9.0)
clamp.default(clamp.default(x, -0.5, 0.5), 0.7, 0.9)
clamp.default(round.default(mul.Tensor(x, 5.0)), -2.5, 3)
round.default(clamp.default(mul.Tensor(x, 5.0), -2.5, 3.5))
round.default(clamp.default(mul.Tensor(x, 5.0), -2, 3))
clamp.Tensor(x, neg.default(lim), lim)
clamp.default(i, 0, 5)
clamp.default(i, -9, 1000)
clamp.default(p, -0.5, None)
clip.default(x, -0.5, 0.5)
clamp_min.default(x, 0.1)
clamp_max.default(x, 0.1)
amax.default(x, [-1], True)
amax.default(abs.default(x), [-1], True)
amax.default(abs.default(mul.Tensor(x, -3.0)), [-1])
amin.default(h, [-1], True)
max.dim(h, -1)
max.dim(abs.default(h), -1, True)
min.dim(h, -1)
max.other(x, y)
max.other(x, tensor(0.25))
min.other(x, lim)
maximum.default(x, y)
maximum.default(x, tensor(0.25))
maximum.default(amax.default(x, [-1]), neg.default(amin.default(x, [-1])))
minimum.default(maximum.default(x, neg.default(lim)), lim)
maximum.default(minimum.default(x, lim), neg.default(lim))
minimum.default(i, i2)
maximum.default(amax.default(x, [-1], True), neg.default(amin.default(x, [-1])))[:3, :3]
max.other(min.other(x, lim), neg.default(lim))
min.other(min.other(x, lim), neg.default(lim))
min.other(max.other(x, neg.default(lim)), lim)
max.other(i, i2)
clamp.default(i, 0.5)
maximum.default(amax.default(abs.default(x), [-1], True), tensor(1e-5))
clamp.default(amax.default(abs.default(x), [-1], True), 1e-8)
rms_norm.default(x, [N], g, 1e-6) => normed(x, g, 1e-6)
rms_norm.default(h, [H, D], None, 1e-5) => h * (h.square().mean((1, 2), True) + 1e-5).rsqrt()
_fused_rms_norm.default(x, [N], g, 1e-6) => (normed(x, g, 1e-6), step(x, 1e-6))
npu.npu_rms_norm.default(x, g, 1e-6) => (normed(x, g, 1e-6), step(x, 1e-6))
npu.npu_add_rms_norm.default(x, p, g, 1e-6) => \
 (normed(x + p, g, 1e-6), step(x + p, 1e-6), x + p)
layer_norm.default(x, [N], g, p1, 1e-6) => centred(x, 1e-6)[0] * g + p1
layer_norm.default(h, [D]) => centred(h, 1e-5)[0]
native_layer_norm.default(x, [N], g, p1, 1e-6) => \
 (centred(x, 1e-6)[0] * g + p1, *centred(x, 1e-6)[1:])
npu.npu_interleave_rope.default(h4, cos4, sin4) => turned(paired(h4), cos4, sin4)
npu.npu_rotary_mul.default(h4, cos4, sin4) => turned(h4, cos4, sin4)
npu.npu_rotary_mul.default(h4, cos4, sin4, "interleave") => \
 h4 * cos4 + torch.stack((-h4[..., 1::2], h4[..., ::2]), -1).flatten(-2) * sin4
npu.npu_rotary_mul.default(h4, cos4, sin4, rotate=d) => h4 * cos4 + (h4 @ d) * sin4
npu.npu_transpose_batchmatmul.default(h, u, perm_x1=[1, 0, 2], perm_y=[1, 0, 2]) => \
 torch.einsum("thd,hdk->thk", h, u)
npu.npu_transpose_batchmatmul.default(transpose.int(h, 0, 1), u) => \
 torch.einsum("thd,hdk->thk", h, u)
npu.npu_scatter_pa_kv_cache_functional.default(x3, y3, cache5, cache6, slots, cache_mode="Norm") \
 => (put(cache5, slots, x3), put(cache6, slots, y3))
npu.npu_quantize.default(x, lim1, None, 1) => int8(x / lim1)
npu.npu_quantize.default(x, g, p1, 1, 1, False) => int8(x * g + p1)
npu.npu_dynamic_quant.default(x) => rows_int8(x)
npu.npu_dynamic_quant.default(h, smooth_scales=s) => rows_int8(h * s)
npu.npu_dynamic_quant.default(mul.Tensor(x, -2.0)) => rows_int8(x * -2)
npu.npu_dynamic_quant.default(x, dst_type=292) => rows_fp8(x)
npu.npu_dynamic_block_quant.default(v) => tiles_int8(v)
npu.npu_dynamic_mx_quant.default(v, dst_type=292) => blocks_fp8(v)
npu.npu_quant_matmul.default(i8, m8, g, pertoken_scale=lim, output_dtype=5) => \
 (i8.double() @ m8.double()) * g * lim
npu.npu_quant_matmul.default(i8, m8, g, bias=b32, output_dtype=6) => \
 (i8.double() @ m8.double() + b32) * g
npu.npu_quant_matmul.default(i8, m8, g, output_dtype=3) => i8.long() @ m8.long()
npu.npu_quant_matmul.default(i8, m8, g, output_dtype=1) => int8((i8.double() @ m8.double()) * g)
npu.npu_kv_rmsnorm_rope_cache.default(half(kv), half(gamma), half(cos8), half(sin8), slots, \
 half(k_cache), half(c_cache), epsilon=1e-5, cache_mode="PA", is_output_kv=True) => \
 key_caches(kv, gamma, cos8, sin8, slots, k_cache, c_cache)
npu.npu_kv_rmsnorm_rope_cache_v2_functional.default(half(kv), half(gamma), half(cos8), \
 half(sin8), slots, half(k_cache), half(c_cache), epsilon=1e-5, cache_mode="PA_BNSD", \
 is_output_kv=True) => key_caches(kv, gamma, cos8, sin8, slots, k_cache, c_cache, 2)
npu.npu_kv_rmsnorm_rope_cache_v2_functional.default(half(kv), half(gamma), half(cos8), \
 half(sin8), slots, half(k_cache), _to_copy.default(c_cache, dtype=I8), epsilon=1e-5, \
 cache_mode="PA", c_kv_scale=s8, is_output_kv=True)[3] => put(_to_copy.default(c_cache, \
 dtype=I8), slots, int8(normed(kv[..., :512].flatten(0, 2), gamma, 1e-5) * s8))
"""
# rules of operators that no call above can be of
ELSEWHERE = {
    "index_put_": "writes in place",
    "npu::npu_linear": "torch_npu defines it",
    "npu::npu_dtype_cast": "torch_npu defines it",
    "npu::_npu_dtype_cast": "torch_npu defines it",
}
LINES = [
    (call.strip(), (wanted or call).strip())
    for line in CALLS.replace("\\\n", "").strip().splitlines()
    for call, _, wanted in [line.partition("=>")]
]


@dataclass(frozen=True)
class Setting:
    is_active: bool
    is_symbolic: bool
    seed: int


ACTIVE, BESIDE, SYMBOLIC = Setting(True, False, 1), Setting(False, False, 2), Setting(True, True, 3)
BOUND = 10007  # of the first symbol of a graph

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


def sizes_of(setting: Setting) -> dict[str, int]:
    rng = random.Random(setting.seed)
    tokens = BOUND if setting.is_symbolic else rng.choice((3, 5))
    heads, width = rng.choice((2, 3)), rng.choice((4, 6))
    sizes = {"T": tokens, "H": heads, "D": width, "N": heads * width, "C": heads * width // 2}
    sizes |= {"K": rng.choice((5, 7)), "Q": 4, "P": tokens // 4 + 2, "V": 128}
    return sizes | {"R": tokens + 5, "W": 576, "L": 512, "E": 64}


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


def tensors_of(setting: Setting, sizes: dict[str, int]) -> Tensors:
    random_numbers = torch.Generator().manual_seed(setting.seed)
    shapes, model = shapes_of(FLOATS), shapes_of(MODEL)
    for name, shape in ACTIVATIONS.items():
        if setting.is_active:
            shapes[f"{name}_in"] = "TK"
            model[f"{name}_weight"] = "K" + shape[1:]
        else:
            shapes[name] = shape
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
    given["b32"] = whole(-999, 999, "N").to(torch.int32)
    slots = torch.randperm(sizes["R"], generator=random_numbers)[: sizes["T"]]
    given |= {"slots": slots, "block": slots // sizes["Q"], "place": slots % sizes["Q"]}
    return Tensors(given, shapes | model | {"m8": "KN", "b32": "N"}, {*model, "m8", "b32"})


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
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, True) / 127
    return int8(x / scale), scale.squeeze(-1)


def rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, True) / 448
    return fp8(x / scale), scale.squeeze(-1)


def tiles_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    values, scale = rows_int8(x.unflatten(-1, (-1, 128)))
    return values.flatten(-2), scale


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

    def __init__(self, setting: Setting, given: dict[str, Any], is_traced: bool) -> None:
        super().__init__(globals() | sizes_of(setting) | given)
        self["T"] = given["slots"].shape[0]
        self["npu"], self["prims"], self["I64"] = torch.ops.npu, torch.ops.prims, torch.int64
        self["I8"], self["I32"], self["F8"] = torch.int8, torch.int32, torch.float8_e4m3fn
        self["F16"], self["F32"], self["C64"] = torch.float64, torch.float64, torch.complex128
        if is_traced:
            self["F16"], self["F32"], self["C64"] = torch.bfloat16, torch.float32, torch.complex64
        self["half"] = lambda tensor: tensor.to(self["F16"])
        self["f32"] = lambda tensor: tensor.to(self["F32"])
        self["tensor"] = self.tensor

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


@dataclass(frozen=True)
class Read:
    """
    lines    of each call, what its results are read as
    answers  names of the rules that had an answer
    """

    graph: Graph
    lines: dict[str, list[Any]]
    nodes: dict[str, list[Any]]
    answers: set[str]
    names: Names
    real: Real


@cache
def read(setting: Setting) -> Read:
    """All calls, traced and read as one graph."""
    sizes = sizes_of(setting)
    tensors = tensors_of(setting, sizes)
    counts = dict[str, int]()

    def run(*given: Tensor) -> list[Tensor]:
        names, found = Names(setting, dict(zip(tensors.given, given, strict=True)), True), []
        for call, _ in LINES:
            results = listed(names.run(call))
            counts[call] = len(results)
            found += results
        return found

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def fake(name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.float() if tensor.is_floating_point() else tensor
        kinds = [
            DimDynamic.DUCK if one == "T" and setting.is_symbolic else DimDynamic.STATIC
            for one in tensors.shapes[name]
        ]
        context = StatelessSymbolicContext(dynamic_sizes=kinds)
        return mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(name))

    fakes = [fake(name, tensor) for name, tensor in tensors.given.items()]
    with mode, torch.no_grad():
        gm = make_fx(run, pre_dispatch=True)(*fakes)
    leaves = {}
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), tensors.given, strict=True):
        node.meta[ARGUMENT] = name not in tensors.model
        leaves[node.name] = tensors.given[name]
    with answers_of_rules() as answers:
        graph = Graph(gm)
    outputs = iter(gm.graph.output_node().args[0])
    nodes = {call: [next(outputs) for _ in range(counts[call])] for call, _ in LINES}
    lines = {call: [graph.readings[node] for node in found] for call, found in nodes.items()}
    return Read(graph, lines, nodes, answers, Names(setting, tensors.given, False), Real(leaves))


def listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


@contextmanager
def answers_of_rules() -> Iterator[set[str]]:
    found, rules = set[str](), dict(RULES)

    def noted(name: str) -> Callable[..., Any]:
        def rule(*args: Any, **options: Any) -> Any:
            answer = rules[name](*args, **options)
            found.add(name)
            return answer

        return rule

    RULES.update({name: noted(name) for name in rules})
    try:
        yield found
    finally:
        RULES.update(rules)


@contextmanager
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def assert_equal(found: Tensor, wanted: Tensor) -> None:
    found, wanted = wide(found), wide(wanted)
    assert found.shape == wanted.shape
    if not wanted.is_floating_point():
        assert torch.equal(found.long(), wanted.long())
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


def is_opaque(reading: Any) -> bool:
    return any(value.op == "opaque" for value in order(values_of(reading)))


# of these calls only the first result is more than a name
PARTS = ("max.dim", "min.dim")


@pytest.mark.parametrize("call, wanted", LINES, ids=[call for call, _ in LINES])
@pytest.mark.parametrize("setting", [ACTIVE, BESIDE, SYMBOLIC], ids=["active", "beside", "symbolic"])
def test_a_call_is_what_torch_computes(setting: Setting, call: str, wanted: str) -> None:
    found = read(setting)
    with float64_by_default():  # of numbers in a call
        results = listed(found.names.run(wanted))
    readings = found.lines[call]
    assert len(results) == len(readings)
    for place, (reading, node, result) in enumerate(
        zip(readings, found.nodes[call], results, strict=True)
    ):
        if not is_known(values_of(reading)):
            is_expected = not setting.is_active or (place and call.startswith(PARTS))
            assert is_expected, [one for one in order(values_of(reading)) if one.op == "opaque"]
        elif isinstance(reading, Pair):
            assert_equal(found.real(reading.real), result.real)
            assert_equal(found.real(reading.imag), result.imag)
        else:
            dtype = node.meta["val"].dtype
            is_same = reading.dtype == dtype
            assert is_same or (reading.active and reading.is_float)
            assert_equal(found.real(reading), result)


def test_every_rule_has_a_call() -> None:
    assert set(RULES) - read(ACTIVE).answers == set(ELSEWHERE)
