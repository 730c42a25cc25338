"""From how many requests at once one batch pays, as text, as JSON and as a page."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from detdiff.bench.figures import spread_json, throughput
from detdiff.bench.measure import PolicyResult
from detdiff.bench.runs import Spread
from detdiff.bench.split import SplitLevel, SplitSearch, other_answers
from detdiff.probe.measures import joined_ratio

from .bench import interrupted, machine_item, measured_page
from .bench_pictures import split_svg
from .document import Block, Item, Prose, Table
from .text import plain
from .words import count, escaped

SCHEMA = "detdiff.split/1"


def split_text(found: SplitSearch, *, width: int = 100) -> str:
    """The search in lines of at most ``width`` characters."""
    return plain(split_blocks(found), width=width)


def split_html(found: SplitSearch) -> str:
    """The search as a page."""
    title = "Tokens/s of one batch, of its rows split, and of one request after the other"
    return measured_page(headline(found), split_blocks(found)[1:], [("split", title, split_svg(found))])


def split_json(found: SplitSearch) -> dict[str, Any]:
    """The search as JSON values: ``pays_from`` and ``split_rows`` are None where there is no such number."""
    return {
        "schema": SCHEMA,
        "finished": found.finished,
        "workload": found.workload,
        "environment": found.environment,
        "rounds": min((len(level.whole.runs) for level in found.levels), default=0),
        "pays_from": found.pays_from,
        "split_rows": found.split_rows,
        "levels": [
            {
                "at_once": level.at_once,
                "calls_to_row_by_row": _calls(found, level),
                "gain": spread_json(level.gain),
                **{
                    name: {
                        "throughput": spread_json(throughput(result)),
                        "other_answers": other_answers(result, level.serial),
                    }
                    for name, result in (
                        ("serial", level.serial),
                        ("whole", level.whole),
                        ("split", level.split),
                    )
                    if result is not None
                },
            }
            for level in found.levels
        ],
        "costs": [asdict(each) for each in found.costs],
    }


def headline(found: SplitSearch) -> str:
    """The threshold in one sentence."""
    if not any(level.whole.runs for level in found.levels):
        return "Nothing was measured."
    chip, pays, rows = found.environment["chip"], found.pays_from, found.split_rows
    split = found.levels[-1].split is not None
    if pays is None:
        words = f"On {chip} one batch of up to {found.levels[-1].at_once} requests never pays"
        return (
            f"{words}: split_rows={rows} is faster." if split else f"{words}: one after the other is faster."
        )
    if rows is None:
        return f"On {chip} one batch pays from {pays} requests at once: nothing is to be split."
    mend = f"split_rows={rows} is faster below it" if split else "below it one after the other is faster"
    return f"On {chip} one batch starts to pay at {pays} requests at once: {mend}."


def split_blocks(found: SplitSearch) -> list[Block]:
    """What is said of a search: each figure beside what was answered."""
    blocks: list[Block] = [Prose(escaped(headline(found), ""))]
    blocks += [Item("workload: ", escaped(found.workload)), machine_item(found.rounds, found.environment)]
    headers = ("at once", "calls", "one by one", "one batch", "answers", "rows split", "answers", "gain")
    rows = tuple(_row(found, level) for level in found.levels if level.whole.runs)
    caption = (
        "tokens/s of so many requests one after the other, in one batch, and in a batch whose rows are split"
    )
    blocks.append(Table(headers, rows, caption=caption))
    against = "one batch with its rows split" if found.levels[-1].split else "one batch with one by one"
    blocks.append(Item("gain: ", f"{against} compared in the same round: above 1 the batch is the faster"))
    if found.costs:
        whole = len(found.costs) == 1 and found.costs[0].count == 1
        what = (
            "whole forwards"
            if whole
            else f"the linear calls of a forward ({count(len(found.costs), 'shape')})"
        )
        blocks.append(
            Item("calls: ", f"{what} of so many rows, to as many of one row each: below 1 they cost less")
        )
    if found.levels[-1].split is None:
        blocks.append(
            Item(
                "note: ", "this engine has no way to split rows, so one request after the other stands for it"
            )
        )
    if found.environment.get("reference"):
        blocks.append(
            Item(
                "note: ",
                "reference kernels ran on this processor: their times say nothing of the kernels that they stand for",
            )
        )
    if not found.finished:
        runs = [result.runs for level in found.levels for result in level.results]
        blocks.append(interrupted(runs, found.rounds))
    return blocks


def _row(found: SplitSearch, level: SplitLevel) -> tuple[str, ...]:
    ratio = _calls(found, level)
    split = ("-", "-") if level.split is None else (_speed(level.split), _answers(level.split, level))
    return (
        f"{level.at_once}",
        "-" if ratio is None else f"{ratio:.2f}",
        _speed(level.serial),
        _speed(level.whole),
        _answers(level.whole, level),
        *split,
        _spread(level.gain, ".2f"),
    )


def _calls(found: SplitSearch, level: SplitLevel) -> float | None:
    return joined_ratio(found.costs, level.at_once) if found.costs else None


def _speed(result: PolicyResult) -> str:
    return _spread(throughput(result), ".1f")


def _spread(found: Spread | None, form: str) -> str:
    return "-" if found is None else f"{found.median:{form}} ({found.low:{form}}–{found.high:{form}})"


def _answers(result: PolicyResult, level: SplitLevel) -> str:
    other = other_answers(result, level.serial)
    return "-" if other is None else "same text" if not other else f"flips {other} of {level.at_once}"
