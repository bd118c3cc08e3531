"""The operator table: one row for each operator, and all that the pass knows it by.

A row says

names   the operator; others that compute the same of the same arguments behind it. One of ``aten``
        goes without its namespace. Every room calls the operator by the first name
class   what it does to values (:class:`Kind`); ``-``: as torch's tags and the schema say
form    what it makes of its arguments (:class:`Form`); ``-``: none of those
range   the rule of ``fx/range_rules.py`` for the numbers in its result
token   the rule of ``fx/token_rules.py`` for the axis of tokens; ``-``: as its form says
field   the rule of ``prove/`` that writes it in exact arithmetic; ``-``: views are moved, all
        else is a function of which nothing is known

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
    OTHER = "-"


@dataclass(frozen=True)
class Row:
    names: tuple[str, ...] = ()
    kind: Kind | None = None
    form: Form = Form.OTHER
    range: str = ""
    token: str = ""
    field: str = ""

    @cached_property
    def word(self) -> str:
        """What every room calls the operator; "" for one without a row."""
        name = self.names[0] if self.names else ""
        return name if name.startswith(("python::", "prims::")) else name.rpartition(":")[2]


def _row(line: str) -> Row:
    names, kind, form, *rules = (cell.strip() for cell in line.split("|"))
    return Row(
        tuple(name if "::" in name else f"aten::{name}" for name in names.split()),
        None if kind == "-" else Kind[kind.upper()],
        Form(form),
        *(rule.strip("-") for rule in rules),
    )


# names | class | form | range | token | field
_ROWS = """
reshape                     | movement | resize      | -              | -              | reshaped
_reshape_alias              | movement | resize      | -              | -              | reshaped
_unsafe_view                | movement | resize      | -              | -              | reshaped
view                        | movement | resize      | -              | -              | reshaped
view_copy                   | movement | resize      | -              | -              | reshaped
alias                       | movement | reshape     | -              | -              | same
alias_copy                  | movement | reshape     | -              | -              | same
clone                       | movement | reshape     | -              | -              | same
contiguous                  | movement | reshape     | -              | -              | same
detach                      | movement | reshape     | -              | -              | same
detach_copy                 | movement | reshape     | -              | -              | same
flatten                     | movement | reshape     | -              | -              | reshaped
lift_fresh                  | movement | reshape     | -              | -              | same
lift_fresh_copy             | movement | reshape     | -              | -              | same
npu::npu_format_cast        | movement | reshape     | -              | -              | same
_reshape_copy               | movement | reshape     | -              | -              | reshaped
squeeze                     | movement | reshape     | -              | -              | reshaped
squeeze_copy                | movement | reshape     | -              | -              | reshaped
unflatten                   | movement | reshape     | -              | -              | reshaped
unsqueeze                   | movement | reshape     | -              | -              | reshaped
unsqueeze_copy              | movement | reshape     | -              | -              | reshaped
view_as                     | movement | reshape     | -              | -              | reshaped
expand                      | movement | expand      | -              | expanded       | expanded
expand_copy                 | movement | expand      | -              | expanded       | expanded
chunk                       | movement | run         | -              | sliced         | split
narrow                      | movement | run         | -              | sliced         | sliced
select                      | movement | run         | -              | selected       | selected
select_copy                 | movement | run         | -              | selected       | selected
slice                       | movement | run         | -              | sliced         | sliced
slice_copy                  | movement | run         | -              | sliced         | sliced
split                       | movement | run         | -              | sliced         | split
split_copy                  | movement | run         | -              | sliced         | split
split_with_sizes            | movement | run         | -              | sliced         | split
split_with_sizes_copy       | movement | run         | -              | sliced         | split
tensor_split                | movement | run         | -              | sliced         | split
unbind                      | movement | run         | -              | selected       | split
unbind_copy                 | movement | run         | -              | selected       | split
unsafe_chunk                | movement | run         | -              | sliced         | split
unsafe_split                | movement | run         | -              | sliced         | split
expand_as                   | movement | view        | -              | -              | expanded
mT                          | movement | view        | -              | -              | natively
matrix_H                    | movement | view        | -              | -              | -
movedim                     | movement | view        | -              | -              | natively
npu::npu_format_cast_       | movement | view        | -              | -              | same
numpy_T                     | movement | view        | -              | -              | natively
permute                     | movement | view        | -              | permuted       | natively
permute_copy                | movement | view        | -              | permuted       | natively
swapaxes swapdims           | movement | view        | -              | transposed     | natively
t                           | movement | view        | -              | transposed     | natively
t_copy                      | movement | view        | -              | transposed     | natively
transpose                   | movement | view        | -              | transposed     | natively
transpose_copy              | movement | view        | -              | transposed     | natively
diagonal                    | movement | diagonal    | -              | diagonal       | diagonal
diagonal_copy               | movement | diagonal    | -              | diagonal       | diagonal
cat concat concatenate      | movement | join        | union          | joined         | joined
hstack                      | movement | join        | -              | -              | -
stack                       | movement | join        | union          | joined         | joined
vstack                      | movement | join        | -              | -              | -
npu::npu_dtype_cast npu::_npu_dtype_cast | movement | cast | - | - | cast
prims::convert_element_type | movement | cast        | -              | -              | cast
to                          | movement | cast        | -              | -              | cast
_to_copy                    | movement | cast        | -              | -              | cast
type_as                     | movement | cast        | -              | -              | cast
new_zeros                   | movement | zeros       | -              | -              | zeros
zeros_like                  | movement | zeros       | -              | -              | zeros
new_ones                    | movement | ones        | -              | -              | ones
ones_like                   | movement | ones        | -              | -              | ones
empty_like                  | movement | unwritten   | -              | -              | empty
new_empty                   | movement | unwritten   | -              | -              | empty
full_like                   | movement | full        | -              | -              | filled
new_full                    | movement | full        | -              | -              | filled
new_empty_strided           | movement | strided     | -              | -              | empty
complex                     | movement | elementwise | -              | -              | complex
_conj                       | movement | elementwise | -              | -              | conjugate
conj                        | movement | elementwise | -              | -              | conjugate
_conj_physical              | movement | elementwise | -              | -              | conjugate
conj_physical               | movement | elementwise | -              | -              | conjugate
fill                        | movement | elementwise | -              | -              | filled
imag                        | movement | elementwise | -              | -              | part
real                        | movement | elementwise | -              | -              | part
resolve_conj                | movement | elementwise | -              | -              | same
resolve_neg                 | movement | elementwise | -              | -              | same
arange                      | movement | count       | counted        | -              | counted
atleast_1d                  | movement | -           | -              | -              | -
atleast_2d                  | movement | -           | -              | -              | -
atleast_3d                  | movement | -           | -              | -              | -
block_diag                  | movement | -           | -              | -              | -
broadcast_tensors           | movement | -           | -              | -              | -
broadcast_to                | movement | -           | -              | -              | expanded
channel_shuffle             | movement | -           | -              | -              | -
column_stack                | movement | -           | -              | -              | -
constant_pad_nd             | movement | -           | -              | padded         | padded
diag_embed                  | movement | -           | -              | -              | -
dstack                      | movement | -           | -              | -              | -
empty                       | movement | -           | -              | -              | empty
eye                         | movement | -           | -              | -              | eye
flip                        | movement | -           | same_as_input  | within_rows    | turned
fliplr                      | movement | -           | -              | -              | -
flipud                      | movement | -           | -              | -              | -
full                        | movement | -           | -              | -              | filled
linspace                    | movement | -           | -              | -              | -
meshgrid                    | movement | -           | -              | -              | -
_neg_view                   | movement | -           | -              | -              | -
ones                        | movement | -           | -              | -              | ones
pad                         | movement | -           | -              | padded         | padded
pixel_shuffle               | movement | -           | -              | -              | -
pixel_unshuffle             | movement | -           | -              | -              | -
prims::broadcast_in_dim     | movement | -           | -              | -              | -
prims::iota                 | movement | count       | counted        | -              | counted
prims::squeeze              | movement | -           | -              | -              | -
prims::transpose            | movement | -           | -              | -              | -
python::getitem _operator::getitem | movement | -           | -              | -              | -
ravel                       | movement | -           | -              | -              | reshaped
repeat                      | movement | -           | same_as_input  | repeated       | turned
repeat_interleave           | movement | -           | same_as_input  | repeated       | turned
roll                        | movement | -           | same_as_input  | within_rows    | turned
rot90                       | movement | -           | -              | -              | -
scalar_tensor               | movement | -           | -              | -              | filled
tensor                      | movement | -           | -              | -              | -
tile                        | movement | -           | -              | repeated       | turned
tril                        | movement | -           | -              | -              | triangle
triu                        | movement | -           | -              | -              | triangle
unfold                      | movement | -           | -              | -              | -
view_as_complex             | movement | -           | -              | of_pairs       | as_complex
view_as_complex_copy        | movement | -           | -              | -              | as_complex
view_as_real                | movement | -           | -              | of_pairs       | as_real
view_as_real_copy           | movement | -           | -              | -              | as_real
zero                        | movement | -           | -              | -              | zeros
zeros                       | movement | -           | -              | -              | zeros

add                         | analytic | elementwise | added          | -              | added
addcdiv                     | analytic | elementwise | -              | -              | addc
addcmul                     | analytic | elementwise | product_added  | -              | addc
asinh                       | analytic | elementwise | -              | -              | -
atan                        | analytic | elementwise | -              | -              | -
cos                         | analytic | elementwise | sine           | -              | cos
cosh                        | analytic | elementwise | -              | -              | -
deg2rad                     | analytic | elementwise | -              | -              | -
div divide true_divide      | analytic | elementwise | quotient       | -              | div
erf                         | analytic | elementwise | -              | -              | -
erfc                        | analytic | elementwise | -              | -              | -
exp                         | analytic | elementwise | positive       | -              | exp
exp2                        | analytic | elementwise | positive       | -              | -
expm1                       | analytic | elementwise | -              | -              | -
float_power                 | analytic | elementwise | -              | -              | -
gelu                        | analytic | elementwise | -              | -              | -
lerp                        | analytic | elementwise | -              | -              | lerp
log                         | analytic | elementwise | -              | -              | -
log10                       | analytic | elementwise | -              | -              | -
log1p                       | analytic | elementwise | -              | -              | -
log2                        | analytic | elementwise | -              | -              | -
logaddexp                   | analytic | elementwise | -              | -              | -
logaddexp2                  | analytic | elementwise | -              | -              | -
logit                       | analytic | elementwise | -              | -              | -
mish                        | analytic | elementwise | -              | -              | -
mul multiply                | analytic | elementwise | product        | -              | mul
neg negative                | analytic | elementwise | negated        | -              | neg
polar                       | analytic | elementwise | -              | -              | polar
pow                         | analytic | elementwise | power          | -              | pow
python::add _operator::add  | analytic | elementwise | -              | -              | added
python::mul _operator::mul  | analytic | elementwise | -              | -              | mul
python::neg                 | analytic | elementwise | -              | -              | -
python::pow                 | analytic | elementwise | -              | -              | -
python::sub _operator::sub  | analytic | elementwise | -              | -              | added
python::truediv _operator::truediv | analytic | elementwise | -              | -              | div
rad2deg                     | analytic | elementwise | -              | -              | -
reciprocal                  | analytic | elementwise | inverse        | -              | reciprocal
rsqrt                       | analytic | elementwise | inverse_root   | -              | rsqrt
rsub                        | analytic | elementwise | -              | -              | added
sigmoid                     | analytic | elementwise | share          | -              | sigmoid
silu                        | analytic | elementwise | -              | -              | silu
sin                         | analytic | elementwise | sine           | -              | sin
sinc                        | analytic | elementwise | -              | -              | -
sinh                        | analytic | elementwise | -              | -              | -
sqrt                        | analytic | elementwise | root           | -              | sqrt
square                      | analytic | elementwise | square         | -              | square
sub subtract                | analytic | elementwise | subtracted     | -              | added
tan                         | analytic | elementwise | -              | -              | -
tanh                        | analytic | elementwise | sine           | -              | -
npu::npu_interleave_rope | analytic | rotation | - | - | interleave_rope
npu::npu_rotary_mul         | analytic | rotation    | -              | -              | rotary_mul
cumsum                      | analytic | reduction   | sum_along      | within_rows    | -
linalg_vector_norm          | analytic | reduction   | unsigned       | reduced        | norm
log_softmax                 | analytic | reduction   | -              | within_rows    | -
_log_softmax                | analytic | reduction   | -              | within_rows    | -
logsumexp                   | analytic | reduction   | -              | reduced        | -
mean                        | analytic | reduction   | same_as_input  | reduced        | mean
norm                        | analytic | reduction   | unsigned       | reduced        | norm
prod                        | analytic | reduction   | -              | reduced        | -
softmax _softmax            | analytic | reduction   | fraction       | within_rows    | softmax
std                         | analytic | reduction   | unsigned       | reduced        | var
std_mean                    | analytic | reduction   | -              | -              | var
sum                         | analytic | reduction   | sum_along      | reduced        | sum
var                         | analytic | reduction   | unsigned       | reduced        | var
var_mean                    | analytic | reduction   | -              | -              | var
_fused_rms_norm             | analytic | norm        | -              | normed         | rms_norm
layer_norm                  | analytic | norm        | -              | normed         | layer_norm
native_layer_norm           | analytic | norm        | -              | normed         | layer_norm
npu::npu_add_rms_norm | analytic | norm | - | normed | npu_add_rms_norm
npu::npu_rms_norm | analytic | norm | - | normed | npu_rms_norm
rms_norm                    | analytic | norm        | -              | normed         | rms_norm
addbmm                      | analytic | product     | -              | -              | -
addmm                       | analytic | product     | -              | -              | addmm
addmv                       | analytic | product     | -              | -              | -
baddbmm                     | analytic | product     | -              | -              | addmm
bmm                         | analytic | product     | -              | -              | matmul
dot                         | analytic | product     | -              | -              | matmul
einsum                      | analytic | product     | -              | -              | einsum_of
inner                       | analytic | product     | -              | -              | -
_int_mm                     | analytic | product     | -              | -              | matmul
kron                        | analytic | product     | -              | -              | -
linear                      | analytic | product     | -              | -              | linear
matmul                      | analytic | product     | -              | -              | matmul
mm                          | analytic | product     | -              | -              | matmul
mv                          | analytic | product     | -              | -              | matmul
npu::npu_linear             | analytic | product     | -              | -              | -
npu::npu_transpose_batchmatmul | analytic | product | - | - | transposed_product
outer                       | analytic | product     | -              | -              | -
tensordot                   | analytic | product     | -              | -              | -
vdot                        | analytic | product     | -              | -              | -

abs absolute                | choice   | elementwise | magnitude      | -              | abs
clamp clip                  | choice   | elementwise | clamped        | -              | clamped
clamp_max                   | choice   | elementwise | clamped        | -              | clamped
clamp_min                   | choice   | elementwise | clamped        | -              | clamped
masked_fill                 | choice   | elementwise | filled_where   | -              | masked_fill
maximum                     | choice   | elementwise | largest        | -              | greater
minimum                     | choice   | elementwise | smallest       | -              | clip
relu                        | choice   | elementwise | rectified      | -              | relu
round                       | choice   | elementwise | -              | -              | round
where                       | choice   | elementwise | either         | -              | where
acos                        | choice   | -           | -              | -              | -
acosh                       | choice   | -           | -              | -              | -
all                         | choice   | -           | -              | -              | -
amax                        | choice   | -           | same_as_input  | reduced        | largest
amin                        | choice   | -           | same_as_input  | reduced        | largest
aminmax                     | choice   | -           | -              | -              | -
angle                       | choice   | -           | -              | -              | -
any                         | choice   | -           | -              | -              | -
argmax                      | choice   | -           | unsigned       | -              | -
argmin                      | choice   | -           | unsigned       | -              | -
argsort                     | choice   | -           | unsigned       | -              | -
asin                        | choice   | -           | -              | -              | -
atan2                       | choice   | -           | -              | -              | -
atanh                       | choice   | -           | -              | -              | -
bitwise_and __and__         | choice   | -           | masked         | -              | compare
bitwise_left_shift __lshift__ | choice   | -           | shifted_left   | -              | -
bitwise_not                 | choice   | -           | -              | -              | not
bitwise_or __or__           | choice   | -           | -              | -              | compare
bitwise_right_shift __rshift__ | choice   | -           | shifted_right  | -              | -
bitwise_xor __xor__         | choice   | -           | -              | -              | compare
bucketize                   | choice   | -           | unsigned       | -              | -
cdist                       | choice   | -           | -              | -              | -
ceil                        | choice   | -           | -              | -              | -
celu                        | choice   | -           | -              | -              | -
copysign                    | choice   | -           | -              | -              | -
count_nonzero               | choice   | -           | -              | -              | -
cummax                      | choice   | -           | -              | -              | -
cummin                      | choice   | -           | -              | -              | -
cumprod                     | choice   | -           | -              | -              | -
dequantize                  | choice   | -           | -              | -              | -
digamma                     | choice   | -           | -              | -              | -
dist                        | choice   | -           | -              | -              | -
elu                         | choice   | -           | -              | -              | -
eq                          | choice   | -           | -              | -              | compare
equal                       | choice   | -           | -              | -              | -
fake_quantize_per_tensor_affine | choice   | -           | -              | -              | -
floor                       | choice   | -           | -              | -              | -
floor_divide | choice | - | floor_quotient | - | floor_divide
fmax                        | choice   | -           | -              | -              | -
fmin                        | choice   | -           | -              | -              | -
fmod                        | choice   | -           | -              | -              | -
frac                        | choice   | -           | -              | -              | -
frexp                       | choice   | -           | -              | -              | -
gcd                         | choice   | -           | -              | -              | -
ge greater_equal            | choice   | -           | -              | -              | compare
gt greater                  | choice   | -           | -              | -              | compare
hardshrink                  | choice   | -           | -              | -              | -
hardsigmoid                 | choice   | -           | -              | -              | -
hardswish                   | choice   | -           | -              | -              | -
hardtanh                    | choice   | -           | -              | -              | -
heaviside                   | choice   | -           | -              | -              | -
hypot                       | choice   | -           | -              | -              | -
isclose                     | choice   | -           | -              | -              | -
isfinite                    | choice   | -           | -              | -              | -
isin                        | choice   | -           | -              | -              | -
isinf                       | choice   | -           | -              | -              | -
isnan                       | choice   | -           | -              | -              | -
isneginf                    | choice   | -           | -              | -              | -
isposinf                    | choice   | -           | -              | -              | -
isreal                      | choice   | -           | -              | -              | -
kthvalue                    | choice   | -           | -              | -              | -
lcm                         | choice   | -           | -              | -              | -
ldexp                       | choice   | -           | -              | -              | -
le less_equal               | choice   | -           | -              | -              | compare
leaky_relu                  | choice   | -           | -              | -              | -
lgamma                      | choice   | -           | -              | -              | -
log_sigmoid                 | choice   | -           | -              | -              | -
log_sigmoid_forward         | choice   | -           | -              | -              | -
logical_and                 | choice   | -           | -              | -              | compare
logical_not                 | choice   | -           | -              | -              | not
logical_or                  | choice   | -           | -              | -              | compare
logical_xor                 | choice   | -           | -              | -              | -
lt less                     | choice   | -           | -              | -              | compare
masked_select               | choice   | -           | -              | -              | -
max                         | choice   | -           | -              | -              | largest
max_pool1d                  | choice   | -           | -              | -              | -
max_pool2d                  | choice   | -           | -              | -              | -
max_pool3d                  | choice   | -           | -              | -              | -
median                      | choice   | -           | -              | -              | -
min                         | choice   | -           | -              | -              | largest
mode                        | choice   | -           | -              | -              | -
nan_to_num                  | choice   | -           | -              | -              | -
nanmean                     | choice   | -           | -              | -              | -
nanmedian                   | choice   | -           | -              | -              | -
nanquantile                 | choice   | -           | -              | -              | -
nansum                      | choice   | -           | -              | -              | -
ne not_equal                | choice   | -           | -              | -              | compare
nextafter                   | choice   | -           | -              | -              | -
nonzero                     | choice   | -           | unsigned       | -              | -
npu::npu_dynamic_mx_quant   | choice   | -           | -              | quantised      | mx_quant
npu::npu_dynamic_quant | choice | - | - | quantised | dynamic_quant
npu::npu_quantize           | choice   | -           | -              | -              | quantize
prelu                       | choice   | -           | -              | -              | -
python::eq                  | choice   | -           | -              | -              | -
python::floordiv | choice | - | - | - | floor_divide
python::ge                  | choice   | -           | -              | -              | -
python::gt                  | choice   | -           | -              | -              | -
python::le                  | choice   | -           | -              | -              | -
python::lt                  | choice   | -           | -              | -              | -
python::mod                 | choice   | -           | -              | -              | remainder
python::ne                  | choice   | -           | -              | -              | -
quantile                    | choice   | -           | -              | -              | -
quantize_per_channel        | choice   | -           | -              | -              | -
quantize_per_tensor         | choice   | -           | -              | -              | -
relu6                       | choice   | -           | -              | -              | -
remainder                   | choice   | -           | remainder      | -              | remainder
renorm                      | choice   | -           | -              | -              | -
searchsorted                | choice   | -           | unsigned       | -              | -
selu                        | choice   | -           | -              | -              | -
sgn                         | choice   | -           | -              | -              | -
sign                        | choice   | -           | -              | -              | -
signbit                     | choice   | -           | -              | -              | -
softplus                    | choice   | -           | -              | -              | -
softshrink                  | choice   | -           | -              | -              | -
sort                        | choice   | -           | -              | -              | -
special_xlog1py             | choice   | -           | -              | -              | -
threshold                   | choice   | -           | -              | -              | -
topk                        | choice   | -           | -              | -              | -
trunc fix                   | choice   | -           | -              | -              | -
_unique2                    | choice   | -           | -              | -              | -
unique_consecutive          | choice   | -           | -              | -              | -
xlogy                       | choice   | -           | -              | -              | -

embedding                   | gather   | -           | same_as_input  | -              | embedded
_embedding_bag              | gather   | -           | -              | -              | -
embedding_bag               | gather   | -           | -              | -              | -
gather                      | gather   | -           | same_as_input  | -              | gathered
index _unsafe_index         | gather   | -           | same_as_input  | indexed        | indexed
index_select | gather | - | same_as_input | index_selected | index_selected
take                        | gather   | -           | same_as_input  | -              | -
take_along_dim              | gather   | -           | -              | -              | gathered

copy                        | writer   | placed      | -              | written        | copied
diagonal_scatter            | writer   | placed      | -              | -              | -
select_scatter              | writer   | placed      | -              | written        | scattered
slice_scatter               | writer   | placed      | -              | written        | scattered
index_add                   | writer   | -           | -              | -              | -
index_copy | writer | - | - | - | index_copied
index_fill                  | writer   | -           | -              | -              | -
index_put _unsafe_index_put | writer   | -           | -              | -              | index_put
index_reduce                | writer   | -           | -              | -              | -
masked_scatter              | writer   | -           | -              | -              | -
npu::npu_scatter_nd_update  | writer   | -           | -              | -              | -
scatter | writer | - | - | - | scattered_rows
scatter_add                 | writer   | -           | -              | -              | -
scatter_reduce              | writer   | -           | -              | -              | -

copy_                       | effect   | -           | -              | -              | -
npu::npu_kv_rmsnorm_rope_cache | effect   | -           | -              | -              | key_half
npu::npu_mla_prolog         | effect   | -           | -              | -              | -
npu::npu_mla_prolog_v2      | effect   | -           | -              | -              | -

conv1d                      | -        | layer       | -              | -              | -
conv2d                      | -        | layer       | -              | -              | -
convolution                 | -        | layer       | -              | -              | -
_grouped_mm                 | -        | layer       | -              | -              | -
_scaled_grouped_mm          | -        | layer       | -              | -              | -
_scaled_mm                  | -        | layer       | -              | -              | -
_weight_int4pack_mm         | -        | layer       | -              | -              | -
_weight_int4pack_mm_for_cpu | -        | layer       | -              | -              | -
_weight_int8pack_mm         | -        | layer       | -              | -              | -
alpha_dropout               | -        | dropout     | -              | -              | dropout
dropout                     | -        | dropout     | -              | -              | dropout
feature_dropout             | -        | dropout     | -              | -              | dropout
atb::npu_mla_preprocess     | -        | -           | -              | -              | preprocess
empty_permuted              | -        | -           | -              | -              | empty
empty_strided               | -        | -           | -              | -              | empty
narrow_copy                 | -        | -           | -              | -              | sliced
npu::npu_dynamic_block_quant | - | - | - | - | block_quant
npu::npu_kv_rmsnorm_rope_cache_v2_functional | - | - | - | - | key_half
npu::npu_mla_prolog_v3      | -        | -           | -              | -              | -
npu::npu_mla_prolog_v3_functional | - | - | - | - | prolog
npu::npu_quant_matmul | - | - | - | - | quant_matmul
npu::npu_scatter_pa_kv_cache_functional | - | - | - | - | -
npu::npu_sparse_flash_attention | -        | -           | -              | -              | -
npu::npu_weight_quant_batchmatmul | -        | -           | -              | -              | -
scaled_dot_product_attention | -        | -           | -              | -              | attention
sym_numel                   | -        | -           | -              | -              | -
sym_size                    | -        | -           | -              | -              | -
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
