#!/usr/bin/env python3
"""Write docs/model-matrix.md: every model class of mlx-lm, small and random, its runs compared and explained.

python tools/model_matrix.py                    all classes, for some 20 minutes of a processor; writes the page
python tools/model_matrix.py llama4 gemma3n     these alone; printed, not written
python tools/model_matrix.py --keep FILE        answers go into FILE, and those that it has are not asked for again
python tools/model_matrix.py --check            exit status 1 where the page lacks a class that mlx-lm has

The exit status is 1, too, where a verdict is `bug` on a class that docs/findings.md does not show to be wrong. One request after the other is compared with prompts in chunks of 1, 2, 3 and 7, with a prompt cache that holds its first six
tokens, with all requests in one batch and with requests that come and go, padded and packed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "model-matrix.md"
sys.path.insert(0, str(ROOT / "tests"))

BASE: Final = "serial"
PAIRS: Final[dict[str, dict[str, Any]]] = {
    "chunk 1": {"prefill_chunk": 1},
    "chunk 2": {"prefill_chunk": 2},
    "chunk 3": {"prefill_chunk": 3},
    "chunk 7": {"prefill_chunk": 7},
    "reuse 6": {"reuse_tokens": 6},
    "static": {"schedule": "static"},
    "continuous": {"schedule": "continuous", "active": 2, "arrivals": (0, 1, 3), "prefill_chunk": 4},
    "packed": {"schedule": "static", "layout": "packed"},
    "packed, continuous": {
        "schedule": "continuous",
        "layout": "packed",
        "active": 2,
        "arrivals": (0, 1, 3),
        "row_budget": 7,
    },
}
"""What the serial padded run is compared with, by name."""
WRONG: Final[dict[str, tuple[str, str]]] = {
    "afm7": (
        "afm7's reused layers count padding as positions",
        "afm7s-reused-layers-count-padding-as-positions",
    ),
    "baichuan_m1": (
        "padding runs through the convolution of baichuan_m1",
        "padding-runs-through-the-convolution-of-baichuan_m1",
    ),
    "gemma2": ("gemma2 lays the batch's mask over its heads", "gemma2-lays-the-batchs-mask-over-its-heads"),
    "minimax_m3_vl": (
        "minimax_m3_vl cuts its key blocks over padding",
        "minimax_m3_vl-cuts-its-key-blocks-over-padding",
    ),
    "plamo3": (
        "plamo3's windows are one longer in a prompt",
        "plamo3s-windows-are-one-longer-in-a-prompt-than-afterwards",
    ),
    **dict.fromkeys(
        ("bailing_moe_linear", "longcat_flash_ngram", "olmo_hybrid", "recurrent_gemma", "rwkv7"),
        ("padding runs through its state", "padding-runs-through-five-more"),
    ),
    **dict.fromkeys(
        ("mamba", "jamba", "nemotron_h"),
        ("padding runs through the state", "padding-runs-through-the-state-of-mamba-jamba-and-nemotron_h"),
    ),
}
"""Classes that mlx-lm has wrong in a batch, each with what docs/findings.md says of it and where."""
LENGTHS: Final = (13, 4, 9)
TOKENS: Final = 6


@dataclass(frozen=True)
class Answer:
    """What came of one pair: ``verdict`` is ``refused`` where the engine or mlx-lm cannot run it, with its words."""

    verdict: str
    rule: str = ""
    origin: str = ""
    why: str = ""


def answers(name: str, pairs: Sequence[str] = tuple(PAIRS), each: Sequence[str] = ()) -> dict[str, Answer]:
    """The pairs of one class by name; of pairs with the same first origin and schedule one is explained, and those in ``each``. Raises what building and running the class serially raises."""
    from every_model import build
    from runs import scenario

    from detdiff.compare import compare
    from detdiff.engines.mlx.engine import RecordOptions, record
    from detdiff.explain.case import Case
    from detdiff.explain.investigate import judge

    loaded = build(name)
    found: dict[str, Answer] = {}
    with tempfile.TemporaryDirectory() as folder:
        options = RecordOptions(observe=1)

        def run(pair: str, keys: Mapping[str, Any]) -> Any:
            asked = scenario(lengths=LENGTHS, max_tokens=TOKENS, **keys)
            return record(asked, Path(folder) / pair, loaded=loaded, options=options)

        base = run(BASE, {})
        told: dict[tuple[str, str | None, str | None], Answer] = {}
        for pair in pairs:
            try:
                other = run(pair, PAIRS[pair])
            except (
                Exception
            ) as error:  # What mlx-lm raises of a batch that a class cannot run has no common type.
                found[pair] = Answer("refused", why=_line(error))
                continue
            divergence = compare(base, other)
            first = next((r.origin for r in divergence.requests if r.id == divergence.first), None)
            origin = "" if first is None else f"{first.site} ({first.kind}, {first.how})"
            # What a batch does beside the same origin, such as padding that leaks, does not show alone.
            alike = origin, PAIRS[pair].get("schedule"), PAIRS[pair].get("layout")
            if not divergence.identical and pair not in each and alike in told:
                found[pair] = told[alike]
                continue
            verdict = judge(Case.of(base, other, loaded=loaded))
            found[pair] = told[alike] = Answer(verdict.kind, verdict.rule, origin, verdict.sentence)
    return found


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


Answers = Mapping[str, Answer]


def page(found: Mapping[str, Answers | str], versions: str) -> str:
    """The page; a class has its answers, or the reason why it was not run."""
    ran = {name: each for name, each in found.items() if not isinstance(each, str)}
    pairs = [answer for each in ran.values() for answer in each.values()]
    counts = {
        verdict: sum(a.verdict == verdict for a in pairs) for verdict in sorted({a.verdict for a in pairs})
    }
    lines = [
        "# Every model class of mlx-lm",
        "",
        "Written by `python tools/model_matrix.py`: each class, small and with random float32 weights, "
        f"{len(LENGTHS)} requests with prompts of {', '.join(map(str, LENGTHS))} tokens and windows shorter than these, run "
        "one request after the other and then in each other way that mlx-lm and the packed layout have. Each pair is compared, and where it "
        "differs explained; of pairs with the same first origin one is explained of those alone, and every one in a batch. A refusal has the words of mlx-lm or of detdiff. "
        f"With {versions}.",
        "",
        f"{len(ran)} of {len(found)} classes run; of {len(pairs)} pairs "
        + ", ".join(
            f"{n} {'were' if v == 'refused' else 'is' if n == 1 else 'are'} {v}" for v, n in counts.items()
        )
        + ". No verdict is `bug` on a class that is not shown to be wrong in [what we found](findings.md).",
        "",
        "| class | identical | otherwise |",
        "|---|---|---|",
    ]
    for name, each in sorted(found.items(), key=lambda item: item[0].lower()):
        if isinstance(each, str):
            lines.append(f"| `{name}` | | not run: {_cell(each)} |")
            continue
        same = [pair for pair, answer in each.items() if answer.verdict == "identical"]
        lines.append(f"| `{name}` | {_pairs(same)} | {'; '.join(_otherwise(name, each)) or '-'} |")
    return "\n".join(lines) + "\n"


def _pairs(names: Sequence[str]) -> str:
    return "all" if len(names) == len(PAIRS) else ", ".join(names) or "none"


def _otherwise(name: str, each: Answers) -> Iterator[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for pair, answer in each.items():
        if answer.verdict != "identical":
            groups.setdefault((answer.verdict, answer.origin or _reason(answer.why)), []).append(pair)
    for (verdict, what), pairs in groups.items():
        said = f"`{verdict}`" if verdict != "refused" else "refused"
        where = ""
        if name in WRONG and verdict in ("bug", "undetermined"):
            where = f", {WRONG[name][0]} ([shown](findings.md#{WRONG[name][1]}))"
        if verdict == "undetermined":
            where += f": {_cell(each[pairs[0]].why.partition('Missing: ')[2] or each[pairs[0]].why)}"
        yield f"{', '.join(pairs)}: {said}, {_cell(what)}{where}"


def listed(text: str) -> dict[str, dict[str, str] | str]:
    """What a page says: of each class the verdict of each pair, or the reason why it was not run."""
    found: dict[str, dict[str, str] | str] = {}
    for name, same, rest in re.findall(r"^\| `([^`]+)` \| ([^|]*?) ?\| (.*) \|$", text, re.MULTILINE):
        if rest.startswith("not run: "):
            found[name] = rest.removeprefix("not run: ")
            continue
        verdicts = dict.fromkeys(_named(same), "identical")
        for part in re.split(
            r"; (?=(?:chunk|reuse|static|continuous|packed)\b)", "" if rest == "-" else rest
        ):
            pairs, _, what = part.partition(": ")
            verdicts |= dict.fromkeys(_named(pairs), what.partition(",")[0].strip("`"))
        found[name] = verdicts
    return found


def _named(pairs: str) -> list[str]:
    if pairs == "all":
        return list(PAIRS)
    # One name has a comma itself.
    return re.findall("|".join(sorted(PAIRS, key=len, reverse=True)), pairs)


def _reason(why: str) -> str:
    """What a refusal says first, without what every one of them says."""
    text = re.sub(r"^\w+: ", "", why)
    text = re.sub(r"^The model '?tiny'? failed while .*? layout: ", "", text)
    return (
        re.split(r"\. (?:Expected|It does|Use)", text)[0][:160]
        .replace("<class 'mlx_lm.models.", "")
        .replace("'>", "")
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args(arguments)
    from every_model import NOT_BUILT, names

    every = names()
    if asked.check:
        missing = sorted({*every} ^ {*listed(TARGET.read_text(encoding="utf-8"))})
        print(
            f"not alike in the page and in mlx-lm: {', '.join(missing)}"
            if missing
            else "the page has every class"
        )
        return int(bool(missing))
    found = _asked(asked.names or every, NOT_BUILT, asked.keep)
    wrong = [
        f"{name}, {pair}: {answer.why}"
        for name, each in found.items()
        if not isinstance(each, str) and name not in WRONG
        for pair, answer in each.items()
        if answer.verdict == "bug"
    ]
    from detdiff.engines.base import version

    text = page(found, f"MLX {version('mlx')} and mlx-lm {version('mlx-lm')} on a CPU")
    if asked.names:
        print(text)
    else:
        TARGET.write_text(text, encoding="utf-8")
    print("\n".join(wrong) or "no class is called a bug that is not known to be one", file=sys.stderr)
    return int(bool(wrong))


def _asked(names: Sequence[str], refused: Mapping[str, str], keep: Path | None) -> dict[str, Answers | str]:
    known: dict[str, Any] = {}
    if keep is not None and keep.exists():
        known = dict(json.loads(line) for line in keep.read_text(encoding="utf-8").splitlines())
    found: dict[str, Answers | str] = {}
    for name in names:
        if name in refused:
            found[name] = refused[name]
            continue
        if name not in known:
            known[name] = {pair: asdict(answer) for pair, answer in answers(name).items()}
            print(
                name,
                {pair: each["verdict"] for pair, each in known[name].items()},
                file=sys.stderr,
                flush=True,
            )
            if keep is not None:
                with keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([name, known[name]]) + "\n")
        found[name] = {pair: Answer(**each) for pair, each in known[name].items()}
    return found


if __name__ == "__main__":
    sys.exit(main())
