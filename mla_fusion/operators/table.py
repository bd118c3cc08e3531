"""The operator table: one row for each operator, and all that the pass knows it by.

A row says

names   the operator; others that compute the same of the same arguments behind it. One of ``aten``
        goes without its namespace. Every room calls the operator by the first name
class   what it does to values (:class:`Kind`); ``-``: as torch's tags and the schema say
form    what it makes of its arguments (:class:`Form`); ``-``: none of those
rules   ``column:rule``, where a room treats it by a rule of its own; the columns are

range   the numbers in its result (``fx/range_rules.py``)
token   the axis of tokens (``fx/token_axis.py``); else as its form says
field   exact arithmetic (``prove/operators.py``); else views are moved, and all that is no view is
        a function of which nothing is known
probe   how it runs on probes, if not as torch has it (``fx/probe_calls.py``)
inert   when a choice never picks (``fx/analytic.py``)
size    how large integers it makes (``prove/counted.py``)
einsum  a product as a sum over axes (``fx/contraction.py``)
rows    sizes of its operands that are equal whenever it runs (``fx/steps.py``)
slots   where a writer puts rows (``facts/cache_write.py``)

A rule is the name of a function there. An operator without a row is opaque.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    rules: Mapping[str, str] = field(default_factory=dict)  # by column

    @cached_property
    def word(self) -> str:
        """What every room calls the operator; "" for one without a row."""
        name = self.names[0] if self.names else ""
        return name if name.startswith(("python::", "prims::")) else name.rpartition(":")[2]


def _row(line: str) -> Row:
    names, kind, form, rules = (cell.strip() for cell in line.split("|"))
    return Row(
        tuple(name if "::" in name else f"aten::{name}" for name in names.split()),
        None if kind == "-" else Kind[kind.upper()],
        Form(form),
        dict(rule.split(":") for rule in rules.split()),
    )


# names | class | form | rules
_ROWS = """
reshape                    | movement | resize      | field:reshaped probe:keep_shape
_assert_tensor_metadata    | -        | stated      |
_reshape_alias             | movement | resize      | field:reshaped probe:keep_shape
_unsafe_view               | movement | resize      | field:reshaped probe:keep_shape
view                       | movement | resize      | field:reshaped probe:keep_shape
view_copy                  | movement | resize      | field:reshaped
alias                      | movement | reshape     | field:same probe:identity
alias_copy                 | movement | reshape     | field:same
clone                      | movement | reshape     | field:same
contiguous                 | movement | reshape     | field:same
detach                     | movement | reshape     | field:same probe:identity
detach_copy                | movement | reshape     | field:same
flatten                    | movement | reshape     | field:reshaped
lift_fresh                 | movement | reshape     | field:same probe:identity
lift_fresh_copy            | movement | reshape     | field:same
npu::npu_format_cast       | movement | reshape     | field:same probe:identity
_reshape_copy              | movement | reshape     | field:reshaped
squeeze                    | movement | reshape     | field:reshaped
squeeze_copy               | movement | reshape     | field:reshaped
unflatten                  | movement | reshape     | field:reshaped
unsqueeze                  | movement | reshape     | field:reshaped
unsqueeze_copy             | movement | reshape     | field:reshaped
view_as                    | movement | reshape     | field:reshaped
expand                     | movement | expand      | token:expanded field:expanded
expand_copy                | movement | expand      | token:expanded field:expanded
chunk                      | movement | run         | field:split
narrow                     | movement | run         | field:sliced
select                     | movement | run         | field:selected
select_copy                | movement | run         | field:selected
slice                      | movement | run         | field:sliced
slice_copy                 | movement | run         | field:sliced
split                      | movement | run         | field:split
split_copy                 | movement | run         | field:split
split_with_sizes           | movement | run         | field:split
split_with_sizes_copy      | movement | run         | field:split
tensor_split               | movement | run         | field:split
unbind                     | movement | run         | field:split
unbind_copy                | movement | run         | field:split
unsafe_chunk               | movement | run         | field:split
unsafe_split               | movement | run         | field:split
expand_as                  | movement | view        | field:expanded
mT                         | movement | view        | field:natively
matrix_H                   | movement | view |
movedim                    | movement | view        | field:natively
npu::npu_format_cast_      | movement | view        | field:same
numpy_T                    | movement | view        | field:natively
permute                    | movement | permute     | field:natively
permute_copy               | movement | permute     | field:natively
swapaxes swapdims          | movement | permute     | field:natively
t                          | movement | permute     | field:natively
t_copy                     | movement | permute     | field:natively
transpose                  | movement | permute     | field:natively
transpose_copy             | movement | permute     | field:natively
diagonal                   | movement | diagonal    | token:diagonal field:diagonal
diagonal_copy              | movement | diagonal    | token:diagonal field:diagonal
cat concat concatenate     | movement | join        | range:union token:joined field:joined
hstack                     | movement | join |
stack                      | movement | join        | range:union token:joined field:joined
vstack                     | movement | join |
npu::npu_dtype_cast npu::_npu_dtype_cast | movement | cast        | field:cast
prims::convert_element_type | movement | cast        | field:cast
to                         | movement | cast        | field:cast
_to_copy                   | movement | cast        | field:cast
type_as                    | movement | cast        | field:cast
new_zeros                  | movement | zeros       | field:zeros
zeros_like                 | movement | zeros       | field:zeros
new_ones                   | movement | ones        | field:ones
ones_like                  | movement | ones        | field:ones
empty_like                 | movement | unwritten   | field:empty
new_empty                  | movement | unwritten   | field:empty
full_like                  | movement | full        | field:filled
new_full                   | movement | full        | field:filled
new_empty_strided          | movement | strided     | field:empty
complex                    | movement | elementwise | field:complex
_conj                      | movement | elementwise | field:conjugate
conj                       | movement | elementwise | field:conjugate
_conj_physical             | movement | elementwise | field:conjugate
conj_physical              | movement | elementwise | field:conjugate
fill                       | movement | elementwise | field:filled
imag                       | movement | elementwise | field:part
real                       | movement | elementwise | field:part
resolve_conj               | movement | elementwise | field:same
resolve_neg                | movement | elementwise | field:same
arange                     | movement | count       | range:counted field:counted
atleast_1d                 | movement | - |
atleast_2d                 | movement | - |
atleast_3d                 | movement | - |
block_diag                 | movement | - |
broadcast_tensors          | movement | - |
broadcast_to               | movement | -           | field:expanded
channel_shuffle            | movement | - |
column_stack               | movement | - |
constant_pad_nd            | movement | -           | token:padded field:padded
diag_embed                 | movement | - |
dstack                     | movement | - |
empty                      | movement | -           | field:empty
eye                        | movement | -           | field:eye
flip | movement | - | range:same_as_input token:within_rows field:turned
fliplr                     | movement | - |
flipud                     | movement | - |
full                       | movement | -           | field:filled
linspace                   | movement | - |
meshgrid                   | movement | - |
_neg_view                  | movement | - |
ones                       | movement | -           | field:ones
pad                        | movement | -           | token:padded field:padded
pixel_shuffle              | movement | - |
pixel_unshuffle            | movement | - |
prims::broadcast_in_dim    | movement | - |
prims::iota                | movement | count       | range:counted field:counted
prims::squeeze             | movement | - |
prims::transpose           | movement | - |
python::getitem _operator::getitem | movement | - |
ravel                      | movement | -           | field:reshaped
repeat | movement | - | range:same_as_input token:repeated field:turned
repeat_interleave | movement | - | range:same_as_input token:repeated field:turned
roll | movement | - | range:same_as_input token:within_rows field:turned
rot90                      | movement | - |
scalar_tensor              | movement | -           | field:filled
tensor                     | movement | - |
tile                       | movement | -           | token:repeated field:turned
tril                       | movement | -           | field:triangle
triu                       | movement | -           | field:triangle
unfold | movement | - | range:same_as_input token:within_rows field:selected
view_as_complex            | movement | -           | token:of_pairs field:as_complex
view_as_complex_copy       | movement | -           | field:as_complex
view_as_real               | movement | -           | token:of_pairs field:as_real
view_as_real_copy          | movement | -           | field:as_real
zero                       | movement | -           | field:zeros
zeros                      | movement | -           | field:zeros

add                        | analytic | elementwise | range:added field:added size:added
addcdiv                    | analytic | elementwise | field:addc
addcmul                    | analytic | elementwise | range:product_added field:addc size:multiplied
asinh                      | analytic | elementwise |
atan                       | analytic | elementwise |
cos                        | analytic | elementwise | range:sine field:cos
cosh                       | analytic | elementwise |
deg2rad                    | analytic | elementwise |
div divide true_divide     | analytic | elementwise | range:quotient field:div size:quotient
erf                        | analytic | elementwise |
erfc                       | analytic | elementwise |
exp                        | analytic | elementwise | range:positive field:exp
exp2                       | analytic | elementwise | range:positive
expm1                      | analytic | elementwise |
float_power                | analytic | elementwise |
gelu                       | analytic | elementwise |
lerp                       | analytic | elementwise | field:lerp
log                        | analytic | elementwise |
log10                      | analytic | elementwise |
log1p                      | analytic | elementwise |
log2                       | analytic | elementwise |
logaddexp                  | analytic | elementwise |
logaddexp2                 | analytic | elementwise |
logit                      | analytic | elementwise |
mish                       | analytic | elementwise |
mul multiply               | analytic | elementwise | range:product field:mul size:multiplied
neg negative               | analytic | elementwise | range:negated field:neg size:same
polar                      | analytic | elementwise | field:polar
pow                        | analytic | elementwise | range:power field:pow size:power
python::add _operator::add | analytic | elementwise | field:added
python::mul _operator::mul | analytic | elementwise | field:mul
python::neg                | analytic | elementwise |
python::pow                | analytic | elementwise |
python::sub _operator::sub | analytic | elementwise | field:added
python::truediv _operator::truediv | analytic | elementwise | field:div
rad2deg                    | analytic | elementwise |
reciprocal                 | analytic | elementwise | range:inverse field:reciprocal size:root
rsqrt                      | analytic | elementwise | range:inverse_root field:rsqrt size:root
rsub                       | analytic | elementwise | field:added size:added
sigmoid                    | analytic | elementwise | range:share field:sigmoid
silu                       | analytic | elementwise | field:silu
sin                        | analytic | elementwise | range:sine field:sin
sinc                       | analytic | elementwise |
sinh                       | analytic | elementwise |
sqrt                       | analytic | elementwise | range:root field:sqrt size:root
square                     | analytic | elementwise | range:square field:square size:power
sub subtract               | analytic | elementwise | range:subtracted field:added size:added
tan                        | analytic | elementwise |
tanh                       | analytic | elementwise | range:sine
npu::npu_interleave_rope   | analytic | rotation    | field:interleave_rope rows:rotated
npu::npu_rotary_mul        | analytic | rotation    | field:rotary_mul rows:rotated
cumsum                     | analytic | reduction   | range:sum_along token:within_rows size:summed
linalg_vector_norm         | analytic | reduction   | range:unsigned token:reduced field:norm
log_softmax                | analytic | reduction   | token:within_rows
_log_softmax               | analytic | reduction   | token:within_rows
logsumexp                  | analytic | reduction   | token:reduced
mean                       | analytic | reduction   | range:same_as_input token:reduced field:mean
norm                       | analytic | reduction   | range:unsigned token:reduced field:norm
prod                       | analytic | reduction   | token:reduced
softmax _softmax           | analytic | reduction   | range:fraction token:within_rows field:softmax
std                        | analytic | reduction   | range:unsigned token:reduced field:var
std_mean                   | analytic | reduction   | field:var
sum | analytic | reduction | range:sum_along token:reduced field:sum size:summed
var                        | analytic | reduction   | range:unsigned token:reduced field:var
var_mean                   | analytic | reduction   | field:var
_fused_rms_norm            | analytic | norm        | token:normed field:rms_norm
layer_norm                 | analytic | norm        | token:normed field:layer_norm
native_layer_norm          | analytic | norm        | token:normed field:layer_norm
npu::npu_add_rms_norm      | analytic | norm        | token:normed field:npu_add_rms_norm
npu::npu_rms_norm          | analytic | norm        | token:normed field:npu_rms_norm
rms_norm                   | analytic | norm        | token:normed field:rms_norm
addbmm                     | analytic | product |
addmm                      | analytic | product     | field:addmm einsum:addmm
addmv                      | analytic | product |
baddbmm                    | analytic | product     | field:addmm einsum:baddbmm
bmm                        | analytic | product     | field:matmul einsum:bmm size:summed
dot                        | analytic | product     | field:matmul size:summed
einsum                     | analytic | product     | field:einsum_of einsum:einsum size:summed
inner                      | analytic | product |
_int_mm                    | analytic | product     | field:matmul einsum:mm size:bytes_summed
kron                       | analytic | product |
linear                     | analytic | product     | field:linear einsum:linear
matmul                     | analytic | product     | field:matmul einsum:matmul size:summed
mm                         | analytic | product     | field:matmul einsum:mm size:summed
mv                         | analytic | product     | field:matmul
npu::npu_linear            | analytic | product     | einsum:linear
npu::npu_transpose_batchmatmul | analytic | product | field:transposed_product einsum:transposed
outer                      | analytic | product | size:multiplied
tensordot                  | analytic | product |
vdot                       | analytic | product |

abs absolute               | choice   | elementwise | range:magnitude field:abs inert:never_negative
clamp clip | choice | elementwise | range:clamped field:clamped inert:within size:clamped
clamp_max                  | choice   | elementwise | range:clamped field:clamped inert:within
clamp_min                  | choice   | elementwise | range:clamped field:clamped inert:within
masked_fill | choice | elementwise | range:filled_where field:masked_fill inert:by_literal_mask
maximum                    | choice   | elementwise | range:largest field:greater inert:greater
minimum                    | choice   | elementwise | range:smallest field:clip inert:greater
relu | choice | elementwise | range:rectified field:relu inert:never_negative
round                      | choice   | elementwise | field:round
where                      | choice   | elementwise | range:either field:where inert:by_literal_mask
acos                       | choice   | - |
acosh                      | choice   | - |
all                        | choice   | - |
amax | choice | - | range:same_as_input token:reduced field:largest
amin | choice | - | range:same_as_input token:reduced field:largest
aminmax                    | choice   | - |
angle                      | choice   | - |
any                        | choice   | - |
argmax                     | choice   | -           | range:unsigned
argmin                     | choice   | -           | range:unsigned
argsort                    | choice   | -           | range:unsigned
asin                       | choice   | - |
atan2                      | choice   | - |
atanh                      | choice   | - |
bitwise_and __and__        | choice   | -           | range:masked field:compare
bitwise_left_shift __lshift__ | choice   | -           | range:shifted_left size:shifted
bitwise_not                | choice   | -           | field:not
bitwise_or __or__          | choice   | -           | field:compare
bitwise_right_shift __rshift__ | choice   | -           | range:shifted_right
bitwise_xor __xor__        | choice   | -           | field:compare
bucketize                  | choice   | -           | range:unsigned
cdist                      | choice   | - |
ceil                       | choice   | - |
celu                       | choice   | - |
copysign                   | choice   | - |
count_nonzero              | choice   | - |
cummax                     | choice   | - |
cummin                     | choice   | - |
cumprod                    | choice   | - |
dequantize                 | choice   | - |
digamma                    | choice   | - |
dist                       | choice   | - |
elu                        | choice   | - |
eq                         | choice   | -           | field:compare
equal                      | choice   | - |
fake_quantize_per_tensor_affine | choice   | - |
floor                      | choice   | - |
floor_divide               | choice   | -           | range:floor_quotient field:floor_divide
fmax                       | choice   | -           | inert:greater
fmin                       | choice   | -           | inert:greater
fmod                       | choice   | - |
frac                       | choice   | - |
frexp                      | choice   | - |
gcd                        | choice   | - |
ge greater_equal           | choice   | -           | field:compare
gt greater                 | choice   | -           | field:compare
hardshrink                 | choice   | - |
hardsigmoid                | choice   | - |
hardswish                  | choice   | - |
hardtanh                   | choice   | - |
heaviside                  | choice   | - |
hypot                      | choice   | - |
isclose                    | choice   | - |
isfinite                   | choice   | - |
isin                       | choice   | - |
isinf                      | choice   | - |
isnan                      | choice   | - |
isneginf                   | choice   | - |
isposinf                   | choice   | - |
isreal                     | choice   | - |
kthvalue                   | choice   | - |
lcm                        | choice   | - |
ldexp                      | choice   | - |
le less_equal              | choice   | -           | field:compare
leaky_relu                 | choice   | - |
lgamma                     | choice   | - |
log_sigmoid                | choice   | - |
log_sigmoid_forward        | choice   | - |
logical_and                | choice   | -           | field:compare
logical_not                | choice   | -           | field:not
logical_or                 | choice   | -           | field:compare
logical_xor                | choice   | - |
lt less                    | choice   | -           | field:compare
masked_select              | choice   | - |
max                        | choice   | -           | field:largest
max_pool1d                 | choice   | - |
max_pool2d                 | choice   | - |
max_pool3d                 | choice   | - |
median                     | choice   | - |
min                        | choice   | -           | field:largest
mode                       | choice   | - |
nan_to_num                 | choice   | - |
nanmean                    | choice   | - |
nanmedian                  | choice   | - |
nanquantile                | choice   | - |
nansum                     | choice   | - |
ne not_equal               | choice   | -           | field:compare
nextafter                  | choice   | - |
nonzero                    | choice   | -           | range:unsigned
npu::npu_dynamic_mx_quant  | choice   | -           | token:quantised field:mx_quant
npu::npu_dynamic_quant     | choice   | -           | token:quantised field:dynamic_quant
npu::npu_quantize          | choice   | -           | field:quantize
prelu                      | choice   | - |
python::eq                 | choice   | - |
python::floordiv           | choice   | -           | field:floor_divide
python::ge                 | choice   | - |
python::gt                 | choice   | - |
python::le                 | choice   | - |
python::lt                 | choice   | - |
python::mod                | choice   | -           | field:remainder
python::ne                 | choice   | - |
quantile                   | choice   | - |
quantize_per_channel       | choice   | - |
quantize_per_tensor        | choice   | - |
relu6                      | choice   | - |
remainder                  | choice   | -           | range:remainder field:remainder
renorm                     | choice   | - |
searchsorted               | choice   | -           | range:unsigned
selu                       | choice   | - |
sgn                        | choice   | - |
sign                       | choice   | - |
signbit                    | choice   | - |
softplus                   | choice   | - |
softshrink                 | choice   | - |
sort                       | choice   | - |
special_xlog1py            | choice   | - |
threshold                  | choice   | - |
topk                       | choice   | - |
trunc fix                  | choice   | - |
_unique2                   | choice   | - |
unique_consecutive         | choice   | - |
xlogy                      | choice   | - |

embedding                  | gather   | -           | range:same_as_input field:embedded
_embedding_bag             | gather   | - |
embedding_bag              | gather   | - |
gather                     | gather   | -           | range:same_as_input field:gathered
index _unsafe_index | gather | - | range:same_as_input token:indexed field:indexed
index_select | gather | - | range:same_as_input token:index_selected field:index_selected
take                       | gather   | -           | range:same_as_input
take_along_dim             | gather   | -           | field:gathered

copy                       | writer   | placed      | token:written field:copied
diagonal_scatter           | writer   | placed |
select_scatter             | writer   | placed      | token:written field:scattered
slice_scatter              | writer   | placed      | token:written field:scattered
index_add                  | writer   | - |
index_copy                 | writer   | -           | field:index_copied slots:index_copy
index_fill                 | writer   | - |
index_put _unsafe_index_put | writer   | -           | field:index_put rows:written slots:index_put
index_reduce               | writer   | - |
masked_scatter             | writer   | - |
npu::npu_scatter_nd_update | writer   | -           | rows:scattered slots:scatter_nd
scatter                    | writer   | -           | field:scattered_rows slots:scatter
scatter_add                | writer   | - |
scatter_reduce             | writer   | - |

copy_                      | effect   | - |
npu::npu_kv_rmsnorm_rope_cache | effect | - | token:written_rows field:key_half rows:kv_operator
npu::npu_mla_prolog        | effect   | - |
npu::npu_mla_prolog_v2     | effect   | - |

conv1d                     | -        | layer |
conv2d                     | -        | layer |
convolution                | -        | layer |
_grouped_mm                | -        | layer |
_scaled_grouped_mm         | -        | layer |
_scaled_mm                 | -        | layer |
_weight_int4pack_mm        | -        | layer |
_weight_int4pack_mm_for_cpu | -        | layer |
_weight_int8pack_mm        | -        | layer |
alpha_dropout              | -        | dropout     | field:dropout
dropout                    | -        | dropout     | field:dropout
feature_dropout            | -        | dropout     | field:dropout
atb::npu_mla_preprocess    | -        | -           | field:preprocess
empty_permuted             | -        | -           | field:empty
empty_strided              | -        | -           | field:empty
narrow_copy                | -        | -           | field:sliced
npu::npu_dynamic_block_quant | -        | -           | field:block_quant
npu::npu_kv_rmsnorm_rope_cache_v2_functional|-|-|token:written_rows field:key_half rows:kv_operator
npu::npu_mla_prolog_v3     | -        | - |
npu::npu_mla_prolog_v3_functional | -        | -           | field:prolog
npu::npu_quant_matmul | - | - | field:quant_matmul einsum:quant_matmul rows:blocks size:bytes_summed
npu::npu_scatter_pa_kv_cache_functional | -        | -           | rows:scattered_pairs
npu::npu_sparse_flash_attention | -        | - |
npu::npu_weight_quant_batchmatmul | -        | -           | einsum:weight_quant_batchmatmul
scaled_dot_product_attention | -        | -           | field:attention
sym_numel                  | -        | - |
sym_size                   | -        | - |
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
