"""The files that a report is written to: checked before the first run, and each written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from detdiff.errors import CommandError

STDOUT = "-"


@dataclass(frozen=True)
class Wanted:
    """Where each format goes; ``json`` may be ``-``, the standard output. ``plots`` is a directory, ``pack`` a zip file."""

    html: Path | None = None
    markdown: Path | None = None
    json: Path | None = None
    plots: Path | None = None
    pack: Path | None = None

    @property
    def named(self) -> tuple[tuple[str, Path], ...]:
        """The options that were given, with their paths."""
        return tuple((f"--{name}", path) for name, path in vars(self).items() if path is not None)

    @property
    def files(self) -> tuple[Path, ...]:
        """All of them that are paths."""
        return tuple(path for option, path in self.named if (option, str(path)) != ("--json", STDOUT))


def check(wanted: Wanted, read: Sequence[Path]) -> None:
    """Raises CommandError for outputs that cannot be written, are one file, or are part of what is ``read``."""
    taken: dict[Path, str] = {}
    inputs = [Path(os.path.realpath(path)) for path in read]
    for option, path in wanted.named:
        if str(path) == STDOUT:
            if option == "--json":
                continue
            raise CommandError(
                f"{option} {path} would be a file of that name; only --json takes {STDOUT}, for the standard output. Name a file."
            )
        _check_place(option, path)
        place = Path(os.path.realpath(path))
        for given in (place, *place.parents):
            if given in inputs:
                raise CommandError(
                    f"{option} {path} would be written over {read[inputs.index(given)]}, which the report is made from, or into "
                    "it. Name another place."
                )
        for other, name in taken.items():
            # A directory of pictures may hold the other formats; a file holds nothing.
            below = (option != "--plots" and place in other.parents) or (
                name != "--plots" and other in place.parents
            )
            if place == other or below:
                raise CommandError(
                    f"{name} and {option} both name {path}, or one lies below the other, which is a "
                    "file; expected one for each. Name another for one of them."
                )
        taken[place] = option


def _check_place(option: str, path: Path) -> None:
    if option == "--plots":
        if path.exists() and not path.is_dir():
            raise CommandError(
                f"--plots {path} is a file; expected a directory, for there is more than one picture. Name another."
            )
    elif path.is_dir():
        raise CommandError(
            f"{option} {path} is a directory; expected the file to write. Name one inside of it."
        )
    above = path if option == "--plots" and path.exists() else path.parent
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        raise CommandError(
            f"{option} {path} lies below {above}, which is a file; expected a directory. Name another place."
        )
    if not os.access(above, os.W_OK | os.X_OK):
        raise CommandError(
            f"{option} {path} cannot be written: {above} is not yours to write to. Name another place, or change its permissions."
        )


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A place to write a file at, which becomes ``path`` at the end of the block: a page open in a browser is never half
    of one. Raises OSError, which names ``path``.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            # A device or a pipe is written to; a file in its place would take it from the whole system.
            yield path
            return
        # A link stays one.
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f".detdiff-{os.getpid()}.tmp")
        try:
            yield temporary
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def put(path: Path, text: str) -> Path:
    """Write a file whole or not at all. Raises OSError."""
    with whole(path) as place:
        place.write_text(text, encoding="utf-8")
    return path
