"""Names of an earlier version that are gone, and what to write instead. Kept for one release."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

GONE = {
    "Config(unabsorbed=)": "write targets=('v3', 'identity') for unabsorbed='identity'",
    "Config(weights=)": "mf.prepack(model, *inputs) keeps one copy of the weights",
    "Config(targets=('key',))": "no operator is called for the key's half alone",
    "Config(targets=('preprocess',))": "the pass calls npu_mla_prolog_v3 alone; npu_mla_preprocess "
    "is still checked, computed and audited",
    "audit(seconds=)": "leave it out: mf.audit undoes each slip of a short table once",
    "audit(tries=)": "leave it out: mf.audit undoes each slip of a short table once",
    "mla-fusion audit DUMP": "mla-fusion explain or inspect reads a dump; audit takes functions",
    "mla-fusion audit --html": "read the text, or --json",
    "mla-fusion bench": "run benchmarks/pass_time.py of a source tree",
    "mla-fusion explain --stats": "the stages' times are in the JSON of a report (timings)",
    "mla-fusion optimize": "write mla-fusion check-model",
    "MLA_FUSION_GRAPHS": "TORCH_LOGS=aot_graphs prints the graph that torch hands over",
}


def sentence(names: Iterable[str]) -> str:
    """Returns what replaces the first name that is gone, as a sentence; "" if none is gone."""
    gone = next((name for name in names if name in GONE), None)
    return f"{gone} is gone: {GONE[gone]}" if gone is not None else ""


def without_gone_options(function: Callable[P, T]) -> Callable[P, T]:
    """Returns the function. It raises TypeError, with a sentence, for an option that is gone."""
    name = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        if gone := sentence(f"{name}({option}=)" for option in options):
            raise TypeError(gone)
        return function(*args, **options)

    return call


def of_command_line(words: Iterable[str]) -> str:
    """Returns the sentence for a command, its option or its dump that is gone; "" if none is."""
    command, *options = [*words, ""]
    name = f"mla-fusion {command}"
    dumps = [word for word in options if Path(word).is_file() and not word.endswith(".py")]
    arguments = [word.partition("=")[0] for word in options] + ["DUMP"] * bool(dumps)
    return sentence([name, *(f"{name} {argument}" for argument in arguments)])
