"""Finds profiles by name: those that are shipped, those of installed packages, and files."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from pathlib import Path

from .dispatch import Profile
from .errors import BadEntryPoint, UnknownProfile, UnreadableProfile, nearest
from .library import kernel_names
from .parameters import split_spec
from .profile_file import parse_profile

GROUP = "detdiff.profiles"


def profile_names() -> tuple[str, ...]:
    """The names of the profiles that are shipped, then those that installed packages offer."""
    shipped = _shipped()
    return (*shipped, *(name for name in _offered() if name not in shipped))


def profile(spec: str) -> Profile:
    """The profile of that name, or in the file of a path that ends in .toml, with parameters after a colon.

    "mlx-metal", "mlx-metal:generation=15,letter=d", "./mine.toml:chip=2". Raises UnknownProfile, UnknownParameter,
    BadParameterValue, and what ``load_profile`` raises.
    """
    name, given = split_spec(spec)
    if name.endswith(".toml"):
        return load_profile(Path(name)).with_parameters(given)
    if name in _shipped():
        text = (files(__package__) / "profiles" / f"{name}.toml").read_text("utf-8")
        return parse_profile(text, f"Profile {name}", kernel_names()).with_parameters(given)
    offered = _offered()
    if name in offered:
        return _load(offered[name]).with_parameters(given)
    raise UnknownProfile(
        f"There is no dispatch profile named {name!r}; {nearest(name, profile_names())} A file of your own is given by "
        "a path that ends in .toml."
    )


def load_profile(path: Path) -> Profile:
    """The profile in a TOML file; raises a ProfileError, or UnknownKernel where a rule names none."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableProfile(
            f"Profile {path} cannot be read: {error}. It must be a UTF-8 TOML file; check the path."
        ) from error
    return parse_profile(text, f"Profile {path}", kernel_names())


def _shipped() -> tuple[str, ...]:
    found = (files(__package__) / "profiles").iterdir()
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in found if entry.name.endswith(".toml")))


def _offered() -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)}


def _load(point: EntryPoint) -> Profile:
    """What an entry point names: a Path, or a text that is a path ending in .toml or the TOML itself."""
    try:
        found = point.load()
    except Exception as error:
        raise BadEntryPoint(
            f"The profile {point.name} of an installed package ({point.value}) cannot be loaded: "
            f"{type(error).__name__}: {error}. Repair or remove that package."
        ) from error
    if isinstance(found, Path) or (isinstance(found, str) and found.endswith(".toml")):
        return load_profile(Path(found))
    if isinstance(found, str):
        return parse_profile(found, f"Profile {point.name} of {point.value}", kernel_names())
    raise BadEntryPoint(
        f"The profile {point.name} of an installed package ({point.value}) is a {type(found).__name__}; expected a "
        "pathlib.Path, or a text that is a path ending in .toml or the TOML itself. Repair or remove that package."
    )
