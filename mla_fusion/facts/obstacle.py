"""What keeps the kernel from writing a model's cache itself, as facts and plans find it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Obstacle:
    """One thing to change before the kernel can write the cache.

    code     stable; ``report.staging.REMEDIES`` says for each what to write instead
    message  one sentence with names and sizes
    remedy   what to write instead, where the cause asks for another than the code's
    """

    code: str
    message: str
    remedy: str = ""


Obstacles = tuple[Obstacle, ...]
