"""``mla-fusion check-proof``: the certificates of a report, checked without torch and without the
pass.
"""

from __future__ import annotations

import argparse
import json

from mla_fusion.tools.command import Command, option
from mla_fusion.tools.target import UserError, existing, positive


def _check(arguments: argparse.Namespace) -> int:
    path = existing(arguments.report)
    try:
        from mla_fusion.prove import check
    except ModuleNotFoundError as error:
        raise UserError(f"check-proof needs {error.name}: pip install {error.name}") from error
    try:
        found = list(check.checked(check.read(path), arguments.points, arguments.seed))
    except check.NoReport as error:
        raise UserError(f"{path} is no report: {error}") from error
    refused = sum(isinstance(one, check.Refused) for _, one in found)
    if arguments.json:
        rows = [
            {"layer": layer, "accepted": False, "reason": str(one)}
            if isinstance(one, check.Refused)
            else {"layer": layer, "accepted": True, **one._asdict()}
            for layer, one in found
        ]
        print(json.dumps({"fusions": rows, "refused": refused}, indent=2))
    else:
        print("\n".join(check.line(*one) for one in found) or "the report has no fusion")
    return 1 if refused else 0


COMMAND = Command(
    "check-proof",
    _check,
    "Check what a report says is proved: its certificates, without torch and without the pass.",
    "Exit status 1: a fusion is not accepted.",
    (
        option("report", "what Report.to_json wrote", metavar="REPORT.json"),
        option("--points", "random points at least", type=positive, default=3),
        option(
            "--seed",
            "what the points follow from; left out, they are new each time",
            metavar="TEXT",
        ),
    ),
)
