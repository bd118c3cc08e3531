"""Mutated dumps, read under watch: nothing may run, nothing may fail but by its documented refusal,
or take 10 s.

    python benchmarks/fuzz_dumps.py [--cases 20000] [--seed 1] [--jobs 2] [--keep FOLDER]

The dumps are the fixtures of the tests and graphs that are captured here. Each mutated dump is
read, rebuilt as a graph and compared with another (diff); a third is inspected, which runs the
pass, and a part is explained with verification. Exit status 1: something ran, failed,
or took too long.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))

import mla_fusion as mf  # noqa: F401  # before torch, where torch_npu is installed without CANN

# isort: split
from mla_fusion.compile.device_graph import capture
from tests.catalogue import base, prologues
from tests.dumps import fuzzing

MODELS = (prologues.PagedRotateHalf, prologues.FusedQkvA, prologues.EvenOdd, prologues.BlockOffset)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder for the dumps that do harm")
    options = parser.parse_args()
    contents = {**fuzzing.fixtures(), **captured()}
    started, shares = perf_counter(), range(options.jobs)
    with ThreadPoolExecutor(options.jobs) as pool:
        found = [
            one
            for part in pool.map(lambda share: run(contents, options, share), shares)
            for one in part
        ]
    harmful = [(number, one) for number, one in found if not one.harmless]
    for number, one in harmful:
        print(f"case {number}: {one.seconds:.1f} s, {one.bad}, {one.said}")
    outcomes = Counter(
        f"{reader} {said.partition(':')[0]}"
        for _, one in found
        for reader, said in one.said.items()
    )
    slowest = sorted((one.seconds for _, one in found), reverse=True)[:3]
    print(
        f"{len(found):,} mutated dumps of {len(contents)}, seed {options.seed}, in "
        f"{perf_counter() - started:.0f} s"
    )
    print(f"harm: {len(harmful)}; slowest: {', '.join(f'{seconds:.2f} s' for seconds in slowest)}")
    print(", ".join(f"{name} {count:,}" for name, count in sorted(outcomes.items())))
    return 1 if harmful else 0


def captured() -> dict[str, bytes]:
    """Listings of graphs that are not among the fixtures, with symbolic sizes and without."""
    found = {}
    for model in MODELS:
        for dynamic in (False, True):
            gm, _ = capture(model(), *base.paged_args(), device="cpu", dynamic=dynamic)
            text = gm.print_readable(False, include_stride=dynamic, include_device=dynamic)
            found[f"{model.__name__}_{dynamic}.txt"] = text.encode()
    return found


def run(
    contents: dict[str, bytes], options: argparse.Namespace, share: int
) -> list[tuple[int, fuzzing.Outcome]]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        worker = fuzzing.Worker(Path(folder))
        numbers = range(options.first + share, options.first + options.cases, options.jobs)
        for number, name, content in fuzzing.cases(contents, options.seed, numbers):
            file = Path(folder) / name
            file.write_bytes(content)
            found.append((number, worker.outcome(file, number + 1)))
            if len(found) % 500 == 0:
                bad = sum(not one.harmless for _, one in found)
                print(
                    f"share {share}: {len(found):,} read, {bad} did harm",
                    file=sys.stderr,
                    flush=True,
                )
            if options.keep and not found[-1][1].harmless:
                options.keep.mkdir(parents=True, exist_ok=True)
                (options.keep / f"{number}_{name}").write_bytes(content)
        worker.close()
    return found


if __name__ == "__main__":
    sys.exit(main())
