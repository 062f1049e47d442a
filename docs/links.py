"""A hook of mkdocs: links to pictures in benchmarks/results lead to the site's copies in generated/results."""

import re


def on_page_markdown(markdown: str, **_: object) -> str:
    """A page as the site shows it."""
    return re.sub(
        r"\]\(((?:\.\./)*)\.\./benchmarks/results/(?:\w+/)*([\w-]+\.png)\)", r"](\1generated/results/\2)", markdown
    )
