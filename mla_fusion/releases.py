"""Lists torch_npu's releases: what each provides, and which to install if it is not enough.

No run-time decision reads this table: `mla_fusion.compat` looks for the schema and torchair's
functions in what is installed. The table names the release to install instead, lists the pairs of
``make matrix``, and is the page docs/releases.md. Post releases differ: 2.9.0 and 2.9.0.post9 are
for the same torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

from mla_fusion import compat
from mla_fusion._autoload import torch_npu_installed


@dataclass(frozen=True)
class Release:
    """One release of torch_npu.

    torch     the torch that its metadata requires
    schema    what its schema of the operator has: "whole", "no dtypes" or "absent"
    torchair  what its torchair has: "whole", "old" or "absent"
    tested    "tested" for a pair of the matrix
    """

    torch_npu: str
    torch: str
    schema: str
    torchair: str
    tested: str = ""

    @property
    def works(self) -> bool:
        """Returns True if graphs can be compiled with this release."""
        return self.torchair == "whole"


_TABLE = """\
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
"""
RELEASES = tuple(Release(*re.split(" {2,}", row)) for row in _TABLE.splitlines())

_NUMBERS = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


class UnsupportedRelease(RuntimeError):
    """The installed torch_npu cannot compile graphs; the message says what to install."""


def numbers(version: str) -> tuple[int, int, int]:
    """Returns (2, 13, 0) for ``2.13.0.post1``, ``2.13.0+cpu`` and ``2.13.0rc1``.

    Raises ValueError if that is no version.
    """
    match = _NUMBERS.match(version)
    if match is None:
        raise ValueError(f"{version!r} is no version of torch or torch_npu")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def for_torch(torch_version: str) -> Release:
    """Returns the release to install beside this torch, or the newest that works."""
    working = [release for release in RELEASES if release.works]
    beside = [release for release in working if numbers(release.torch) == numbers(torch_version)]
    tested = [release for release in beside or working if release.tested]
    return (tested or beside)[-1]


def command(release: Release) -> str:
    """Returns the command that installs a release and its torch."""
    return f"pip install torch=={release.torch} torch_npu=={release.torch_npu}"


def refusal() -> str | None:
    """Returns what to install in place of the installed torch_npu; None if that can stay."""
    lacking = compat.torchair_lacks() if torch_npu_installed() else ()
    if not lacking:
        return None
    try:
        installed = metadata.version("torch_npu")
    except metadata.PackageNotFoundError:  # a build without metadata
        installed = metadata.version("torch")
    better = for_torch(installed)
    return (
        f"the torchair inside torch_npu {installed} lacks {', '.join(lacking)}, through which "
        f"graphs are compiled; install {better.torch_npu}: {command(better)}"
    )


def require() -> None:
    """Raises UnsupportedRelease if the installed torch_npu cannot compile graphs."""
    message = refusal()
    if message is not None:
        raise UnsupportedRelease(message)
