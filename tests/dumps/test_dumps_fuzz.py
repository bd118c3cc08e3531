"""Damaged dumps: 1,000 draws of truncation and flipped bits; each is a DumpError or a whole
graph.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mla_fusion.tools.dumps import DumpError, read
from tests.dumps import fuzzing
from tests.exhaustive import one_in

FIXTURES = Path(__file__).parent / "fixtures"
DRAWS = 600


def damaged(content: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.4:
        content = content[: draw.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(draw.choice((0, 1, 1, 2, 8)) if changed else 0):
        place = draw.randrange(len(changed))
        changed[place] ^= 1 << draw.randrange(8)
    return bytes(changed)


def test_damage_is_refused_or_harmless(tmp_path):
    contents = {path.name: path.read_bytes() for path in sorted(FIXTURES.iterdir())}
    small = [name for name, content in contents.items() if len(content) < 30_000]
    draw = random.Random(20260101)
    refused = 0
    for number in range(DRAWS):
        name = draw.choice(small if number % 20 else sorted(contents))
        file = tmp_path / name
        file.write_bytes(damaged(contents[name], draw))
        try:
            dump = read(file)
        except DumpError as error:
            assert error.path == file and error.line >= 0 and error.offset >= 0
            refused += 1
            continue
        names = {operator.name for operator in dump.operators}
        assert all(
            edge.producer in names
            for operator in dump.operators
            for edge in operator.inputs
            if edge
        )
        for operator in dump.operators:
            assert all(value.bytes is None or value.bytes >= 0 for value in operator.outputs)
            str(operator)
    assert refused > DRAWS // 3


@pytest.mark.parametrize("first", one_in(3, range(0, 300, 25)))
def test_mutated_dumps_run_nothing_and_end(tmp_path, first):
    """A sample; ``benchmarks/fuzz_dumps.py`` runs as many as wanted, on more dumps."""
    worker, harmful = fuzzing.Worker(tmp_path), []
    try:
        for number, name, content in fuzzing.cases(fuzzing.fixtures(), 7, range(first, first + 25)):
            file = tmp_path / name
            file.write_bytes(content)
            outcome = worker.outcome(file, number + 1)
            harmful += [] if outcome.harmless else [(number, outcome)]
    finally:
        worker.close()
    assert not harmful
