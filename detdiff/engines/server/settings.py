"""What a user says of a server: its address and the settings of ``[engine]``, checked before anything is sent."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final
from urllib.parse import urlsplit

from detdiff.errors import EngineRefuses, ServerAddressInvalid
from detdiff.scenario import nearest

_LOOPBACK: Final = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")


@dataclass(frozen=True)
class ServerSettings:
    """The settings of the engine ``server``; times are in seconds.

    ``kind`` is what serves there, by its name in ``kinds.KINDS``, "" to find out by asking. ``model`` is the model's name
    there, "" for the only one. ``token_env`` names the environment variable that holds the token of ``Authorization``.
    ``timeout`` is how long the next token may take. ``retries`` is how often one request is sent again. ``verify`` is false,
    or a file of certificates to trust. ``insecure`` allows a token over plain HTTP. ``stream`` asks for tokens one by one.
    ``cache`` is "off" (switched off where the server can) or "as it is". ``rate`` (requests a second, drawn with ``seed``)
    and ``arrivals`` say when requests of schedule continuous come; without them an arrival counts ``tick``.
    ``rehearse`` runs a batch once more, streamed, where values come only unstreamed, to see whether it ran together.
    ``body`` is added to every request as it is.
    """

    kind: str = ""
    model: str = ""
    token_env: str = ""
    timeout: float = 120.0
    retries: int = 2
    verify: bool | str = True
    insecure: bool = False
    stream: bool = True
    cache: str = "off"
    rate: float = 0.0
    seed: int = 0
    arrivals: tuple[float, ...] = ()
    tick: float = 0.02
    rehearse: bool = True
    body: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ServerSettings:
        """Raises EngineRefuses for a setting that there is not, or of another type or range."""
        names = [each.name for each in fields(cls)]
        found: dict[str, Any] = {}
        for name, value in given.items():
            if name not in names:
                raise EngineRefuses(
                    f"There is no setting {name!r} of the engine server; {nearest(name, names)} Correct it."
                )
            default = getattr(cls, name, None)
            if name == "arrivals":
                value = value if isinstance(value, list | tuple) else [value]
                fits = all(_is_number(each) and each >= 0 for each in value)
                value = tuple(float(each) for each in value) if fits else value
            elif name == "body":
                fits = isinstance(value, Mapping)
            elif name == "verify":
                fits = isinstance(value, bool | str)
            elif isinstance(default, bool):
                fits = isinstance(value, bool)
            elif isinstance(default, int):
                fits = type(value) is int and value >= 0
            elif isinstance(default, float):
                fits = _is_number(value) and value >= 0 and (name not in ("timeout", "tick") or value > 0)
            else:
                fits = isinstance(value, str) and (name != "cache" or value in ("off", "as it is"))
            if not fits:
                raise EngineRefuses(
                    f"engine.{name} is {value!r}; expected {_EXPECTED.get(name, 'a value like ' + repr(default))}. Correct it."
                )
            found[name] = value
        return cls(**found)


_EXPECTED: Final = {
    "arrivals": "seconds from the start, one number for each request",
    "body": "a JSON object, whose keys are added to every request",
    "cache": "'off', or 'as it is'",
    "retries": "a whole number from 0",
    "timeout": "seconds, more than 0",
    "verify": "false, or a file of certificates",
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value < 1e9


@dataclass(frozen=True)
class ServerAddress:
    """Where a server is: ``root`` without ``/v1``, such as ``http://127.0.0.1:8000``."""

    root: str
    secure: bool
    loopback: bool

    @classmethod
    def of(cls, model: str | None) -> ServerAddress:
        """Raises ServerAddressInvalid for what is no address, or holds a password, a query or a fragment."""
        given = (model or "").strip()
        text = given if "://" in given else f"https://{given}"
        try:
            found = urlsplit(text)
            host, _ = found.hostname or "", found.port
        except ValueError:
            host, found = "", urlsplit("")
        if not given or found.scheme not in ("http", "https") or not host:
            raise ServerAddressInvalid(
                f"The engine server was given the model {model!r}; expected an address, such as http://127.0.0.1:8000/v1. "
                "Give it with --model."
            )
        if found.username is not None or found.password is not None:
            raise ServerAddressInvalid(
                f"The address of {host} holds a user or a password, which every trace would then hold. Put a token into an "
                "environment variable and name it with engine.token_env=NAME."
            )
        if found.query or found.fragment:
            raise ServerAddressInvalid(
                f"The address {found.scheme}://{found.netloc}{found.path} has a query or a fragment behind it; expected the "
                "address before /v1. Leave the rest out."
            )
        path = re.sub(r"/v1/?$|/+$", "", found.path)
        return cls(
            f"{found.scheme}://{found.netloc}{path}",
            found.scheme == "https",
            _LOOPBACK.fullmatch(host) is not None,
        )


def token_of(settings: ServerSettings, address: ServerAddress) -> str | None:
    """The token that the named environment variable holds. Raises ServerAddressInvalid where it would go unprotected, or is
    not there."""
    if not settings.token_env:
        return None
    token = os.environ.get(settings.token_env, "").strip()
    if not token or any(ord(each) < 33 or ord(each) > 126 for each in token):
        raise ServerAddressInvalid(
            f"engine.token_env names the environment variable {settings.token_env!r}, which "
            f"{'is not set' if not token else 'holds characters that no header can have'}; expected a token. Set it."
        )
    if not (address.secure or address.loopback or settings.insecure):
        raise ServerAddressInvalid(
            f"{address.root} is plain HTTP to another machine, and the token of {settings.token_env} would be readable on the "
            "way. Use https, or say engine.insecure=true where the network is trusted."
        )
    return token
