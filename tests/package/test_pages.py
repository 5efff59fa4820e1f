"""Pages of docs: docs/measured/ is what benchmarks/measured.py makes, links lead somewhere, user pages are short."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import measured

ROOT = Path(__file__).parents[2]


def test_pages_are_what_the_results_give() -> None:
    texts = measured.pages()
    assert {*measured.PAGES.glob("*")} == {*texts}
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python benchmarks/measured.py"


def test_every_result_is_on_one_page_with_its_date_and_command() -> None:
    shown = [file for page in measured.SUBJECTS.values() for file in page.files]
    assert sorted([*shown, *measured.ELSEWHERE]) == sorted(path.name for path in measured.RESULTS.glob("*.json"))
    for file in shown:
        result = json.loads((measured.RESULTS / file).read_text(encoding="utf-8"))
        assert result["date"].count("-") == 2
        assert result["command"]


def test_every_transcribed_entry_is_shown_and_names_its_source() -> None:
    entries = json.loads((measured.RESULTS / measured.TRANSCRIBED).read_text(encoding="utf-8"))["entries"]
    assert {entry["subject"] for entry in entries} <= {*measured.SUBJECTS}
    for entry in entries:
        assert entry["source"].startswith("docs/")
        assert all(len(row) == len(entry["columns"]) for row in entry.get("rows", ()))


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("step_seconds", 0.0123456, "12.35 ms"),
        ("seconds_int4", 2.5e-6, "2.5 us"),
        ("bytes_read_per_token", 15_009_849_344, "15.01 GB"),
        ("link_bytes_per_second", 55.5e9, "55.5 GB/s"),
        ("seconds_error", -0.029, "-2.9 %"),
        ("bytes_ratio", 1.25, "1.25"),
        ("tokens", 8192, "8,192"),
        ("is_right", True, "yes"),
    ],
)
def test_a_number_has_the_unit_that_its_key_names(key: str, value: float, text: str) -> None:
    assert measured.number(key, value) == text


def test_a_table_with_many_columns_is_turned() -> None:
    rows = [("weft", {f"c{index}": str(index) for index in range(measured.MOST_COLUMNS + 1)})]
    assert list(measured.table(rows))[:3] == ["| | weft |", "|---|---|", "| c0 | 0 |"]


# --- user pages


def anchors(page: Path) -> set[str]:
    """What a link may name behind #, as GitHub makes it of headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8"))
    return {
        re.sub(r"[^\w -]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", one)).lower().replace(" ", "-")
        for one in headings
    }


def test_links_of_pages_lead_somewhere() -> None:
    lost = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if target.startswith(("http:", "https:")):
                continue
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                lost.append(f"{page.relative_to(ROOT)}: {target}")
    assert lost == []


REFERENCE = {"run_file.md", "models.md", "design.md", "how_it_works.md"}  # made from the code, or not for users


def test_user_pages_are_short() -> None:
    """A page has about 80 lines: what to type, when it pays, what it refuses. Figures are in docs/measured."""
    lengths = {page.name: page.read_text(encoding="utf-8").count("\n") for page in (ROOT / "docs").glob("*.md")}
    assert {name: length for name, length in lengths.items() if length > 100 and name not in REFERENCE} == {}
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 90


def test_benchmarks_share_one_harness() -> None:
    """What a result says of its day, command and hardware, and the options that all have, is in harness.py alone."""
    own = {"harness.py", "measured.py"}  # the second needs no torch
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.name not in own:
            assert not re.search(r"ArgumentParser\(|get_device_name\(|platform\.machine\(", text), path.name


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [
        page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md" and f"({page.name})" not in index
    ] == []
