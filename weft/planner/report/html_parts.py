"""Parts of weft's pages: the document, tables, legends and figures, as HTML that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from weft.planner.report.style import part_class, style_sheet


def document(title: str, body: str) -> str:
    """A whole page."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style_sheet()}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def figure(title: str, what: str, legend: str, picture: str, below: str = "") -> str:
    """A section with a picture under its caption; `legend`, `picture` and `below` are HTML."""
    return (
        f"<section><h2>{title}</h2><figure><figcaption>{escape(what.strip())}</figcaption>{legend}"
        f'<div class="scroll">{picture}</div></figure>{below}</section>'
    )


def legend_list(parts: Iterable[str], more: str = "", before: str = "", names: Mapping[str, str] | None = None) -> str:
    """A square and a word for each part, `before` in front of them; `more` is HTML."""
    words = names or {}
    items = "".join(f'<li><i class="{part_class(part)}"></i>{escape(words.get(part, part))}</li>' for part in parts)
    begin = f'<li class="quiet">{before}</li>' if before else ""
    return f'<ul class="legend">{begin}{items}{more}</ul>' if items or more else ""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], first: bool = False) -> str:
    """Cells are HTML. Heads that begin with # stand over numbers; the first row may be the one that counts."""
    kinds = ["number" if head.startswith("#") else "axes" if "plan" in head else "short" for head in heads]
    head = "".join(
        f'<th scope="col" class="{kind}">{name.lstrip("#")}</th>' for kind, name in zip(kinds, heads, strict=True)
    )
    body = "".join(
        ('<tr class="first">' if first and index == 0 else "<tr>")
        + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, row, strict=True))
        + "</tr>\n"
        for index, row in enumerate(rows)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'
