"""The operator table: one row for each operator, and all that the pass knows it by.

A row says

names   the operator; others that compute the same of the same arguments behind it. One of ``aten``
        goes without its namespace. Every room calls the operator by the first name
class   what it does to values (:class:`Kind`); ``-``: as torch's tags and the schema say
form    what it makes of its arguments (:class:`Form`); ``-``: none of those

An operator without a row is opaque.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Kind(Enum):
    """The classes; each value is the phrase that messages use."""

    # each element of the result is one element of an input, or a literal
    MOVEMENT = "moves elements"
    # wherever it is defined; see analytic.py for where that is
    ANALYTIC = "computes an analytic function"
    # clamp, where, max, round, comparisons, casts to integers
    CHOICE = "picks by the values it reads"
    GATHER = "moves elements by the values of an index"
    WRITER = "writes into its first argument"
    RANDOM = "is random"
    EFFECT = "has an effect beside its result"
    OPAQUE = "is not known"


class Form(Enum):
    """What an operator makes of its arguments."""

    RESIZE = "resize"  # keeps every element and their order, and names the sizes of its result
    RESHAPE = "reshape"  # keeps every element and their order
    EXPAND = "expand"  # repeats along axes, and names the sizes of its result
    RUN = "run"  # takes some of the elements along one axis: which, its arguments say
    PERMUTE = "permute"  # puts its axes in another order
    VIEW = "view"  # re-indexes its first argument otherwise
    DIAGONAL = "diagonal"
    JOIN = "join"  # puts tensors side by side
    CAST = "cast"
    # tensors of a given shape, whose elements do not depend on the argument that lends it
    ZEROS = "zeros"
    ONES = "ones"
    UNWRITTEN = "unwritten"
    FULL = "full"
    STRIDED = "strided"
    COUNT = "count"  # positions, from a start by steps
    ELEMENTWISE = "elementwise"  # operands are broadcast from their last axes
    ROTATION = "rotation"
    REDUCTION = "reduction"  # along axes that it names (``dim``); all where it names none
    NORM = "norm"  # of the last axes
    PRODUCT = "product"
    PLACED = "placed"  # writes where literals of the call say
    # by itself, whose weights are packed, scaled or convolved with: never element-wise
    LAYER = "layer"
    DROPOUT = "dropout"  # random only with a probability, and in training
    STATED = "stated"  # gives nothing: a tensor has the dtype, and the device, that was traced
    OTHER = "-"


@dataclass(frozen=True, eq=False)
class Row:
    names: tuple[str, ...] = ()
    kind: Kind | None = None
    form: Form = Form.OTHER

    @cached_property
    def word(self) -> str:
        """What every room calls the operator; "" for one without a row."""
        name = self.names[0] if self.names else ""
        return name if name.startswith(("python::", "prims::")) else name.rpartition(":")[2]


def _row(line: str) -> Row:
    names, kind, form = (cell.strip() for cell in line.split("|"))
    return Row(
        tuple(name if "::" in name else f"aten::{name}" for name in names.split()),
        None if kind == "-" else Kind[kind.upper()],
        Form(form),
    )


# names | class | form
_ROWS = """
reshape                    | movement | resize
_assert_tensor_metadata    | -        | stated
_reshape_alias             | movement | resize
_unsafe_view               | movement | resize
view                       | movement | resize
view_copy                  | movement | resize
alias                      | movement | reshape
alias_copy                 | movement | reshape
clone                      | movement | reshape
contiguous                 | movement | reshape
detach                     | movement | reshape
detach_copy                | movement | reshape
flatten                    | movement | reshape
lift_fresh                 | movement | reshape
lift_fresh_copy            | movement | reshape
npu::npu_format_cast       | movement | reshape
_reshape_copy              | movement | reshape
squeeze                    | movement | reshape
squeeze_copy               | movement | reshape
unflatten                  | movement | reshape
unsqueeze                  | movement | reshape
unsqueeze_copy             | movement | reshape
view_as                    | movement | reshape
expand                     | movement | expand
expand_copy                | movement | expand
chunk                      | movement | run
narrow                     | movement | run
select                     | movement | run
select_copy                | movement | run
slice                      | movement | run
slice_copy                 | movement | run
split                      | movement | run
split_copy                 | movement | run
split_with_sizes           | movement | run
split_with_sizes_copy      | movement | run
tensor_split               | movement | run
unbind                     | movement | run
unbind_copy                | movement | run
unsafe_chunk               | movement | run
unsafe_split               | movement | run
expand_as                  | movement | view
mT                         | movement | view
matrix_H                   | movement | view
movedim                    | movement | view
npu::npu_format_cast_      | movement | view
numpy_T                    | movement | view
permute                    | movement | permute
permute_copy               | movement | permute
swapaxes swapdims          | movement | permute
t                          | movement | permute
t_copy                     | movement | permute
transpose                  | movement | permute
transpose_copy             | movement | permute
diagonal                   | movement | diagonal
diagonal_copy              | movement | diagonal
cat concat concatenate     | movement | join
hstack                     | movement | join
stack                      | movement | join
vstack                     | movement | join
npu::npu_dtype_cast npu::_npu_dtype_cast | movement | cast
prims::convert_element_type | movement | cast
to                         | movement | cast
_to_copy                   | movement | cast
type_as                    | movement | cast
new_zeros                  | movement | zeros
zeros_like                 | movement | zeros
new_ones                   | movement | ones
ones_like                  | movement | ones
empty_like                 | movement | unwritten
new_empty                  | movement | unwritten
full_like                  | movement | full
new_full                   | movement | full
new_empty_strided          | movement | strided
complex                    | movement | elementwise
_conj                      | movement | elementwise
conj                       | movement | elementwise
_conj_physical             | movement | elementwise
conj_physical              | movement | elementwise
fill                       | movement | elementwise
imag                       | movement | elementwise
real                       | movement | elementwise
resolve_conj               | movement | elementwise
resolve_neg                | movement | elementwise
arange                     | movement | count
atleast_1d                 | movement | -
atleast_2d                 | movement | -
atleast_3d                 | movement | -
block_diag                 | movement | -
broadcast_tensors          | movement | -
broadcast_to               | movement | -
channel_shuffle            | movement | -
column_stack               | movement | -
constant_pad_nd            | movement | -
diag_embed                 | movement | -
dstack                     | movement | -
empty                      | movement | -
eye                        | movement | -
flip | movement | -
fliplr                     | movement | -
flipud                     | movement | -
full                       | movement | -
linspace                   | movement | -
meshgrid                   | movement | -
_neg_view                  | movement | -
ones                       | movement | -
pad                        | movement | -
pixel_shuffle              | movement | -
pixel_unshuffle            | movement | -
prims::broadcast_in_dim    | movement | -
prims::iota                | movement | count
prims::squeeze             | movement | -
prims::transpose           | movement | -
python::getitem _operator::getitem | movement | -
ravel                      | movement | -
repeat | movement | -
repeat_interleave | movement | -
roll | movement | -
rot90                      | movement | -
scalar_tensor              | movement | -
tensor                     | movement | -
tile                       | movement | -
tril                       | movement | -
triu                       | movement | -
unfold | movement | -
view_as_complex            | movement | -
view_as_complex_copy       | movement | -
view_as_real               | movement | -
view_as_real_copy          | movement | -
zero                       | movement | -
zeros                      | movement | -

add                        | analytic | elementwise
addcdiv                    | analytic | elementwise
addcmul                    | analytic | elementwise
asinh                      | analytic | elementwise
atan                       | analytic | elementwise
cos                        | analytic | elementwise
cosh                       | analytic | elementwise
deg2rad                    | analytic | elementwise
div divide true_divide     | analytic | elementwise
erf                        | analytic | elementwise
erfc                       | analytic | elementwise
exp                        | analytic | elementwise
exp2                       | analytic | elementwise
expm1                      | analytic | elementwise
float_power                | analytic | elementwise
gelu                       | analytic | elementwise
lerp                       | analytic | elementwise
log                        | analytic | elementwise
log10                      | analytic | elementwise
log1p                      | analytic | elementwise
log2                       | analytic | elementwise
logaddexp                  | analytic | elementwise
logaddexp2                 | analytic | elementwise
logit                      | analytic | elementwise
mish                       | analytic | elementwise
mul multiply               | analytic | elementwise
neg negative               | analytic | elementwise
polar                      | analytic | elementwise
pow                        | analytic | elementwise
python::add _operator::add | analytic | elementwise
python::mul _operator::mul | analytic | elementwise
python::neg                | analytic | elementwise
python::pow                | analytic | elementwise
python::sub _operator::sub | analytic | elementwise
python::truediv _operator::truediv | analytic | elementwise
rad2deg                    | analytic | elementwise
reciprocal                 | analytic | elementwise
rsqrt                      | analytic | elementwise
rsub                       | analytic | elementwise
sigmoid                    | analytic | elementwise
silu                       | analytic | elementwise
sin                        | analytic | elementwise
sinc                       | analytic | elementwise
sinh                       | analytic | elementwise
sqrt                       | analytic | elementwise
square                     | analytic | elementwise
sub subtract               | analytic | elementwise
tan                        | analytic | elementwise
tanh                       | analytic | elementwise
npu::npu_interleave_rope   | analytic | rotation
npu::npu_rotary_mul        | analytic | rotation
cumsum                     | analytic | reduction
linalg_vector_norm         | analytic | reduction
log_softmax                | analytic | reduction
_log_softmax               | analytic | reduction
logsumexp                  | analytic | reduction
mean                       | analytic | reduction
norm                       | analytic | reduction
prod                       | analytic | reduction
softmax _softmax           | analytic | reduction
std                        | analytic | reduction
std_mean                   | analytic | reduction
sum | analytic | reduction
var                        | analytic | reduction
var_mean                   | analytic | reduction
_fused_rms_norm            | analytic | norm
layer_norm                 | analytic | norm
native_layer_norm          | analytic | norm
npu::npu_add_rms_norm      | analytic | norm
npu::npu_rms_norm          | analytic | norm
rms_norm                   | analytic | norm
addbmm                     | analytic | product
addmm                      | analytic | product
addmv                      | analytic | product
baddbmm                    | analytic | product
bmm                        | analytic | product
dot                        | analytic | product
einsum                     | analytic | product
inner                      | analytic | product
_int_mm                    | analytic | product
kron                       | analytic | product
linear                     | analytic | product
matmul                     | analytic | product
mm                         | analytic | product
mv                         | analytic | product
npu::npu_linear            | analytic | product
npu::npu_transpose_batchmatmul | analytic | product
outer                      | analytic | product
tensordot                  | analytic | product
vdot                       | analytic | product

abs absolute               | choice   | elementwise
clamp clip | choice | elementwise
clamp_max                  | choice   | elementwise
clamp_min                  | choice   | elementwise
masked_fill | choice | elementwise
maximum                    | choice   | elementwise
minimum                    | choice   | elementwise
relu | choice | elementwise
round                      | choice   | elementwise
where                      | choice   | elementwise
acos                       | choice   | -
acosh                      | choice   | -
all                        | choice   | -
amax | choice | -
amin | choice | -
aminmax                    | choice   | -
angle                      | choice   | -
any                        | choice   | -
argmax                     | choice   | -
argmin                     | choice   | -
argsort                    | choice   | -
asin                       | choice   | -
atan2                      | choice   | -
atanh                      | choice   | -
bitwise_and __and__        | choice   | -
bitwise_left_shift __lshift__ | choice   | -
bitwise_not                | choice   | -
bitwise_or __or__          | choice   | -
bitwise_right_shift __rshift__ | choice   | -
bitwise_xor __xor__        | choice   | -
bucketize                  | choice   | -
cdist                      | choice   | -
ceil                       | choice   | -
celu                       | choice   | -
copysign                   | choice   | -
count_nonzero              | choice   | -
cummax                     | choice   | -
cummin                     | choice   | -
cumprod                    | choice   | -
dequantize                 | choice   | -
digamma                    | choice   | -
dist                       | choice   | -
elu                        | choice   | -
eq                         | choice   | -
equal                      | choice   | -
fake_quantize_per_tensor_affine | choice   | -
floor                      | choice   | -
floor_divide               | choice   | -
fmax                       | choice   | -
fmin                       | choice   | -
fmod                       | choice   | -
frac                       | choice   | -
frexp                      | choice   | -
gcd                        | choice   | -
ge greater_equal           | choice   | -
gt greater                 | choice   | -
hardshrink                 | choice   | -
hardsigmoid                | choice   | -
hardswish                  | choice   | -
hardtanh                   | choice   | -
heaviside                  | choice   | -
hypot                      | choice   | -
isclose                    | choice   | -
isfinite                   | choice   | -
isin                       | choice   | -
isinf                      | choice   | -
isnan                      | choice   | -
isneginf                   | choice   | -
isposinf                   | choice   | -
isreal                     | choice   | -
kthvalue                   | choice   | -
lcm                        | choice   | -
ldexp                      | choice   | -
le less_equal              | choice   | -
leaky_relu                 | choice   | -
lgamma                     | choice   | -
log_sigmoid                | choice   | -
log_sigmoid_forward        | choice   | -
logical_and                | choice   | -
logical_not                | choice   | -
logical_or                 | choice   | -
logical_xor                | choice   | -
lt less                    | choice   | -
masked_select              | choice   | -
max                        | choice   | -
max_pool1d                 | choice   | -
max_pool2d                 | choice   | -
max_pool3d                 | choice   | -
median                     | choice   | -
min                        | choice   | -
mode                       | choice   | -
nan_to_num                 | choice   | -
nanmean                    | choice   | -
nanmedian                  | choice   | -
nanquantile                | choice   | -
nansum                     | choice   | -
ne not_equal               | choice   | -
nextafter                  | choice   | -
nonzero                    | choice   | -
npu::npu_dynamic_mx_quant  | choice   | -
npu::npu_dynamic_quant     | choice   | -
npu::npu_quantize          | choice   | -
prelu                      | choice   | -
python::eq                 | choice   | -
python::floordiv           | choice   | -
python::ge                 | choice   | -
python::gt                 | choice   | -
python::le                 | choice   | -
python::lt                 | choice   | -
python::mod                | choice   | -
python::ne                 | choice   | -
quantile                   | choice   | -
quantize_per_channel       | choice   | -
quantize_per_tensor        | choice   | -
relu6                      | choice   | -
remainder                  | choice   | -
renorm                     | choice   | -
searchsorted               | choice   | -
selu                       | choice   | -
sgn                        | choice   | -
sign                       | choice   | -
signbit                    | choice   | -
softplus                   | choice   | -
softshrink                 | choice   | -
sort                       | choice   | -
special_xlog1py            | choice   | -
threshold                  | choice   | -
topk                       | choice   | -
trunc fix                  | choice   | -
_unique2                   | choice   | -
unique_consecutive         | choice   | -
xlogy                      | choice   | -

embedding                  | gather   | -
_embedding_bag             | gather   | -
embedding_bag              | gather   | -
gather                     | gather   | -
index _unsafe_index | gather | -
index_select | gather | -
take                       | gather   | -
take_along_dim             | gather   | -

copy                       | writer   | placed
diagonal_scatter           | writer   | placed
select_scatter             | writer   | placed
slice_scatter              | writer   | placed
index_add                  | writer   | -
index_copy                 | writer   | -
index_fill                 | writer   | -
index_put _unsafe_index_put | writer   | -
index_reduce               | writer   | -
masked_scatter             | writer   | -
npu::npu_scatter_nd_update | writer   | -
scatter                    | writer   | -
scatter_add                | writer   | -
scatter_reduce             | writer   | -

copy_                      | effect   | -
npu::npu_kv_rmsnorm_rope_cache | effect | -
npu::npu_mla_prolog        | effect   | -
npu::npu_mla_prolog_v2     | effect   | -

conv1d                     | -        | layer
conv2d                     | -        | layer
convolution                | -        | layer
_grouped_mm                | -        | layer
_scaled_grouped_mm         | -        | layer
_scaled_mm                 | -        | layer
_weight_int4pack_mm        | -        | layer
_weight_int4pack_mm_for_cpu | -        | layer
_weight_int8pack_mm        | -        | layer
alpha_dropout              | -        | dropout
dropout                    | -        | dropout
feature_dropout            | -        | dropout
atb::npu_mla_preprocess    | -        | -
empty_permuted             | -        | -
empty_strided              | -        | -
narrow_copy                | -        | -
npu::npu_dynamic_block_quant | -        | -
npu::npu_kv_rmsnorm_rope_cache_v2_functional|-|-
npu::npu_mla_prolog_v3     | -        | -
npu::npu_mla_prolog_v3_functional | -        | -
npu::npu_quant_matmul | - | -
npu::npu_scatter_pa_kv_cache_functional | -        | -
npu::npu_sparse_flash_attention | -        | -
npu::npu_weight_quant_batchmatmul | -        | -
scaled_dot_product_attention | -        | -
sym_numel                  | -        | -
sym_size                   | -        | -
"""

ROWS = tuple(_row(line) for line in _ROWS.splitlines() if line)
NO_ROW = Row()
_BY_NAME = {name: row for row in ROWS for name in row.names}


def row_of(name: str) -> Row:
    """The row of ``namespace::name``."""
    return _BY_NAME.get(name, NO_ROW)


def words(*forms: Form) -> frozenset[str]:
    """The operators of these forms."""
    return frozenset(row.word for row in ROWS if row.form in forms)
