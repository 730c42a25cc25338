"""What the README of a pack says: what parts, and the commands that show it again."""

from __future__ import annotations

from detdiff.commands.pack_places import WORDS, Places
from detdiff.report.document import Report
from detdiff.report.markdown import inline, sentence
from detdiff.report.words import escaped
from detdiff.trace import Trace

_WHAT = {
    "model": "model",
    "draft": "draft model",
    "kernels": "dispatch profile",
    "force_tokens": "trace that tokens were forced from",
}


def readme(report: Report, traces: tuple[Trace, Trace], places: Places) -> str:
    """The text, in Markdown."""
    return f"""# Where two runs part

> {sentence(report.headline, leading=True)}

One command, in this folder, runs both sides again and says why they part:

    {command(places)}

{_needed(traces, places)}

{_bits(traces, places)}| file | holds |
|---|---|
| `a.toml`, `b.toml` | the two scenarios; prompts are in them |
| `a/`, `b/` | the two traces: digests of every recorded row, tokens, forwards; no values and no weights |
{_packed(places)}| `environment.json` | what both were recorded on |
| `report.html`, `report.md`, `report.txt`, `report.json` | the report |
"""


def command(places: Places) -> str:
    """What runs both sides again, in the folder of what was unpacked."""
    return f"detdiff explain a.toml b.toml{_options(places)}"


def _options(places: Places) -> str:
    """The flags that say where what is missing is, as words of a command."""
    a, b = places.missing
    both = [key for key in WORDS if key in a and a.get(key) == b.get(key)]
    parts = {
        "--both": [f"{key}={WORDS[key]}" for key in both],
        "--a": [f"{key}={WORDS[key]}-A" for key in a if key not in both],
        "--b": [f"{key}={WORDS[key]}-B" for key in b if key not in both],
    }
    return "".join(
        f" {option} {flags[0] if len(flags) == 1 else repr(' '.join(flags))}"
        for option, flags in parts.items()
        if flags
    )


def _needed(traces: tuple[Trace, Trace], places: Places) -> str:
    lines = []
    if any(places.has(trace, "model") for trace in traces):
        lines.append(
            "The model is in `model/`: a configuration and a seed, from which detdiff makes its weights."
        )
    if all(trace.scenario.get("model") == "builtin" for trace in traces):
        lines.append("The model is the one that detdiff brings along.")
    if not any(places.missing):
        return " ".join([*lines, "Nothing else is needed."])
    a, b = places.missing
    if "model" in a or "model" in b:
        lines.append("The model's weights are not in here.")
    for key, what in _WHAT.items():
        if a.get(key) == b.get(key) and key in a:
            lines.append(f"The {what} was {_code(a[key])}.")
        else:
            lines += [
                f"The {what} of {side} was {_code(missing[key])}."
                for side, missing in (("a", a), ("b", b))
                if key in missing
            ]
    lines.append(
        "Put where that is now in the place of the words in capitals; `environment.json` has the hashes of weights, configuration "
        "and tokenizer."
    )
    return " ".join(lines)


def _code(path: str) -> str:
    shown = escaped(path, "\\")
    return inline(shown) if "`" in shown else f"`{shown}`"


def _bits(traces: tuple[Trace, Trace], places: Places) -> str:
    """How to compare bits; empty where a replay cannot be told where all that it needs is."""
    a, b = places.missing
    whole = all(trace.complete for trace in traces)
    if not whole or a != b or any(key != "model" for key in a):
        return ""
    moved = " --model DIR" if a else " --model model" if places.has(traces[0], "model") else ""
    return f"""To see whether your machine gives the very bits that were recorded here:

    detdiff compare a b --replay{moved}

"""


def _packed(places: Places) -> str:
    return "".join(f"| `{name}` | what the scenarios name by it |\n" for name in places.packed)
