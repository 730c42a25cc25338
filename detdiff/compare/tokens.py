"""Which requests of two traces can be compared, and how far: the tokens of each, up to the first that differs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import NothingComparable
from detdiff.scenario import EMBED, GENERATE, SCORE
from detdiff.scenario.sampling import same_choice
from detdiff.trace import PHASES, Generated, Trace
from detdiff.trace.contents import grouped

from .divergence import Finding, NotCompared
from .flips import EmbeddingDifference, NotFiniteLogits, ScoreDifference, ScoredText, TextFlip
from .metrics import Values, measure

NO_LIMIT: Final = 1 << 31
"""The limit of a request that does not flip: above every position."""

_CONTEXT: Final = 40  # characters of a text, from the first that differs on

_SAME_WORK: Final = ("max_tokens", "sampling", "ignore_stop", "stop", "cancel")


@dataclass(frozen=True, eq=False)
class Steps:
    """The generated tokens of one request in order: int32 [n] each, ``top_ids`` [n, k], ``top_logits`` [n, k]."""

    token: NDArray[np.int32]
    forward: NDArray[np.int32]
    position: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logits: NDArray[np.float32]

    @classmethod
    def of(cls, generated: Generated, request: int, mine: NDArray[np.intp] | None = None) -> Steps:
        """The last write of each index; indices after a gap are left out, as nothing says what came before. ``mine`` are the places
        of the request's tokens, where they are known."""
        if mine is None:
            mine = np.flatnonzero(generated.request == request)
        index, rows = generated.index[mine], mine
        if not np.array_equal(index, np.arange(len(index))):
            found, last = np.unique(index[::-1], return_index=True)
            whole = int(np.argmin(np.append(found == np.arange(len(found)), False)))
            rows = mine[len(mine) - 1 - last[:whole]]
        return cls(
            generated.token[rows],
            generated.forward[rows],
            generated.position[rows],
            generated.top_ids[rows],
            generated.top_logits[rows],
        )

    def __len__(self) -> int:
        return len(self.token)

    def margins(self) -> NDArray[np.float64]:
        """Top-1 minus top-2 logit per step, float64 [n]; NaN where fewer than two were recorded."""
        if self.top_logits.shape[1] < 2:
            return np.full(len(self), np.nan)
        top = self.top_logits[:, :2].astype(np.float64)
        return np.asarray(top[:, 0] - top[:, 1], dtype=np.float64)

    def moved(self, other: Steps) -> NDArray[np.float64]:
        """By how much the logits of this run's two highest tokens moved against each other in the other run.

        float64 [common steps]; NaN where the other run did not record both tokens.
        """
        common = min(len(self), len(other))
        if self.top_ids.shape[1] < 2 or not other.top_ids.shape[1]:
            return np.full(common, np.nan)
        same = other.top_ids[:common, None, :] == self.top_ids[:common, :2, None]
        known = same.any(axis=2).all(axis=1)
        theirs = np.take_along_axis(other.top_logits[:common], same.argmax(axis=2), axis=1).astype(np.float64)
        own = self.top_logits[:common, :2].astype(np.float64)
        with np.errstate(invalid="ignore"):
            moved = (theirs[:, 0] - theirs[:, 1]) - own[:, 0] + own[:, 1]
        return np.where(known, moved, np.nan)


@dataclass(frozen=True, eq=False)
class RequestPair:
    """One request of both traces: its number in each, prompt length, and what each run generated.

    ``flip`` is the first differing index or None, ``kind`` its kind, ``at`` the position of the row that chose it
    (NO_LIMIT without a flip) and ``limit`` the last position whose rows are compared: ``at``, since rows after it saw
    other tokens, unless a run was ``forced`` to tokens. ``cut`` says why the end was not compared, or None. ``scoring`` says that
    the tokens were given, and ``scored_in`` in which dtype the logits were that their log-probabilities were made of; ``vectors`` are the request's embeddings, float32 [width] each.
    """

    id: str
    a: int
    b: int
    prompt: int
    steps_a: Steps
    steps_b: Steps
    flip: int | None
    kind: str
    at: int
    limit: int
    forced: bool
    cut: str | None
    text: TextFlip | None = None
    scoring: bool = False
    scored_in: str | None = None
    vectors: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None

    @property
    def common(self) -> int:
        """How many generated tokens were compared."""
        return min(len(self.steps_a), len(self.steps_b))

    def scores(self) -> ScoreDifference | None:
        """The top logits, or log-probabilities, of tokens that both runs recorded, up to the flip; None without any."""
        steps = self.common if self.flip is None else min(self.common, self.flip + 1)
        a, b = self.steps_a, self.steps_b
        step, i, j = np.nonzero(a.top_ids[:steps, :, None] == b.top_ids[:steps, None, :])
        if not len(step):
            return None
        x, y = a.top_logits[step, i], b.top_logits[step, j]
        differs = np.flatnonzero(x.view(np.uint32) != y.view(np.uint32))
        dtype = self.scored_in or _dtype(x, y)
        if not len(differs):
            return ScoreDifference(len(step), 0, None, None, None, None, 0.0, 0, dtype)
        found = measure(_in_dtype(x, dtype), _in_dtype(y, dtype))
        # Log-probabilities are finer than the logits that they were made of.
        whole = measure(Values(x, "F32"), Values(y, "F32")) if self.scored_in else found
        first = int(differs[0])
        return ScoreDifference(
            compared=len(step),
            differing=len(differs),
            index=int(step[first]),
            token=int(a.top_ids[step[first], i[first]]),
            a=float(x[first]),
            b=float(y[first]),
            max_abs=whole.max_abs,
            max_ulp=found.max_ulp,
            dtype=dtype,
        )

    def scored(self) -> ScoredText | None:
        """The log-probabilities of the given tokens; None where none were given."""
        if not self.scoring or not self.common:
            return None
        given, likeliest = [], []
        for steps in (self.steps_a, self.steps_b):
            mine = steps.top_ids[: self.common] == steps.token[: self.common, None]
            given.append(steps.top_logits[: self.common][mine].astype(np.float64))
            likeliest.append(int((given[-1] >= steps.top_logits[: self.common, 0]).sum()))
        moved = np.abs(given[0] - given[1])
        at = int(np.nanargmax(moved)) if np.isfinite(moved).any() else 0
        return ScoredText(
            tokens=self.common,
            a=float(given[0].sum()),
            b=float(given[1].sum()),
            likeliest_a=likeliest[0],
            likeliest_b=likeliest[1],
            max_abs=float(moved[at]),
            index=at if moved[at] > 0 else None,
        )

    def embedding(self) -> EmbeddingDifference | None:
        """How far the request's vectors are apart; None without them."""
        if self.vectors is None:
            return None
        a, b = self.vectors
        found = measure(Values(a, "F32"), Values(b, "F32"))
        not_finite = [int((~np.isfinite(each)).sum()) for each in (a, b)]
        whole = not any(not_finite)
        return EmbeddingDifference(
            width=len(a),
            differing=int((a.view(np.uint32) != b.view(np.uint32)).sum()),
            max_abs=found.max_abs if whole else None,
            cosine=min(1.0, found.cosine) if whole and found.cosine is not None else None,
            not_finite_a=not_finite[0],
            not_finite_b=not_finite[1],
        )

    def scores_at_flip(self) -> bool | None:
        """Whether all logits that chose the flip's token are bit-equal; None where not both tokens' were recorded in both."""
        if self.flip is None or self.flip >= self.common:
            return None
        sides = [
            dict(
                zip(
                    s.top_ids[self.flip].tolist(),
                    s.top_logits[self.flip].view(np.uint32).tolist(),
                    strict=True,
                )
            )
            for s in (self.steps_a, self.steps_b)
        ]
        chosen = {int(self.steps_a.token[self.flip]), int(self.steps_b.token[self.flip])}
        return sides[0] == sides[1] if all(chosen <= side.keys() for side in sides) else None

    def not_finite(self) -> tuple[NotFiniteLogits, ...]:
        """In each run the first token up to the flip whose recorded logits have a NaN or are infinite."""
        found = []
        for run, steps in (("a", self.steps_a), ("b", self.steps_b)):
            top = steps.top_logits if self.flip is None else steps.top_logits[: self.flip + 1]
            # A forbidden token's logit may be minus infinity.
            wrong = np.isnan(top) | (top == np.inf)
            if wrong.any():
                n = int(np.flatnonzero(wrong.any(axis=1))[0])
                found.append(
                    NotFiniteLogits(run, n, int(np.isnan(top[n]).sum()), int((top[n] == np.inf).sum()))
                )
        return tuple(found)


def _dtype(*values: NDArray[np.float32]) -> str:
    """The narrowest dtype that holds all of these numbers exactly: that in which they were computed."""
    if not any((value.view(np.uint32) & 0xFFFF).any() for value in values):
        return "BF16"
    with np.errstate(over="ignore"):
        half = all(
            np.array_equal(value.astype(np.float16).astype(np.float32), value, equal_nan=True)
            for value in values
        )
    return "F16" if half else "F32"


def _in_dtype(values: NDArray[np.float32], dtype: str) -> Values:
    """Rounded to the nearest, ties to even; a NaN stays one."""
    if dtype == "BF16":
        bits = values.view(np.uint32).astype(np.uint64)
        rounded = np.where(np.isnan(values), bits, bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return Values(rounded.astype(np.uint16), dtype)
    with np.errstate(over="ignore"):
        return Values(values.astype(np.float16) if dtype == "F16" else values, dtype)


@dataclass(frozen=True)
class Pairing:
    """The requests that can be compared, those that cannot, and differences in what was asked of them."""

    pairs: tuple[RequestPair, ...]
    not_compared: tuple[NotCompared, ...]
    workload: tuple[Finding, ...]


def pair_requests(
    a: Trace, b: Trace, only: Collection[str] | None = None, *, across_models: bool = False
) -> Pairing:
    """Match requests by id and prompt; ``only`` are the ids that are asked about, None: all.

    Raises NothingComparable for two models unless ``across_models``, or without a common request.
    """
    if not across_models:
        _same_model(a, b)
    of_b, of_a = (
        {r["id"]: number for number, r in enumerate(trace.requests) if only is None or r["id"] in only}
        for trace in (b, a)
    )
    tasks = [trace.scenario.get("task", GENERATE) for trace in (a, b)]
    if tasks[0] != tasks[1]:
        raise NothingComparable(
            f"Run a ({a.path}) has the task {tasks[0]} and run b ({b.path}) the task {tasks[1]}; expected one task in both. Record both "
            "runs with the same task."
        )
    generated_a, generated_b = a.generated(lens=False), b.generated(lens=False)
    mine_a, mine_b = _places(generated_a), _places(generated_b)
    vectors = [_vectors(trace) for trace in (a, b)]
    textual = all("tokens" in trace.lacks for trace in (a, b))
    computed = {trace.header.get("scored_in") for trace in (a, b)} & {"BF16", "F16", "F32"}
    scored_in = computed.pop() if len(computed) == 1 and tasks[0] == SCORE else None
    forced = was_forced(a) or was_forced(b)
    pairs: list[RequestPair] = []
    left_out: list[NotCompared] = []
    workload: list[Finding] = []
    for id, number in of_a.items():
        if id not in of_b:
            left_out.append(NotCompared(id, "only run a has it"))
            continue
        asked_a, asked_b = a.requests[number], b.requests[of_b[id]]
        if asked_a["tokens"] != asked_b["tokens"]:
            before = _turn_before(asked_a, asked_b, pairs, left_out)
            if before is not None:
                left_out.append(NotCompared(id, before))
                continue
            left_out.append(NotCompared(id, _prompt_reason(asked_a["tokens"], asked_b["tokens"])))
            continue
        workload += _asked_otherwise(id, asked_a, asked_b, forced)
        steps_a = Steps.of(generated_a, number, mine_a.get(number, _NOWHERE))
        steps_b = Steps.of(generated_b, of_b[id], mine_b.get(of_b[id], _NOWHERE))
        ends = _TextEnds(_limit(asked_a), _limit(asked_b), a.complete, b.complete)
        flip, kind, cut = _first_flip(steps_a, steps_b, ends)
        at = NO_LIMIT if flip is None else _position(steps_a, steps_b, flip)
        limit = _last_fed_alike(a, b, (number, of_b[id]), at) if forced else at
        prompt = len(asked_a["tokens"])
        text = _text_flip(steps_a, steps_b, flip) if textual else None
        pair = RequestPair(
            id, number, of_b[id], prompt, steps_a, steps_b, flip, kind, at, limit, forced, cut, text
        )
        both = vectors[0].get(number), vectors[1].get(of_b[id])
        if both[0] is not None and both[1] is not None and both[0].shape == both[1].shape:
            pair = replace(pair, vectors=(both[0], both[1]))
        elif tasks[0] == EMBED:
            pair = replace(pair, cut="not both runs have a vector of it, or of the same width")
        pairs.append(replace(pair, scoring=tasks[0] == SCORE, scored_in=scored_in))
    left_out += [NotCompared(id, "only run b has it") for id in of_b if id not in of_a]
    if not pairs:
        raise NothingComparable(_no_request(a, b, left_out))
    return Pairing(tuple(pairs), tuple(left_out), tuple(workload))


_NOWHERE: Final = np.empty(0, dtype=np.intp)


def _places(generated: Generated) -> dict[int, NDArray[np.intp]]:
    """Where the tokens of each request are, ascending: a look at all tokens for each request takes the square of time."""
    order = grouped(generated.request)
    ordered = generated.request[order]
    parts = np.split(order, np.flatnonzero(np.diff(ordered)) + 1) if len(order) else []
    return {int(generated.request[part[0]]): part for part in parts}


def _limit(asked: dict[str, Any]) -> int | None:
    """How many tokens a request was to have at most; None where nothing says."""
    return min((n for n in (asked.get("max_tokens"), asked.get("cancel")) if n is not None), default=None)


def _vectors(trace: Trace) -> dict[int, NDArray[np.float32]]:
    found = trace.embeddings()
    return dict(zip(found.request.tolist(), found.vector, strict=True))


def _text_flip(a: Steps, b: Steps, flip: int | None) -> TextFlip | None:
    """The flip of two texts; tokens are code points."""
    if flip is None:
        return None
    return TextFlip(flip, *("".join(map(chr, s.token[flip : flip + _CONTEXT].tolist())) for s in (a, b)))


def was_forced(trace: Trace) -> bool:
    """Whether the run was fed the tokens of another one."""
    return trace.scenario.get("force_tokens") is not None


def _last_fed_alike(a: Trace, b: Trace, requests: tuple[int, int], flip: int) -> int:
    """The last position before a row that the runs fed different tokens; NO_LIMIT where there is none.

    ``flip`` is the position of the first row that chose another token: before it, other tokens are a finding.
    """
    fed: list[dict[int, int]] = []
    for trace, request in zip((a, b), requests, strict=True):
        rows = trace.row_index()
        mine = (rows.request == request) & (rows.phase != PHASES.index("draft")) & (rows.position > flip)
        fed.append(dict(zip(rows.position[mine].tolist(), rows.token[mine].tolist(), strict=True)))
    apart = [position for position in fed[0].keys() & fed[1].keys() if fed[0][position] != fed[1][position]]
    return min(apart) - 1 if apart else NO_LIMIT


def same_weights(a: Trace, b: Trace) -> bool:
    """Whether both traces say of which model they are, and it is the same."""
    keys = "config_sha256", "weights_sha256"
    told = [[trace.header["model"].get(key) for key in keys] for trace in (a, b)]
    return told[0] == told[1] and None not in told[0]


def _same_model(a: Trace, b: Trace) -> None:
    for key, what in (("config_sha256", "configuration"), ("weights_sha256", "weights")):
        found = a.header["model"].get(key), b.header["model"].get(key)
        if None not in found and found[0] != found[1]:
            names = a.header["model"].get("name"), b.header["model"].get("name")
            raise NothingComparable(
                f"The traces are of different models: run a ({a.path}) ran {names[0]!r} and run b ({b.path}) ran "
                f"{names[1]!r}, and their {what} hashes differ ({str(found[0])[:12]} and {str(found[1])[:12]}). "
                "Expected one model in both. Record both runs with the same model."
            )


def _no_request(a: Trace, b: Trace, left_out: list[NotCompared]) -> str:
    for trace, run in ((a, "a"), (b, "b")):
        if not trace.requests:
            return f"Run {run} ({trace.path}) has no requests; expected at least one. Record it again."
    reasons = "; ".join(f"{item.id!r}: {item.reason}" for item in left_out[:4])
    more = f"; and {len(left_out) - 4} more" if len(left_out) > 4 else ""
    return (
        f"Run a ({a.path}) and run b ({b.path}) have no request in common that could be compared ({reasons}{more}). "
        "Expected at least one request with the same id and the same prompt. Record both runs with the same requests."
    )


def _turn_before(
    a: dict[str, Any], b: dict[str, Any], pairs: list[RequestPair], left_out: list[NotCompared]
) -> str | None:
    """Why a later turn's conversation is another one, where the turn before is why."""
    after = a.get("after")
    if after is None or after != b.get("after"):
        return None
    pair = next((pair for pair in pairs if pair.id == after), None)
    if pair is not None and pair.flip is not None:
        return f"it goes on from {after}, whose answers differ from token {pair.flip} on"
    if any(each.id == after for each in left_out):
        return f"it goes on from {after}, which is not compared"
    return None


def _prompt_reason(a: list[int], b: list[int]) -> str:
    same = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if same == min(len(a), len(b)):
        return f"the prompts differ: {len(a)} tokens in run a and {len(b)} in run b, equal as far as both go"
    return f"the prompts differ from token {same} on ({a[same]} in run a, {b[same]} in run b)"


def _asked_otherwise(id: str, a: dict[str, Any], b: dict[str, Any], forced: bool) -> list[Finding]:
    found = []
    # Given tokens end where they end, whatever the request asks for.
    for key in ("sampling",) if forced else _SAME_WORK:
        said = (key in a and key in b) or key in ("stop", "cancel")
        mine, theirs = a.get(key), b.get(key)
        if said and mine != theirs and not (key == "sampling" and _choose_alike(mine, theirs)):
            detail = f"{key} is {_plain(mine)} in run a and {_plain(theirs)} in run b"
            found.append(Finding("both", "settings", id, None, detail))
    return found


def _plain(setting: Any) -> str:
    if setting is None:
        return "none"
    if not isinstance(setting, dict):
        return str(setting)
    return ", ".join(f"{name} {value}" for name, value in setting.items())


def _choose_alike(a: Any, b: Any) -> bool:
    return isinstance(a, dict) and isinstance(b, dict) and same_choice(a, b)


@dataclass(frozen=True)
class _TextEnds:
    """What may have ended each run's text: token limits (None: unknown) and whether the traces are whole."""

    limit_a: int | None
    limit_b: int | None
    whole_a: bool
    whole_b: bool


def _first_flip(a: Steps, b: Steps, ends: _TextEnds) -> tuple[int | None, str, str | None]:
    """(index, kind, why the end is not compared)."""
    common = min(len(a), len(b))
    diverged = np.flatnonzero(a.token[:common] != b.token[:common])
    if len(diverged):
        return int(diverged[0]), "token", None
    short_whole = ends.whole_a if len(a) < len(b) else ends.whole_b
    short_limit = ends.limit_a if len(a) < len(b) else ends.limit_b
    if not (ends.whole_a and ends.whole_b) and (len(a) == len(b) or not short_whole):
        return None, "", f"a trace is incomplete, so only the first {common} generated tokens can be compared"
    if len(a) == len(b):
        return None, "", None
    if ends.limit_a != ends.limit_b and common == short_limit:
        return None, "", f"one run was limited to {common} tokens, so those after are not compared"
    return common, "length", None


def _position(a: Steps, b: Steps, index: int) -> int:
    found = [int(steps.position[index]) for steps in (a, b) if index < len(steps)]
    return min(found)
