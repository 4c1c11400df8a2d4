"""
All Python snippets of README.md and docs/ are run, those of a page one after another, as a reader does.

A comment before a snippet shortens it for the test: ``<!-- shortened: 100_000 -> 500, "run" -> "walk" -->``. Everything
else runs as printed.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").glob("*.md"))]
SNIPPET = re.compile(r"(?:<!-- shortened: (?P<changes>[^\n]*) -->\n\n?)?^```python\n(?P<code>.*?)^```$", re.M | re.S)
AGENTS = ROOT / "tests" / "sb2_compat" / "agents"
MEMBERS = re.compile(r"^::: (\S+)\n    options: \{members: \[([^\]]*)\]", re.M)
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def snippets(page: Path) -> Iterator[tuple[int, str]]:
    """
    :return: the line that each snippet begins at, and the snippet as the test runs it
    """
    text = page.read_text()
    for match in SNIPPET.finditer(text):
        code = match["code"]
        for change in match["changes"].split(", ") if match["changes"] else []:
            printed, short = change.split(" -> ")
            assert printed in code, f"{page.name} has no {printed} to shorten"
            code = code.replace(printed, short)
        yield text.count("\n", 0, match.start("code")), code


WITH_SNIPPETS = [page for page in PAGES if any(snippets(page))]


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=lambda page: page.stem)
def test_snippets_run_as_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__", "AGENTS": AGENTS}
    for line, code in snippets(page):
        exec(compile("\n" * line + code, str(page), "exec"), namespace)  # its errors have the page's own line numbers


def test_every_python_snippet_is_found() -> None:
    for page in PAGES:
        assert page.read_text().count("```python") == len(list(snippets(page))), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_members_in_the_api_reference_are_those_of_their_class() -> None:
    found = MEMBERS.findall((ROOT / "docs/pages/api.md").read_text())
    assert found
    for path, members in found:
        own = vars(resolve_name(path))
        assert [name for name in members.split(", ") if name not in own] == []  # inherited ones are not shown


def test_how_it_works_names_every_file_of_the_algorithm() -> None:
    page = (ROOT / "docs/pages/how_it_works.md").read_text()
    files = {path.name for path in (ROOT / "sb3_acer").glob("[!_]*.py")}
    assert files
    assert [name for name in sorted(files) if f"{name}`" not in page] == []


@pytest.mark.slow
def test_the_first_snippet_of_the_readme_learns_what_the_readme_says() -> None:
    match = SNIPPET.search((ROOT / "README.md").read_text())
    assert match is not None
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(match["code"], namespace)
    assert namespace["mean"] >= 475
