"""Every error this library raises on purpose: one class per broken rule, each message one paragraph."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class KernelLibraryError(ValueError):
    """Base of all errors that a wrong name, operand or profile can cause."""


class UnknownKernel(KernelLibraryError):
    """No kernel of that name; the message gives the nearest names."""


class BadOperand(KernelLibraryError):
    """An array has the wrong shape, dtype or memory order for the call."""


class UnsupportedFormat(KernelLibraryError):
    """A kernel has no order for a weight of this format, width or shape."""


class ProfileError(KernelLibraryError):
    """A dispatch profile cannot be used."""


class UnknownProfile(ProfileError):
    """No profile of that name is shipped; the message gives the nearest names."""


class UnreadableProfile(ProfileError):
    """A profile file is missing, or is not TOML."""


class UnknownKey(ProfileError):
    """A profile or a rule has a key that does not exist; the message gives the nearest one."""


class MissingKey(ProfileError):
    """A profile or a rule lacks a key that it must have."""


class BadValue(ProfileError):
    """A key of a profile or of a rule has a value that it cannot have."""


class BadRange(ProfileError):
    """A range is not written as "4", "2..8" or "9..", or is empty."""


class UnreachableRule(ProfileError):
    """An earlier rule takes every call that a later one could take."""


class BadExpression(ProfileError):
    """A condition or definition is not in the small language of profiles; the message names the place."""


class BadDefinition(ProfileError):
    """A definition has no value for some calls, or its name is taken."""


class BadParameter(ProfileError):
    """A parameter of a profile is not declared with a default and the values it can have."""


class UnknownParameter(ProfileError):
    """A profile has no parameter of that name; the message gives the nearest one."""


class BadParameterValue(ProfileError):
    """A parameter of a profile cannot have that value."""


class BadEntryPoint(ProfileError):
    """An installed package offers a profile that cannot be loaded."""


class MissingGgufPackage(KernelLibraryError):
    """The `gguf` package is not installed and a GGUF file cannot be read without it."""


class UnreadableGguf(KernelLibraryError):
    """A file is missing, or is not a whole GGUF file."""


class UnknownTensor(KernelLibraryError):
    """A file has no tensor of that name; the message gives the nearest ones."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known ones, or all of them."""
    names = list(known)
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(names)}."
