"""Figures of policies over rounds, and the JSON of a measurement in the key names of ``vllm bench serve --save-result``.

The keys are those of a result that vLLM 0.25.1 wrote, and of vllm/benchmarks/serve.py at 009e6d4, so that notebooks that read its files read these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from .measure import Measurement, PolicyResult
from .runs import Goodput, Spread, TimedRun

SCHEMA = "detdiff.bench/1"


def throughput(result: PolicyResult) -> Spread | None:
    """Tokens a second over rounds; None where nothing was measured."""
    values = [run.figures.throughput for run in result.runs]
    return Spread.of(values) if values else None


def good(result: PolicyResult, limits: Goodput) -> Spread | None:
    """Requests a second that keep the limits, over rounds."""
    values = [run.figures.good(limits) for run in result.runs]
    return Spread.of(values) if values else None


def factor(result: PolicyResult, baseline: PolicyResult) -> Spread | None:
    """Throughput over that of ``baseline`` in the same round."""
    pairs = zip(result.runs, baseline.runs, strict=False)
    values = [a.figures.throughput / b.figures.throughput for a, b in pairs]
    return Spread.of(values) if values else None


def vllm_json(
    result: PolicyResult,
    measured: Measurement,
    goodput: Goodput | None = None,
    percentiles: Sequence[int] = (99,),
) -> dict[str, Any]:
    """One policy as vLLM writes a result; the round with the median throughput, so that its lists belong together."""
    ranked = sorted(result.runs, key=lambda run: run.figures.throughput)
    run = ranked[len(ranked) // 2]
    figures = run.figures
    items = measured.workload.items
    scenario = result.policy.scenario
    input_tokens = sum(item.prompt_length for item in items)
    lists = {"ttft": figures.ttft, "tpot": figures.tpot, "itl": figures.itl, "e2el": figures.e2el}
    found: dict[str, Any] = {
        "date": measured.environment["date"],
        "endpoint_type": scenario.engine,
        "backend": scenario.engine,
        "label": result.policy.name,
        "model_id": scenario.model,
        "tokenizer_id": scenario.model,
        "num_prompts": len(items),
        "request_rate": "inf"
        if not any(item.arrival for item in items)
        else len(items) / (items[-1].arrival or 1),
        "burstiness": 1.0,
        "max_concurrency": result.policy.at_once,
        "duration": figures.seconds,
        "completed": len(figures.e2el),
        "failed": len(items) - len(figures.e2el),
        "total_input_tokens": input_tokens,
        "total_output_tokens": figures.tokens,
        "request_throughput": len(figures.e2el) / figures.seconds,
        "request_goodput": None if goodput is None else figures.good(goodput),
        "output_throughput": figures.throughput,
        "total_token_throughput": (input_tokens + figures.tokens) / figures.seconds,
        "input_lens": [item.prompt_length for item in items],
        "output_lens": [len(each) for each in run.tokens],
        "ttfts": [(each[0] - came) if each else 0.0 for came, each in zip(run.came, run.tokens, strict=True)],
        "itls": [[float(gap) for gap in np.diff(each)] for each in run.tokens],
        "latencies": [
            (each[-1] - came) if each else 0.0 for came, each in zip(run.came, run.tokens, strict=True)
        ],
        "start_times": list(run.came),
        # Requests wait in the engine, inside of their latencies; and nothing is heard.
        "queue_times": [0.0] * len(items),
        "rtfx": 0.0,
        "generated_texts": list(result.texts),
        "errors": ["" for _ in items],
        "max_output_tokens_per_s": _peak(run),
        "max_concurrent_requests": _together(run),
    }
    for name, values in lists.items():
        array = np.array(values or (0.0,))
        found |= {f"mean_{name}_ms": float(array.mean()), f"median_{name}_ms": float(np.median(array))}
        found |= {f"std_{name}_ms": float(array.std())}
        found |= {f"p{p}_{name}_ms": float(np.percentile(array, p)) for p in percentiles}
    return found


def _peak(run: TimedRun) -> float:
    """The most tokens in one second of the run."""
    times = [t for each in run.tokens for t in each]
    return float(max(np.bincount(np.array(times).astype(int)), default=0)) if times else 0.0


def _together(run: TimedRun) -> int:
    """The most requests between their first token and their last at a time."""
    spans = [(each[0], each[-1]) for each in run.tokens if each]
    return max((sum(a <= start <= b for a, b in spans) for start, _ in spans), default=0)


def bench_json(measured: Measurement, goodput: Goodput | None = None) -> dict[str, Any]:
    """The whole measurement: one object a policy, in vLLM's keys, with what detdiff adds under ``detdiff``."""
    baseline = measured.results[0]
    policies = []
    for result in measured.results:
        own: dict[str, Any] = {
            "policy": result.policy.name,
            "answers": result.sameness,
            "answers_alone": result.invariance,
            "flips": result.flips,
            "counts": None if result.counts is None else _counts(result.counts),
            "counts_as_simulated": result.simulated,
            "not_simulated": result.why or None,
            "pinned": result.policy.pinned.splitlines() or None,
            "cache": None if result.memory is None else asdict(result.memory),
            "rounds": len(result.runs),
            "throughput": spread_json(throughput(result)),
            "factor": spread_json(factor(result, baseline)),
            "divergence": None if result.divergence is None else _divergence(result),
        }
        measurement = vllm_json(result, measured, goodput) if result.runs else {"label": result.policy.name}
        policies.append({**measurement, "detdiff": own})
    return {
        "schema": SCHEMA,
        "finished": measured.finished,
        "workload": {
            "source": measured.workload.source,
            "requests": len(measured.workload),
            "input_lens": [item.prompt_length for item in measured.workload.items],
            "output_lens": [item.answer_length for item in measured.workload.items],
        },
        "environment": measured.environment,
        "policies": policies,
    }


def spread_json(found: Spread | None) -> dict[str, float] | None:
    """``median``, ``low`` and ``high``."""
    return None if found is None else asdict(found)


def _counts(counts: Any) -> dict[str, Any]:
    return {
        **asdict(counts),
        "rows_per_forward": {str(rows): n for rows, n in counts.rows_per_forward},
        "paths": dict(counts.paths),
        "padded_share": counts.padded_share,
        "idle_share": counts.idle_share,
    }


def _divergence(result: PolicyResult) -> Mapping[str, Any]:
    divergence = result.divergence
    assert divergence is not None
    first = next((r for r in divergence.requests if r.id == divergence.first), None)
    origin = None if first is None or first.origin is None else first.origin
    return {
        "identical": divergence.identical,
        "inconclusive": divergence.inconclusive,
        "first": divergence.first,
        "origin": None if origin is None else {"site": origin.site, "position": origin.position},
        "flips": [
            {"request": r.id, "index": r.flip.index} for r in divergence.requests if r.flip is not None
        ],
    }
