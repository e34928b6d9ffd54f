"""What mkdocs.yml cannot say: pages that lie in the repository's root, and links to files that are not pages.

On GitHub, `docs/trainer.md` links to `../CONTRIBUTING.md` and `../recipes/gsm8k.yaml`. The site has the first as a page
of its own and the second not at all: there the link becomes its text.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security_policy.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
}
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
OUTSIDE = re.compile(r"^\[[^\]]+\]: \.\./.*\n?", re.MULTILINE)  # of the repository's web page
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root's pages."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the links those of the site."""
    names = {page_name: source for source, page_name in PAGES.items()}
    source = names.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(lambda link: site_link(link, source, page.file.src_uri), text) for text in parts[::2]]
    parts[::2] = [OUTSIDE.sub("", text) for text in parts[::2]]
    return "".join(parts)


def site_link(link: re.Match[str], source: str, page: str) -> str:
    """`link` of the repository's file `source`, as the site's `page` has it."""
    text, address = link.groups()
    name, hash_, anchor = address.partition("#")
    if not name or re.match(r"[a-z]+:", name):
        return link[0]
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
    there = PAGES.get(target) or target.removeprefix("docs/")
    if there == target or not posixpath.splitext(there)[1]:  # no page: a file of the code, or a directory
        return text[1:-1]
    return f"{text}({posixpath.relpath(there, posixpath.dirname(page) or '.')}{hash_}{anchor})"
