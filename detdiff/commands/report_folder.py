"""A folder of comparisons: one page each, and an index over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from detdiff.commands.outputs import Wanted, check, put
from detdiff.commands.report import Made, Why, how_to_run, opened_answer, pair_in, write
from detdiff.commands.sides import Asked
from detdiff.compare import compare, series
from detdiff.errors import CommandError, DetdiffError
from detdiff.report.build import build
from detdiff.report.index import Entry, index_html, index_text
from detdiff.report.saved import read_saved
from detdiff.report.words import escaped
from detdiff.trace import Trace


def gathered(asked: Asked, why: Why, wanted: Wanted, width: int) -> list[str]:
    """Write an index at ``wanted.html`` with a page for each comparison beside it, and say in lines what there is.

    Raises CommandError where the folder holds no comparison, or for options that are of one comparison; what cannot be read
    is a line of its own.
    """
    folder = asked.files[0]
    if any(option != "--html" for option, _ in wanted.named):
        raise CommandError(
            f"{folder} is a folder of comparisons, which --html gathers under an index; the other formats are of one comparison. "
            "Name that one, or leave the other formats out."
        )
    if how_to_run(asked, why):
        raise CommandError(
            f"{folder} is a folder of comparisons, which are gathered as they are, and the other options say what to run. Leave "
            "them out, or name the two traces or scenarios in its place."
        )
    found = list(_found(folder, wanted.html))
    inputs = [
        each for _, path in found for each in ([path] if path.is_file() else [path / side for side in "ab"])
    ]
    check(wanted, inputs)
    entries, refused = [], []
    for name, path in found:
        try:
            made = _made(path, asked.partial)
        except (DetdiffError, OSError) as error:
            said = str(error) if str(path) in str(error) else f"{path}: {error}"
            refused.append(escaped(" ".join(said.split()), ""))
            continue
        page = None if wanted.html is None else f"{name}.html"
        if page is not None and wanted.html is not None:
            write(made, Wanted(html=wanted.html.with_name(page)))
        entries.append(Entry.of(name, made.report, page))
    if not entries:
        raise CommandError(
            f"{folder} is no trace and holds no comparison; expected answers that were written with --json, or directories "
            f"with the traces a and b, as --keep makes them.{_refused(refused)}"
        )
    lines = [index_text(entries, width=width).rstrip("\n"), *(f"not read: {line}" for line in refused)]
    if wanted.html is not None:
        lines.append(f"  {put(wanted.html, index_html(entries))}")
    return lines


def _refused(refused: Sequence[str]) -> str:
    if not refused:
        return ""
    more = f" ({len(refused) - 1} more could not be read.)" if len(refused) > 1 else ""
    return f" {refused[0]}{more}"


def _found(folder: Path, index: Path | None) -> Iterator[tuple[str, Path]]:
    """Each comparison's page name and where it is: a file of JSON, or a directory with two traces. No page has the name of
    the index."""
    taken = {"index" if index is None else index.stem.lower()}
    for path in sorted(folder.iterdir()):
        answer = path.is_file() and path.suffix == ".json"
        if answer or pair_in(path) is not None:
            stem = path.stem if answer else path.name
            name, number = stem, 2
            while name.lower() in taken:
                name, number = f"{stem}-{number}", number + 1
            taken.add(name.lower())
            yield name, path


def _made(path: Path, partial: bool) -> Made:
    if path.is_file():
        return opened_answer(read_saved(path), "", partial=partial)
    a, b = (Trace.open(path / side, partial=partial, checked=True) for side in "ab")
    divergence = compare(a, b)
    return Made(build(divergence, None, series(a, b, divergence)), (a, b))
