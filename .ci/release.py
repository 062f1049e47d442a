"""Checks that tag, version, changelog and address agree, and prints what changed: `python .ci/release.py v0.1.0`."""

import os
import pathlib
import re
import runpy
import sys
import tomllib

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


def check_address(address: str, published: str) -> None:
    """Checks the address of the repository, which README's links and notebooks have from pyproject.toml.

    Raises:
      ValueError: where it is not that which is published.
    """
    if address != published:
        raise ValueError(
            f"project.urls.Repository in pyproject.toml is {address}, but this is {published or 'nowhere public'}: "
            "set it, and run `python docs/notebooks.py --address`."
        )


if __name__ == "__main__":
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        here = "/".join(os.environ.get(name, "") for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"))
        check_address(project["urls"]["Repository"], here.strip("/"))
        version = runpy.run_path(str(ROOT / "podracer" / "version.py"))["__version__"]
        print(notes(sys.argv[1], version, (ROOT / "CHANGELOG.md").read_text()))
    except ValueError as error:
        sys.exit(f"release: {error}")
