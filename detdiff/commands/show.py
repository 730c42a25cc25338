"""What a trace holds, as a summary for programs and as text."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from detdiff.errors import NotATrace
from detdiff.report.words import asked, count, escaped, rules, sampling, shown
from detdiff.trace import Trace, parse_ranges

SCHEMA = "detdiff.trace-summary/1"
GROUPS = 12
SAMPLE = 160
NARROWEST = 12


def opened(path: Path, *, partial: bool = False) -> Trace:
    """The trace at ``path``, its bytes checked. Raises NotATrace and what ``Trace.open`` raises."""
    if not path.exists():
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
        "bytes": sum(file.stat().st_size for file in trace.path.iterdir() if file.is_file()),
    }
    if "draft" in header:
        made["draft"] = header["draft"]
    if sites:
        made["each_site"] = [{"name": s.name, "kind": s.kind, "layer": s.layer} for s in trace.sites]
    if every:
        made["each_forward"] = [dict(line) for line in trace.forwards()]
    return made


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
    wrapped: list[str] = []
    for line in _lines(found):
        wrapped += textwrap.wrap(
            line, max(40, width), subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        ) or [""]
    tables = [_sites(found)] if "each_site" in found else []
    return "\n".join([*wrapped, "", "\n\n".join([_forwards(found, width), *tables])]) + "\n"


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    state = "complete" if found["complete"] else "INCOMPLETE"
    held = "digests and values" if found["values"] else "digests"
    yield f"{escaped(found['trace'])}: {state}, {count(found['rows'], 'row')} of {count(found['forwards'], 'forward')}, {held}"
    for problem in found["problems"]:
        yield f"problem: {escaped(problem)}"
    for note in found["notes"]:
        yield f"note: {escaped(note)}"
    yield _model(found["model"])
    if found["engine"]["name"] != "mlx":
        yield f"engine: {escaped(found['engine']['name'])}, settings {_pairs(found['engine'].get('settings', {}))}"
    if "draft" in found:
        yield "draft " + _model(found["draft"])
    yield "scenario: " + _pairs(found["scenario"], skip=("request", "rule", "model", "engine"))
    for rule in rules(found["scenario"]):
        yield f"rule: {rule}"
    yield "environment: " + _pairs(found["environment"])
    yield _observer(found["observer"])
    yield f"on disk: {count(found['shards'], 'shard')}, {found['bytes']:,} bytes" + _seconds(found["times"])
    if "sites" not in found["lacks"]:
        yield "sites: " + ", ".join(f"{number} {kind}" for kind, number in found["sites"].items())
    for what, reason in found["lacks"].items():
        yield f"not recorded: {what.replace('_', ' ')} ({escaped(reason)})"
    yield ""
    settings = asked(found["scenario"])
    for request in found["requests"]:
        how = sampling(settings.get(request["id"], {}))
        yield (
            f"request {escaped(request['id'])}: {count(request['prompt_tokens'], 'prompt token')}, "
            f"{request['generated_tokens']} of at most {request.get('max_tokens', '?')} generated, arrival "
            f"{request.get('arrival', 0)}{f', {how}' if how else ''}"
        )
        if "proposed" in request:
            yield (
                f"  drafts: {request['accepted']} of {request['proposed']} accepted in "
                f"{count(request['verifications'], 'verification')}"
            )
        yield f"  prompt: {shown(_cut(request['prompt']))}"
        yield f"  generated: {shown(_cut(request['generated']))}"


def _forwards(found: Mapping[str, Any], width: int) -> str:
    groups = found["groups"]
    shown_groups = groups if "each_forward" in found else groups[:GROUPS]
    # An engine that shows answers alone has steps, of which nobody knows how many forwards they were.
    what = "steps" if "forwards" in found["lacks"] else "forwards"
    headers = [what, "rows", "who", "kernel path × sites"]
    if "kernel_paths" in found["lacks"]:
        headers[-1] = ""
    rows = [
        [
            str(group["first"]) if group["first"] == group["last"] else f"{group['first']}-{group['last']}",
            str(group["rows"]),
            " + ".join(f"{m['rows']} {m['phase']} of {escaped(m['request'])}" for m in group["members"]),
            ", ".join(f"{path} ×{sites}" for path, sites in group["paths"].items()),
        ]
        for group in shown_groups
    ]
    table: str = tabulate(_fitted(rows, headers, width), headers=headers, disable_numparse=True)
    left = len(groups) - len(shown_groups)
    if not left:
        return table
    return f"{table}\n... and {count(left, 'more group', 'more groups')} of {what}; --forwards shows all"


def _fitted(rows: list[list[str]], headers: list[str], width: int) -> list[list[str]]:
    """The rows with their last two columns wrapped, so that the table is at most ``width`` wide where it can be."""
    # tabulate keeps two characters free next to a header. The name of a path stays in one piece.
    path = max((len(word) for row in rows for word in row[-1].split()), default=0)
    narrowest = max(NARROWEST, len(headers[-2]) + 2), max(path, len(headers[-1]) + 2)
    widths = [max(len(header) + 2, *map(len, cells)) for header, *cells in zip(headers, *rows, strict=True)]
    gaps = 2 * (len(headers) - 1)
    room = width - gaps - sum(widths[:-2])
    last = max(narrowest[1], min(widths[-1], max(room // 2, room - widths[-2])))
    who = max(narrowest[0], room - last)
    return [
        [*cells, *(textwrap.fill(*pair, break_on_hyphens=False) for pair in ((members, who), (paths, last)))]
        for *cells, members, paths in rows
    ]


def _sites(found: Mapping[str, Any]) -> str:
    rows = [
        [escaped(site["name"]), escaped(site["kind"]), "-" if site["layer"] is None else str(site["layer"])]
        for site in found["each_site"]
    ]
    table: str = tabulate(
        rows, headers=["site", "kind", "layer"], disable_numparse=True, colalign=("left", "left", "right")
    )
    return table


def _model(model: Mapping[str, Any]) -> str:
    parts = [escaped(str(model.get("name", "unnamed")))]
    parts += [
        f"{key} {escaped(str(model[key]))[:16]}"
        for key in ("model_type", "weights_sha256", "config_sha256", "tokenizer_sha256")
        if model.get(key) is not None
    ]
    return "model: " + ", ".join(parts)


def _observer(observer: Mapping[str, Any]) -> str:
    checked = observer.get("forwards", 0)
    if not checked:
        return "observer check: not made"
    equal = "bit-equal" if observer.get("equal") else "NOT EQUAL"
    return (
        f"observer check: the first {count(checked, 'forward')} run again without recording, logits {equal}"
    )


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
