"""A folder of comparisons: one page each, and an index over them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from detdiff.commands.report import Made, Wanted, opened_answer, put, write
from detdiff.compare import compare, series
from detdiff.errors import CommandError, DetdiffError
from detdiff.report.content import build
from detdiff.report.index import Entry, index_html, index_text
from detdiff.report.saved import read_saved
from detdiff.trace import Trace
from detdiff.trace.header import HEADER


def gathered(folder: Path, wanted: Wanted, width: int) -> Iterator[str]:
    """Write an index at ``wanted.html`` with a page for each comparison beside it, and say in lines what there is.

    Raises CommandError where the folder holds no comparison, or for a format that has no index; what cannot be read is a
    line of its own.
    """
    if wanted.files and wanted.files != (wanted.html,):
        raise CommandError(
            f"{folder} is a folder of comparisons, which --html gathers under an index; the other formats are of one comparison. "
            "Name that one, or leave the other formats out."
        )
    entries, refused = [], []
    for name, path in _found(folder):
        try:
            made = _made(path)
        except DetdiffError as error:
            refused.append(f"{path}: {error}")
            continue
        page = None if wanted.html is None else f"{name}.html"
        if page is not None and wanted.html is not None:
            write(made, Wanted(html=wanted.html.with_name(page)))
        entries.append(Entry.of(name, made.report, page))
    if not entries:
        why = f" {refused[0]}" if refused else ""
        raise CommandError(
            f"{folder} is no trace and holds no comparison; expected answers that were written with --json, or directories "
            f"with the traces a and b, as --keep makes them.{why}"
        )
    yield index_text(entries, width=width).rstrip("\n")
    yield from (f"not read: {line}" for line in refused)
    if wanted.html is not None:
        put(wanted.html, index_html(entries))
        yield f"  {wanted.html}"


def _found(folder: Path) -> Iterator[tuple[str, Path]]:
    """Each comparison's page name and where it is: a file of JSON, or a directory with two traces."""
    taken = {"index"}
    for path in sorted(folder.iterdir()):
        answer = path.is_file() and path.suffix == ".json"
        if answer or all((path / side / HEADER).is_file() for side in "ab"):
            name, number = path.stem if answer else path.name, 2
            while name.lower() in taken:
                name, number = f"{path.stem}-{number}", number + 1
            taken.add(name.lower())
            yield name, path


def _made(path: Path) -> Made:
    if path.is_file():
        return opened_answer(read_saved(path), "")
    a, b = (Trace.open(path / side, checked=True) for side in "ab")
    divergence = compare(a, b)
    return Made(build(divergence, None, series(a, b, divergence)), (a, b))
