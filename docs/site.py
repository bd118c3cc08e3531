"""Hooks of the documentation site. Links from pages to files of the repository become those files'
names.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_OUTSIDE = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The site holds docs/ alone; in the repository the same links lead to the files."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def named(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link["path"]))
        is_name = posixpath.basename(path) in link["text"] or link["text"] in path
        return f"`{path}`" if is_name else f"{link['text']} (`{path}`)"

    return _OUTSIDE.sub(named, markdown)
