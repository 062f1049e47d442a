"""Checks that tag, version and changelog agree, and prints what the changelog says: `python .ci/release.py v0.1.0`."""

import pathlib
import re
import runpy
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def notes(tag: str, version: str, changelog: str) -> str:
    """What a changelog says of the newest version.

    Raises:
      ValueError: where the tag is not that version's, or the changelog does not have it, or still calls it unreleased.
    """
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, but podracer/version.py says {version}: the tag must be v{version}.")
    heading, _, rest = changelog.partition("\n## ")[2].partition("\n")
    if not re.fullmatch(rf"{re.escape(version)}( \(\d{{4}}-\d\d-\d\d\))?", heading.strip()):
        raise ValueError(f"CHANGELOG.md begins with '## {heading}': it must be '## {version} (YYYY-MM-DD)'.")
    return rest.partition("\n## ")[0].strip()


if __name__ == "__main__":
    try:
        version = runpy.run_path(str(ROOT / "podracer" / "version.py"))["__version__"]
        print(notes(sys.argv[1], version, (ROOT / "CHANGELOG.md").read_text()))
    except ValueError as error:
        sys.exit(f"release: {error}")
