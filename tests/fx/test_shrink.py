"""Many tokens probed as few: which sizes follow them, and into which sizes a view goes."""

from __future__ import annotations

import pytest

from mla_fusion.fx.shrink import Shrink


@pytest.mark.parametrize(
    ("small", "full", "wanted", "sizes"),
    [
        ((5, 384), (64, 384), (64, 2, 192), (5, 2, 192)),
        ((2 * 5, 384), (2 * 64, 384), (2, 64, 2, 192), (2, 5, 2, 192)),
        ((2, 5, 128), (2, 512, 128), (1, 2, 512, 128), (1, 2, 5, 128)),
        ((5, 512), (512, 512), (512, 1, 512), (5, 1, 512)),
        ((64, 192), (64, 192), (64, 3, 64), (64, 3, 64)),
    ],
)
def test_sizes_of_a_view(
    small: tuple[int, ...], full: tuple[int, ...], wanted: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    tokens = 512 if 512 in full else 64
    assert Shrink(tokens).viewed(small, full, wanted) == sizes


def test_rows_of_as_many_tokens_become_few() -> None:
    shrink = Shrink(64)
    few = shrink.merged(64)
    assert 1 < few < 64
    assert shrink.rows((64, 512)) == (few, 512)
    assert shrink.rows((32, 512)) == (32, 512), "another number of rows is not that of the tokens"
    assert shrink.lead([2, 64]) == (2, few)
    assert shrink.merged(2 * 64) == 2 * few
