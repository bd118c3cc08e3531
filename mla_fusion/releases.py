"""THE table of releases: what each torch_npu brings, and which one to install where it does not
bring enough.

Nothing decides by it at run time: whether a schema or a function of torchair is there is asked of
what is installed (`mla_fusion.compat`). The table names the release to install instead, lists the
pairs that ``make matrix`` tests, and is the page docs/releases.md. What decides is the post
release: 2.9.0 and 2.9.0.post9 are for the same torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

from mla_fusion import compat
from mla_fusion._autoload import torch_npu_installed


@dataclass(frozen=True)
class Release:
    """One release of torch_npu. ``torch``: as its metadata asks for it. ``tested``: it is a pair of
    the matrix.
    """

    torch_npu: str
    torch: str
    schema: str
    torchair: str
    tested: bool

    @property
    def works(self) -> bool:
        return self.torchair == "whole"


def _release(row: str) -> Release:
    torch_npu, torch, schema, torchair, *tested = re.split(" {2,}", row)
    return Release(torch_npu, torch, schema, torchair, bool(tested))


RELEASES = tuple(
    map(
        _release,
        """\
2.6.0         2.6.0+cpu   absent     absent
2.6.0.post5   2.6.0+cpu   no dtypes  old
2.7.1         2.7.1+cpu   absent     absent  tested
2.7.1.post11  2.7.1+cpu   whole      whole   tested
2.8.0         2.8.0+cpu   absent     absent  tested
2.8.0.post5   2.8.0+cpu   no dtypes  whole   tested
2.9.0         2.9.0+cpu   no dtypes  old     tested
2.9.0.post9   2.9.0+cpu   whole      whole   tested
2.9.1         2.9.1+cpu   no dtypes  whole
2.10.0        2.10.0+cpu  no dtypes  whole
2.10.0.post7  2.10.0+cpu  whole      whole   tested
2.11.0.post3  2.11.0+cpu  whole      whole   tested
2.12.0.post3  2.12.0      whole      whole   tested
2.13.0        2.13.0      whole      whole   tested
2.14.0        2.14.0      whole      whole   tested
""".splitlines(),
    )
)

_NUMBERS = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


class UnsupportedRelease(RuntimeError):
    """The torch_npu that is installed lacks what graphs are compiled through; the message says what
    to install.
    """


def numbers(version: str) -> tuple[int, int, int]:
    """``2.13.0.post1``, ``2.13.0+cpu`` and ``2.13.0rc1`` -> (2, 13, 0). Raises ValueError for what
    is no version.
    """
    found = _NUMBERS.match(version)
    if found is None:
        raise ValueError(f"{version!r} is no version of torch or torch_npu")
    return int(found[1]), int(found[2]), int(found[3] or 0)


def for_torch(torch_version: str) -> Release:
    """The release to install beside this torch, or the newest that works where there is none."""
    working = [release for release in RELEASES if release.works]
    beside = [release for release in working if numbers(release.torch) == numbers(torch_version)]
    tested = [release for release in beside or working if release.tested]
    return (tested or beside)[-1]


def command(release: Release) -> str:
    """How to install the pair."""
    return f"pip install torch=={release.torch} torch_npu=={release.torch_npu}"


def refusal() -> str | None:
    """What to install in place of the torch_npu that is installed; None where it will do, or there
    is none.
    """
    if not torch_npu_installed():
        return None
    lacking = compat.torchair_lacks()
    if not lacking:
        return None
    installed = _installed()
    better = for_torch(installed)
    return (
        f"the torchair inside torch_npu {installed} lacks {', '.join(lacking)}, through which "
        "graphs are compiled; "
        f"install {better.torch_npu}: {command(better)}"
    )


def _installed() -> str:
    """The release of torch_npu that is installed, or (a build without metadata) that of torch."""
    try:
        return metadata.version("torch_npu")
    except metadata.PackageNotFoundError:
        return metadata.version("torch")


def require() -> None:
    """Raise UnsupportedRelease where the torch_npu that is installed will not do."""
    message = refusal()
    if message is not None:
        raise UnsupportedRelease(message)
