"""The inputs on which a hand-written call and the model are compared: as given, and with latents so
small that an epsilon counts.

The latents are made small at the weights: those of the call, and the reference's parameters that
they are made of. A norm before the prologue would undo a smaller x.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mla_fusion.compat import tree_map_only
from mla_fusion.tools.by_hand.calls import Arguments, Call, Change, Target
from mla_fusion.tools.by_hand.memory import Inputs, restored, tensors_in

# the mean square of a latent at which an epsilon of 1e-6 weighs half as much as the row
_SMALL = 2e-6
AS_GIVEN, SMALL = "the inputs as given", "latents so small that an epsilon counts"


@dataclass(frozen=True)
class Draw:
    """``change`` is made to each call; ``parameters`` of the reference are multiplied meanwhile."""

    name: str
    inputs: Inputs
    change: Change = lambda call: {}
    parameters: tuple[tuple[nn.Parameter, float], ...] = ()

    @contextlib.contextmanager
    def of_reference(self) -> Iterator[None]:
        """The reference's parameters are those of the draw."""
        with restored(parameter for parameter, _ in self.parameters), torch.no_grad():
            for parameter, factor in self.parameters:
                parameter.mul_(factor)
            yield


@torch.no_grad()
def draws_of(calls: Sequence[Call], inputs: Inputs, reference: Target) -> list[Draw]:
    """The inputs as given; then the small latents, by the weights or else by x, where either can be
    had.
    """
    found = [Draw(AS_GIVEN, inputs)]
    small = _by_weights(calls, inputs, reference) or _by_x(calls, inputs)
    return [*found, small] if small is not None else found


def _by_weights(calls: Sequence[Call], inputs: Inputs, reference: Target) -> Draw | None:
    held = list(reference.parameters()) if isinstance(reference, nn.Module) else []
    factors: dict[int, dict[str, float]] = {}
    scaled: dict[int, tuple[nn.Parameter, float]] = {}
    for call in calls:
        names, square = _scalable(call), _mean_square(call)
        if not names or not square:
            return None
        # a power of two changes no rounding
        factor = 2.0 ** round(math.log2((_SMALL / square) ** 0.5))
        factors[call.place] = dict.fromkeys(names, factor)
        for name in names:
            value = call.arguments[name]
            mark = fingerprint(value)
            sources = [parameter for parameter in held if _holds(parameter, value.numel(), mark)]
            if not sources:
                return None
            scaled |= {id(parameter): (parameter, factor) for parameter in sources}

    def change(call: Call) -> Arguments:
        scales = factors.get(call.place, {})
        return {name: call.arguments[name] * factor for name, factor in scales.items()}

    return Draw(SMALL, inputs, change, tuple(scaled.values()))


def _scalable(call: Call) -> tuple[str, ...]:
    """What the latents are proportional to: the down-projections, or the scales of their
    columns.
    """
    roles = call.roles
    if not roles.down_query:
        return ()
    weights = roles.down_query, roles.down
    if call.arguments[roles.down].dtype != torch.int8:
        return weights
    scales = tuple(name for weight in weights for name in roles.vectors[weight])
    return scales if all(call.tensor(name) is not None for name in scales) else ()


def _mean_square(call: Call) -> float:
    """Of the latents; 0 where x and the weight do not show them."""
    roles = call.roles
    x, weight = call.tensor(roles.x), call.tensor(roles.down_query or roles.down)
    if x is None or weight is None or weight.dim() != 2 or roles.transposed:
        return 0.0
    latent = x.double().flatten(0, -2) @ weight.double()
    if torch.int8 in (x.dtype, weight.dtype):
        scales = "dequant_scale_x", *roles.vectors.get(roles.down_query, ())
        of_x, of_weight = (call.tensor(name) for name in scales)
        if of_x is None or of_weight is None:
            return 0.0
        latent = of_x.double().reshape(-1, 1) * latent * of_weight.double().reshape(1, -1)
    return float(latent.square().mean())


def _holds(parameter: nn.Parameter, numbers: int, mark: tuple[float, ...]) -> bool:
    """Are so many numbers of that fingerprint those of a parameter, or of its first or last
    rows?
    """
    if not parameter.is_floating_point() or parameter.numel() < numbers or not parameter.dim():
        return False
    rows = parameter.detach().reshape(parameter.shape[0], -1)
    count, rest = divmod(numbers, rows.shape[1])
    if rest or not count or count > len(rows):
        return False
    return any(fingerprint(part) == mark for part in (rows[:count], rows[-count:]))


def fingerprint(value: Tensor) -> tuple[float, ...]:
    """Equal for the same numbers in another order (sums of whole multiples of a small step are
    exact).
    """
    wide = value.detach().double().flatten()
    steps = (wide * 2.0**40).round()
    return float(wide.abs().max()), float((steps % 65521).sum()), float((steps % 65519).sum())


def _by_x(calls: Sequence[Call], inputs: Inputs) -> Draw | None:
    """Smaller x, where it is one of the inputs."""
    for call in calls:
        x, square = call.tensor(call.roles.x), _mean_square(call)
        if x is not None and x.dtype != torch.int8 and square:
            break
    else:
        return None
    width, factor = x.shape[-1], (_SMALL / square) ** 0.5

    def is_x(value: Tensor) -> bool:
        return value.is_floating_point() and value.dim() > 1 and value.shape[-1] == width

    small = tree_map_only(Tensor, lambda v: v * factor if is_x(v) else v, list(inputs))
    return Draw(SMALL, small) if any(map(is_x, tensors_in(inputs))) else None
