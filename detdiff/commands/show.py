"""What a trace holds, as a summary for programs and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from detdiff.errors import NotATrace
from detdiff.report.document import Blank, Block, Item, Prose, Table
from detdiff.report.text import plain
from detdiff.report.words import asked, count, escaped, rules, sampling, shown
from detdiff.trace import Place, Trace, parse_ranges
from detdiff.trace.files import reading
from detdiff.trace.store import names_in

SCHEMA = "detdiff.trace-summary/1"
GROUPS = 12
SAMPLE = 160


def opened(path: Place, *, partial: bool = False) -> Trace:
    """The trace at ``path``, its bytes checked. Raises NotATrace and what ``Trace.open`` raises."""
    if isinstance(path, Path) and not path.exists():
        raise NotATrace(
            f"{path} is not there; expected a trace, which is a directory that `detdiff record` wrote. Check the "
            "spelling."
        )
    return Trace.open(path, partial=partial, checked=True)


def summary(trace: Trace, *, every: bool = False, sites: bool = False) -> dict[str, Any]:
    """The summary as JSON values; ``docs/cli.md`` lists the keys.

    ``every`` adds each forward's line, ``sites`` each site's name, kind and layer in execution order.
    Raises TraceError where a line of a log breaks a rule.
    """
    header = trace.header
    made: dict[str, Any] = {
        "schema": SCHEMA,
        "trace": str(trace.path),
        "complete": trace.complete,
        "problems": list(trace.problems),
        "model": trace.model,
        "engine": trace.header.get("engine", {"name": "mlx", "settings": {}}),
        "lacks": trace.lacks,
        "scenario": trace.scenario,
        "environment": header["environment"],
        "observer": header["observer"],
        "notes": header["notes"],
        "times": header["times"],
        "requests": list(_requests(trace)),
        "rows": len(trace.row_index().request),
        "forwards": len(trace.forwards()),
        "groups": list(_groups(trace)),
        "sites": dict(Counter(site.kind for site in trace.sites)),
        "values": any(shard.value_columns() for shard in trace.shards),
        "shards": len(trace.shards),
        "bytes": _bytes(trace),
    }
    if "draft" in header:
        made["draft"] = header["draft"]
    if sites:
        made["each_site"] = [{"name": s.name, "kind": s.kind, "layer": s.layer} for s in trace.sites]
    if every:
        made["each_forward"] = [dict(line) for line in trace.forwards()]
    return made


def _bytes(trace: Trace) -> int:
    with reading(trace.path):
        return sum(names_in(trace.path).values())


def _requests(trace: Trace) -> Iterator[dict[str, Any]]:
    texts = trace.texts()
    generated = trace.generated(lens=False)
    scenario = asked(trace.scenario)
    drafts = _drafts(trace)
    for number, request in enumerate(trace.requests):
        mine = np.flatnonzero(generated.request == number)
        tokens = generated.token[mine[np.argsort(generated.index[mine])]].tolist()
        prompt = scenario.get(request["id"], {}).get("prompt")
        yield {
            **{key: value for key, value in request.items() if key != "tokens"},
            "prompt_tokens": len(request["tokens"]),
            "prompt": prompt if isinstance(prompt, str) else _joined(request["tokens"], texts),
            "generated_tokens": len(tokens),
            "generated": _joined(tokens, texts),
            **drafts.get(number, {}),
        }


def _drafts(trace: Trace) -> dict[int, dict[str, int]]:
    """Proposed and accepted tokens by request, summed over the verifications."""
    found: dict[int, dict[str, int]] = {}
    for event in trace.events():
        if event["event"] == "verify":
            sums = found.setdefault(event["request"], {"verifications": 0, "proposed": 0, "accepted": 0})
            sums["verifications"] += 1
            sums["proposed"] += len(event["proposals"])
            sums["accepted"] += event["accepted"]
    return found


def _joined(tokens: list[int], texts: Mapping[int, str]) -> str:
    return "".join(texts.get(token, f"<{token}>") for token in tokens)


def _groups(trace: Trace) -> Iterator[dict[str, Any]]:
    """Runs of consecutive forwards that hold the same requests with as many rows, on the same kernel paths."""
    last: dict[str, Any] | None = None
    for number, line in enumerate(trace.forwards()):
        found = {
            "phase": line["phase"],
            "rows": sum(row["count"] for row in line["rows"]),
            "members": [
                {"request": trace.requests[row["request"]]["id"], "phase": row["phase"], "rows": row["count"]}
                for row in line["rows"]
            ],
            "paths": {} if "kernel_paths" in trace.lacks else _paths(line["calls"], len(trace.sites)),
        }
        if last is not None and all(last[key] == value for key, value in found.items()):
            last["last"] = number
            continue
        if last is not None:
            yield last
        last = {"first": number, "last": number, **found}
    if last is not None:
        yield last


def _paths(calls: list[Mapping[str, Any]], sites: int) -> dict[str, int]:
    paths: Counter[str] = Counter()
    for call in calls:
        paths[call["path"]] += sum(len(run) for run in parse_ranges(call["sites"], sites))
    return dict(sorted(paths.items()))


def summary_text(found: Mapping[str, Any], *, width: int = 100) -> str:
    """A summary as text; with each forward's line, all groups of forwards are shown."""
    return plain(_blocks(found), width=width)


def _blocks(found: Mapping[str, Any]) -> Iterator[Block]:
    state = "complete" if found["complete"] else "INCOMPLETE"
    held = "digests and values" if found["values"] else "digests"
    rows = f"{count(found['rows'], 'row')} of {count(found['forwards'], 'forward')}"
    yield Item(f"{escaped(found['trace'])}: ", f"{state}, {rows}, {held}")
    for what in ("problem", "note"):
        for text in found[f"{what}s"]:
            yield Item(f"{what}: ", escaped(text))
    yield Item("model: ", _model(found["model"]))
    if found["engine"]["name"] != "mlx":
        given = _pairs(found["engine"].get("settings", {}))
        yield Item("engine: ", f"{escaped(found['engine']['name'])}, settings {given}")
    if "draft" in found:
        yield Item("draft model: ", _model(found["draft"]))
    yield Item("scenario: ", _pairs(found["scenario"], skip=("request", "rule", "model", "engine")))
    for rule in rules(found["scenario"]):
        yield Item("rule: ", rule)
    yield Item("environment: ", _pairs(found["environment"]))
    yield Item("observer check: ", _observer(found["observer"]))
    shards = count(found["shards"], "shard")
    yield Item("on disk: ", f"{shards}, {found['bytes']:,} bytes{_seconds(found['times'])}")
    if "sites" not in found["lacks"]:
        yield Item("sites: ", ", ".join(f"{number} {kind}" for kind, number in found["sites"].items()))
    for what, reason in found["lacks"].items():
        yield Item("not recorded: ", f"{what.replace('_', ' ')} ({escaped(reason)})")
    yield Blank()
    settings = asked(found["scenario"])
    for request in found["requests"]:
        how = sampling(settings.get(request["id"], {}))
        yield Item(
            f"request {escaped(request['id'])}: ",
            f"{count(request['prompt_tokens'], 'prompt token')}, {request['generated_tokens']} of at most "
            f"{request.get('max_tokens', '?')} generated, arrival {request.get('arrival', 0)}{f', {how}' if how else ''}",
        )
        if "proposed" in request:
            of = f"{request['accepted']} of {request['proposed']} accepted"
            yield Item("  drafts: ", f"{of} in {count(request['verifications'], 'verification')}")
        yield Item("  prompt: ", shown(_cut(request["prompt"])))
        yield Item("  generated: ", shown(_cut(request["generated"])))
    yield Blank()
    yield from _forwards(found)
    if "each_site" in found:
        yield Blank()
        yield Table(("site", "kind", "layer"), tuple(_site(site) for site in found["each_site"]))


def _forwards(found: Mapping[str, Any]) -> Iterator[Block]:
    groups = found["groups"]
    shown_groups = groups if "each_forward" in found else groups[:GROUPS]
    # An engine that shows answers alone has steps, of which nobody knows how many forwards they were.
    what = "steps" if "forwards" in found["lacks"] else "forwards"
    rows = [
        (
            str(group["first"]) if group["first"] == group["last"] else f"{group['first']}-{group['last']}",
            str(group["rows"]),
            " + ".join(f"{m['rows']} {m['phase']} of {escaped(m['request'])}" for m in group["members"]),
            ", ".join(f"{path} ×{sites}" for path, sites in group["paths"].items()),
        )
        for group in shown_groups
    ]
    paths = "" if "kernel_paths" in found["lacks"] else "kernel path × sites"
    yield Table((what, "rows", "who", paths), tuple(rows))
    if left := len(groups) - len(shown_groups):
        yield Prose(f"... and {count(left, 'more group', 'more groups')} of {what}; --forwards shows all")


def _site(site: Mapping[str, Any]) -> tuple[str, str, str]:
    return escaped(site["name"]), escaped(site["kind"]), "-" if site["layer"] is None else str(site["layer"])


def _model(model: Mapping[str, Any]) -> str:
    parts = [escaped(str(model.get("name", "unnamed")))]
    parts += [
        f"{key} {escaped(str(model[key]))[:16]}"
        for key in ("model_type", "weights_sha256", "config_sha256", "tokenizer_sha256")
        if model.get(key) is not None
    ]
    return ", ".join(parts)


def _observer(observer: Mapping[str, Any]) -> str:
    checked = observer.get("forwards", 0)
    if not checked:
        return "not made"
    equal = "bit-equal" if observer.get("equal") else "NOT EQUAL"
    return f"the first {count(checked, 'forward')} run again without recording, logits {equal}"


def _seconds(times: Mapping[str, Any]) -> str:
    seconds = times.get("seconds")
    return f", recorded in {seconds:.1f} s" if isinstance(seconds, int | float) else ""


def _pairs(values: Mapping[str, Any], skip: tuple[str, ...] = ()) -> str:
    shown_values = [
        key if value is True else f"{key} {escaped(_plain(value))}"
        for key, value in values.items()
        if key not in skip and value not in ("", [], {}, None, False)
    ]
    return ", ".join(shown_values) or "none"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={item}" for key, item in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= SAMPLE else f"{text[: SAMPLE - 3]}..."
