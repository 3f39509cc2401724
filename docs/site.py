"""A hook of mkdocs: the site has the repository's own pages, at their places there.

So the links between them are the same on the site as in a clone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/**/*.md", "docs/images/*", "examples/*", "benchmarks/**/*.md")
PAGES += ("benchmarks/results/*.json", "LICENSE")


def on_files(files: Files, *, config: Any) -> Files:
    """The theme's files, and those of the repository in the place of docs/ alone."""
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    found = (path for pattern in PAGES for path in sorted(ROOT.glob(pattern)) if path.is_file())
    uris = (path.relative_to(ROOT).as_posix() for path in found)
    pages = [File.generated(config, uri, abs_src_path=str(ROOT / uri)) for uri in uris]
    return Files([*of_theme, *pages])
