"""The error of a model, or of an attention, that cannot be optimised."""

from __future__ import annotations


class OptimizeError(ValueError):
    """A coded error; ``message`` has no code. Nothing was changed. The codes are stable:

    attention.not_mla         The attention has keys and values of its own: there is no latent to
                              cache.
    attention.implementation  Only sdpa and eager attention hand over masks that absorbed attention
                              can read.
    attention.differs         The module's attention does more than softmax over scores and mask
                              (sinks, a cap on scores), or is not left to the attention function.
    forward.unknown           The module's forward was replaced, it keeps a state, or code that was
                              examined has been replaced since.
    kv_up.bias                The projection from the latent to keys and values adds a bias, which
                              cannot be absorbed.
    kv_up.weight              The weight of that projection is no plain floating-point matrix
                              (quantised, or replaced).
    kv_up.absent              The module has no projection from the latent to keys and values of
                              all heads.
    kv_up.differs             On random numbers the module makes other keys or values than the
                              weight of that projection.
    rope.absent               The key has no part that is rotated, so there is nothing beside the
                              latent to cache.
    cache.expanded            The module caches keys and values of all heads, in another way than
                              those of transformers since 4.57 do. The message names what to install
                              or to load where that helps.
    cache.kind                A layer of this cache is none that pages of latents can replace.
    cache.full                A cache of fixed size has no room for the tokens.
    model.state               The model was not optimised, or a forward that optimize has set was
                              replaced since.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"[{code}] {message}")
        self.code, self.message = code, message
