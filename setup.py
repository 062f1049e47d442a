"""What pyproject.toml cannot say: on a package index, README's links need the address of the repository."""

import pathlib
import re
import runpy
import tomllib

import setuptools

HERE = pathlib.Path(__file__).parent


def absolute(text: str, repository: str, version: str) -> str:
    """Markdown whose links to files lead into a repository at the tag of a version; those of pictures, to the files."""

    def link(found: re.Match[str]) -> str:
        kind = "raw" if found[1].startswith("!") else "blob"
        return f"{found[1]}({repository.rstrip('/')}/{kind}/v{version}/{found[2]})"

    return re.sub(r"(!\[[^\]]*\]|\])\((?!\w+:|#)([^)\s]+)\)", link, text)


if __name__ == "__main__":
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    urls = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    version = runpy.run_path(str(HERE / "podracer" / "version.py"))["__version__"]
    readme = absolute(readme, urls["Repository"], version)
    setuptools.setup(long_description=readme, long_description_content_type="text/markdown")
