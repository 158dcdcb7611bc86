"""MkDocs hooks: the site of `make docs` has pages that are no files of docs/.

README.md, CONTRIBUTING.md and CHANGELOG.md become pages, and each room of the package gets a page of
the reference. A link to any other file of the checkout becomes its path, as code, because the site
does not hold that file.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = ROOT / "vla_rl"

PAGES: Final = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files of the checkout that become pages, by the name of the page."""

LINK: Final = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of the reference to the navigation."""
    assert config.nav is not None
    config.nav.append({"Reference": [f"reference/{room}.md" for room in rooms()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files of docs/."""
    for source, page in PAGES.items():
        text = with_links_of_the_site((ROOT / source).read_text(), PurePosixPath(source))
        files.append(File.generated(config, page, content=text))
    for room in rooms():
        text = f"# vla_rl.{room}\n\n::: vla_rl.{room}\n"
        files.append(File.generated(config, f"reference/{room}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change the links of a page of docs/ to those of the site."""
    if page.file.generated_by is not None:
        return markdown
    return with_links_of_the_site(markdown, PurePosixPath("docs") / page.file.src_uri)


def rooms() -> list[str]:
    """Return the packages and modules of vla_rl."""
    packages = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    return sorted([*packages, *(path.stem for path in PACKAGE.glob("[a-z]*.py"))])


def with_links_of_the_site(text: str, source: PurePosixPath) -> str:
    """Return a page's text with links that work in the site; code is left alone.

    Args:
        text: Markdown.
        source: path of the file in the checkout.
    """
    page = PurePosixPath(PAGES.get(str(source), "")) if str(source) in PAGES else None
    current = page if page is not None else source.relative_to("docs")

    def changed(link: re.Match[str]) -> str:
        target, anchor = link["target"], link["anchor"] or ""
        if re.match(r"[a-z]+:", target):
            return link[0]
        path = (ROOT / source.parent / target).resolve().relative_to(ROOT)
        if str(path) in PAGES:
            inside = PurePosixPath(PAGES[str(path)])
        elif path.parts[0] == "docs":
            inside = PurePosixPath(*path.parts[1:])
        else:
            return f"{link['text']} (`{path}`)" if link["text"] != str(path) else f"`{path}`"
        up = "../" * (len(current.parts) - 1)
        return f"[{link['text']}]({up}{inside}{anchor})"

    # a fenced block begins and ends with three backticks: every second part is code
    parts = re.split(r"(```.*?```)", text, flags=re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(changed, part) for part in parts)
