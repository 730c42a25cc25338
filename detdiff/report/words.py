"""How single facts read in every report: names, token texts, counts, places, sizes, and the settings of a scenario."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from detdiff.compare import Composition, Magnitude, Origin
from detdiff.scenario import PathRule, Schedule
from detdiff.scenario.keys import TABLE
from detdiff.scenario.sampling import PROCESSORS

LONGEST = 80  # characters of a text that are shown
NAME, SENTENCE = 200, 4_000  # characters of a name, and of a sentence that may hold some


def shown(text: str) -> str:
    """A token's text in double quotes, cut where it is long; what a terminal would obey or hide is escaped."""
    return (
        f'"{escaped(text)}"'
        if len(text) <= LONGEST
        else f'"{escaped(text[:LONGEST])}" (cut, {len(text):,} in all)'
    )


def escaped(text: str, special: str = '\\"') -> str:
    """``text`` with everything unprintable as escapes, and a backslash before what is ``special``."""
    return "".join(_escape(c, special) for c in text)


def named(text: str, longest: int = NAME) -> str:
    """A name of the trace's, such as a request's id, escaped, and cut with a note where it is longer than any real one."""
    return (
        escaped(text) if len(text) <= longest else f"{escaped(text[:longest])}… (cut, {len(text):,} in all)"
    )


def passage(text: str) -> str:
    """A sentence that may hold names of the trace's, escaped and cut as they are."""
    return named(text, SENTENCE)


def _escape(c: str, special: str) -> str:
    if c in special:
        return f"\\{c}"
    if c.isprintable():
        return c
    return c.encode("unicode_escape", "surrogatepass").decode("ascii")


def count(n: int, noun: str, plural: str | None = None) -> str:
    """``1 row``, ``2,500 rows``."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def number(x: float | None, digits: int = 6) -> str:
    """A logit or margin; ``-`` where there is none."""
    return "-" if x is None else f"{x:.{digits}f}"


def spans(values: Sequence[tuple[int, int]], limit: int = 4) -> str:
    """Inclusive ranges, such as ``40-158, 160``; only the first ``limit`` and the last of many."""
    words = [str(a) if a == b else f"{a}-{b}" for a, b in values]
    if len(words) > limit:
        words = [*words[: limit - 1], "...", words[-1]]
    return ", ".join(words) or "none"


def runs_of(values: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending whole numbers as inclusive ranges."""
    found: list[tuple[int, int]] = []
    for value in values:
        if found and value == found[-1][1] + 1:
            found[-1] = (found[-1][0], value)
        else:
            found.append((value, value))
    return found


def composition(found: Composition | None) -> str:
    """``forward 7 (124 rows: 120 prefill of follower + 4 decode of anchor)``."""
    if found is None:
        return "no forward"
    members = " + ".join(f"{m.rows:,} {m.phase} of {named(m.request)}" for m in found.members[:6])
    if len(found.members) > 6:
        members += f" + {len(found.members) - 6} more"
    return f"forward {found.forward} ({count(found.rows, 'row')}: {members})"


def layer(n: int | None) -> str:
    """``layer 3``, or ``outside the layers``."""
    return "outside the layers" if n is None else f"layer {n}"


def origin_words(origin: Origin) -> str:
    """What happened at an origin, in a clause."""
    if origin.how == "leaf":
        return "its inputs are bit-equal and its outputs are not"
    if origin.how == "composite":
        if len(origin.between) > 1:
            return f"arising between {named(origin.between[0])} (equal) and {named(origin.between[1])} (not)"
        return "its inputs and all sites inside are bit-equal and its outputs are not"
    if origin.how == "changed":
        return "a cache entry was read otherwise than it was written"
    return "every cache entry up to here was written alike, and yet this row read others: a mask, offset or length"


_MOST_ULP = 1 << 20
"""More of them are no longer a distance that anybody reads: signs or powers of two differ."""


def _ulps(n: int) -> str:
    return f"{n:,} ULP" if n <= _MOST_ULP else "over a million ULP"


def distance(most: float | None, ulp: int | None, dtype: str) -> str:
    """``, by at most 0.03 (12 ULP of bfloat16)``; nothing where nothing finite was measured."""
    if most is None:
        return ""
    if ulp is None:
        return f", by at most {most:.3g}"
    return f", by at most {most:.3g} ({_ulps(ulp) if ulp or not most else 'less than 1 ULP'} of {dtype})"


def size(found: Magnitude) -> str:
    """A magnitude in a clause."""
    if found.dtype_a != found.dtype_b:
        return f"dtype {found.dtype_a} in a, {found.dtype_b} in b"
    if found.shape_a != found.shape_b:
        return f"shape {list(found.shape_a)} in a, {list(found.shape_b)} in b"
    parts = [f"{found.differing:,} of {count(found.elements, 'element')} ({found.dtype_a}) differ"]
    if found.max_abs is not None and found.max_rel is not None:
        parts.append(f"at most {found.max_abs:.3g} absolute, {found.max_rel:.3g} relative")
    if found.max_ulp is not None and found.mean_ulp is not None:
        mean = f", {found.mean_ulp:.3g} on average" if found.max_ulp <= _MOST_ULP else ""
        parts.append(f"at most {_ulps(found.max_ulp)}{mean}")
    if found.cosine is not None:
        parts.append(f"cosine {found.cosine:.9f}")
    if found.kl is not None:
        parts.append(f"KL {found.kl:.3g} nats")
    if found.non_finite:
        parts.append(
            f"not finite: {found.nan_a:,} NaN and {found.inf_a:,} Inf in a, {found.nan_b:,} NaN and {found.inf_b:,} Inf in b"
        )
    return "; ".join(parts)


def full_path(path: str) -> str:
    """A kernel path as reports say it, cut where it is long."""
    return short_path(path if len(path) <= 60 else f"{path[:30]}…{path[-30:]}")


def short_path(path: str | None) -> str:
    """A kernel path without the word that says of which sort it is; ``native`` where none was recorded."""
    return "native" if path is None else named(path.removeprefix("reference/").removeprefix("forced/"))


_LISTED = 4
_OF_REQUESTS: Final[Mapping[str, Any]] = {
    "max_tokens": None,
    "arrival": 0,
    "ignore_stop": False,
    "chat": False,
    "temperature": 0.0,
    "top_p": 1.0,
    "seed": 0,
    **{key.name: None for key in TABLE["Request sampling"]},
    "chat_template_args": None,
    "stop": None,
    "cancel": None,
    "rewind": 0,
    "anew": False,
    "use_adapter": True,
}
"""What a request may be asked for beside its prompt, and what it is where nothing is asked."""
_DECISIVE = tuple(
    key.name
    for section in ("Task", "Schedule", "Kernel plan", "Speculation", "Teacher forcing", "Cache")
    for key in TABLE[section]
)


def asked(scenario: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The scenario's requests by id; empty where it does not hold them."""
    found = [
        turn for request in _tables(scenario, "request") for turn in (request, *_tables(request, "turn"))
    ]
    return {request["id"]: request for request in found if isinstance(request.get("id"), str)}


def sampling(request: Mapping[str, Any]) -> str | None:
    """``sampled at temperature 0.8, top_p 1, seed 0``, or ``greedy with logit_bias ...``; None for a greedy request without
    processors, or where nothing says."""
    temperature = request.get("temperature")
    if not isinstance(temperature, int | float):
        return None
    drawn = temperature > 0
    names = (
        ("temperature", "top_p", "seed", *(key.name for key in TABLE["Request sampling"]))
        if drawn
        else PROCESSORS
    )
    known = [f"{name} {_plain(request[name])}" for name in names if name in request]
    return f"{'sampled at' if drawn else 'greedy with'} {', '.join(known)}" if known else None


def rules(scenario: Mapping[str, Any]) -> list[str]:
    """Each rule as ``site layers.*, phase decode, rows 2..8 -> pad:8``, in order, without conditions that always hold."""
    found = []
    for rule in _tables(scenario, "rule"):
        conditions = [
            f"{key} {named(str(value))}"
            for key, value in rule.items()
            if key == "site" or (key != "path" and value != getattr(PathRule, key, None))
        ]
        found.append(f"{', '.join(conditions)} -> {named(str(rule.get('path', 'unknown')))}")
    return found


def of_requests(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What both runs' requests were asked for, one setting a row: its name, and its values in a and in b in the order of the
    requests; one value where all have the same, and no row for what nobody asked for.
    """
    rows: list[tuple[str, str, str]] = []
    for key, plain in _OF_REQUESTS.items():
        values = [[request.get(key, plain) for request in asked(run).values()] for run in (a, b)]
        if any(value != plain for run in values for value in run):
            rows.append((f"{key} of requests", _values(values[0]), _values(values[1])))
    return rows


def _values(values: Sequence[Any]) -> str:
    texts = [str(value).lower() if isinstance(value, bool) else _plain(value) for value in values]
    if len(set(texts)) == 1:
        return texts[0]
    more = f", … ({len(texts):,} in all)" if len(texts) > 2 * _LISTED else ""
    return ", ".join(texts[: 2 * _LISTED]) + more if texts else "-"


def decisive(scenario: Mapping[str, Any]) -> Iterator[str]:
    """What decides a run, one setting each; a setting that does nothing is left out."""
    yield from _engine(scenario.get("engine"))
    if "adapter_path" in scenario:
        yield f"adapter_path {named(str(scenario['adapter_path']))}"
    for key in _DECISIVE:
        if key in scenario and not (key == "prefill_chunk" and scenario[key] == Schedule.prefill_chunk):
            yield f"{key} {named(str(scenario[key]))}"
    if found := _tables(scenario, "rule"):
        yield count(len(found), "rule")
    requests = asked(scenario)
    arrivals = [request.get("arrival", 0) for request in _tables(scenario, "request")]
    if any(arrivals):
        # As the flag is written.
        more = ",..." if len(arrivals) > 2 * _LISTED else ""
        yield f"arrivals {','.join(map(str, arrivals[: 2 * _LISTED]))}{more}"
    yield from _sampled(requests)


def _engine(given: Any) -> Iterator[str]:
    """An engine and its settings, as flags are written; nothing for the default."""
    table = dict(given) if isinstance(given, Mapping) else {} if given is None else {"name": given}
    if table:
        yield f"engine {named(str(table.pop('name', 'mlx')))}"
        yield from (f"engine.{key} {named(str(value))}" for key, value in list(table.items())[:_LISTED])


def _sampled(requests: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    how = {id: sampling(request) for id, request in requests.items()}
    if len(set(how.values())) == 1:
        yield from (words for words in list(how.values())[:1] if words is not None)
        return
    yield from (f"request {named(id)} {words or 'greedy'}" for id, words in list(how.items())[:_LISTED])
    if len(how) > _LISTED:
        yield f"and {len(how) - _LISTED} more requests"


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else named(str(value))


def _tables(scenario: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = scenario.get(key, [])
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else []
