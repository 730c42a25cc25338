"""What a profile leaves open, such as a chip's generation or a version, and the text that fills it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .condition import Kind, Version, version_of
from .errors import BadParameterValue, UnknownParameter, nearest

Value = int | str | Version


@dataclass(frozen=True)
class Parameter:
    """A parameter of a profile: ``low`` to ``high``, one of ``choices``, or a version not below ``oldest``.

    ``default`` is as it is written, an integer or a text.
    """

    name: str
    meaning: str
    default: int | str
    choices: tuple[int | str, ...] = ()
    low: int = 0
    high: int = 0
    oldest: str = ""

    @property
    def kind(self) -> Kind:
        if self.oldest:
            return "version"
        return "text" if isinstance(self.default, str) else "number"

    @property
    def allowed(self) -> str:
        """The values it can have, in words."""
        if self.oldest:
            return f"a version not below {self.oldest}"
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        return f"a whole number from {self.low} to {self.high}"

    def value(self, text: int | str) -> Value:
        """The value that ``text`` stands for; raises BadParameterValue."""
        try:
            if self.oldest:
                found = version_of(str(text))
                if found < version_of(self.oldest):
                    raise ValueError(text)
                return found
            number = int(text) if self.kind == "number" else text
            if number not in self.choices if self.choices else not self.low <= int(number) <= self.high:
                raise ValueError(text)
            return number
        except ValueError:
            close = f" ({nearest(str(text), map(str, self.choices))})" if self.choices else ""
            raise BadParameterValue(
                f"The parameter {self.name} ({self.meaning}) was given {str(text)!r}; it takes {self.allowed}{close}. "
                "Give one of these, or leave it out for the default "
                f"{self.default}."
            ) from None


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """The name or path and the parameters of "NAME:key=value,key=value"; raises BadParameterValue."""
    stem, dot, rest = spec.partition(".toml:")
    name, _, given = (f"{stem}.toml", "", rest) if dot else spec.partition(":")
    values: dict[str, str] = {}
    for part in given.split(",") if given else ():
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not key or not value or key in values:
            raise BadParameterValue(
                f"The profile {spec!r} has {part!r} after the colon; parameters are written key=value, each once, with "
                "commas between them, such as mlx-metal:generation=15,letter=d."
            )
        values[key] = value
    return name, values


def bind(parameters: tuple[Parameter, ...], given: Mapping[str, int | str], profile: str) -> dict[str, Value]:
    """The value of each parameter, given or default. Raises UnknownParameter and BadParameterValue."""
    names = [parameter.name for parameter in parameters]
    for key in given:
        if key not in names:
            known = nearest(key, names) if names else "it has none."
            raise UnknownParameter(f"The profile {profile} has no parameter {key!r}; {known}")
    return {one.name: one.value(given.get(one.name, one.default)) for one in parameters}


def shown(value: Value) -> str:
    """A value as it is written."""
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(value)
