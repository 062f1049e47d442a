"""Tables and figures of README.md and docs/results: `python benchmarks/readme.py` writes them between their markers.

`<!-- table: anakin -->` opens one and `<!-- end -->` closes it. Nothing between them is written by hand. Within a line,
`<!-- value: cartpole-seconds -->` does the same for a figure. `benchmarks/pages` has a module for each page.
"""

from __future__ import annotations

import importlib
import pathlib
import re
from types import ModuleType

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"

RESULT_PAGES = (
    "learning",
    "mujoco",
    "minatar",
    "atari",
    "queue",
    "games",
    "speed",
    "gpu",
    "efficientzero",
    "remote",
    "scaling",
    "faults",
)

PAGES: dict[pathlib.Path, ModuleType] = {
    ROOT / "README.md": importlib.import_module("pages.front"),
    ROOT / "docs" / "index.md": importlib.import_module("pages.front"),
    RESULTS / "index.md": importlib.import_module("pages.front"),
    **{RESULTS / f"{name}.md": importlib.import_module(f"pages.{name}") for name in RESULT_PAGES},
}
"""The module that fills the markers of each page."""


def filled(page: pathlib.Path) -> str:
    """The text of a page with the tables and figures between its markers as they are measured.

    Raises:
      KeyError: for a marker that its module does not have.
    """
    module = PAGES[page]

    def table(found: re.Match[str]) -> str:
        return "\n".join([found[1], *module.TABLES[found[2]](), "<!-- end -->"])

    def value(found: re.Match[str]) -> str:
        return f"{found[1]}{module.VALUES[found[2]]()}<!-- end -->"

    text = re.sub(r"(<!-- table: ([\w-]+) -->)\n.*?<!-- end -->", table, page.read_text(), flags=re.DOTALL)
    return re.sub(r"(<!-- value: ([\w-]+) -->)[^\n]*?<!-- end -->", value, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page))
