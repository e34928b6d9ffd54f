"""The documents site builds without a warning, every link leads somewhere, and no page asks another host for a file."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.xdist_group("site")]
LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}


class Page(HTMLParser):
    """What an HTML page refers to, and what in it can be referred to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {value for name in ("id", "name") if (value := found.get(name))}
        if tag == "a" and (address := found.get("href")) is not None:
            self.links.append(address)
        elif address := found.get(LOADS.get(tag, "")):
            self.loads.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The site's pages."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return {file.resolve(): Page(file.read_text()) for file in folder.rglob("*.html")}


def test_every_link_leads_to_a_page_and_a_place_in_it(site: dict[Path, Page]) -> None:
    wrong = []
    for file, page in site.items():
        for address in [*page.links, *page.loads]:
            split = urlsplit(address)
            if split.scheme or file.name == "404.html":  # its links begin at the server's root
                continue
            target = (file.parent / unquote(split.path)).resolve() if split.path else file
            anchor = unquote(split.fragment)
            if not target.exists() or (anchor and target in site and anchor not in site[target].ids | {"__top"}):
                wrong.append(f"{file.name}: {address}")
    assert wrong == []


def test_no_page_asks_another_host(site: dict[Path, Page]) -> None:
    assert [(file.name, address) for file, page in site.items() for address in page.loads if "//" in address] == []
    (root,) = {file.parent for file in site if file.name == "404.html"}
    styles = [
        text
        for sheet in root.rglob("*.css")
        if re.search(r"(url\(|@import) *[\"']?(https?:)?//", text := sheet.read_text())
    ]
    assert styles == []


def test_every_page_can_be_searched(site: dict[Path, Page]) -> None:
    (root,) = {file.parent for file in site if file.name == "404.html"}
    index = (root / "search/search_index.js").read_text()
    missing = [
        file.name
        for file in site
        if f'"{file.relative_to(root)}' not in index and file.name not in {"404.html", "index.html"}
    ]
    assert missing == []


def test_the_api_reference_has_what_its_page_names(site: dict[Path, Page]) -> None:
    (root,) = {file.parent for file in site if file.name == "404.html"}
    named = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    ids = site[(root / "reference.html").resolve()].ids
    assert len(named) > 30
    assert [module for module in named if not any(name.startswith(f"{module}.") for name in ids)] == []


def test_navigation_lists_every_page_once() -> None:
    class Loader(yaml.SafeLoader):
        """Reads past the tags of Python objects."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]
    listed = re.findall(r"[\w/-]+\.md", str(nav))
    assert len(listed) == len(set(listed))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(listed)
