"""What to do about a verdict, in sentences."""

from __future__ import annotations

from .controls.choices import ChoiceFigures
from .controls.invariant import InvariantFigures
from .controls.pin_kernels import PinKernelsFigures
from .controls.repeat import RepeatFigures
from .facts import Facts
from .sentences import control_said, only_together, oracle_figures, shows_paths


def advise_choices(facts: Facts) -> str:
    found = facts.figures(ChoiceFigures)
    if found is None or found.stage == "processors":
        return "Look at how each request's logits processors and its tokens so far are kept beside the other requests'."
    return "Look at how each request's sampler, its settings and its generator are kept beside the other requests'."


def advise_ranks(facts: Facts) -> str:
    return (
        "Nothing is wrong: a model over several processes rounds at each all-reduce. Compare runs over the same number of processes where bits "
        "must be equal."
    )


def advise_adapter(facts: Facts) -> str:
    return (
        "Nothing is wrong with the weights: an adapter beside its weights and one that is fused round in different places. Fuse in a "
        "wider dtype, or without quantising again, for less."
    )


def advise_shared_state(facts: Facts) -> str:
    return "For draws that do not depend on the batch use sampler detdiff, or run requests that have a seed one by one, as mlx-lm's server does."


def advise_uncached(facts: Facts) -> str:
    return (
        "Give both runs the same cache, or ask for no penalties where a cache is kept; mlx-lm's batches (schedule static or continuous) "
        "are told of the tokens before."
    )


def advise_outside_only(facts: Facts) -> str:
    return (
        "Run the same model and requests on an engine that shows its sites (--engine llama.cpp, transformers or mlx), or try the "
        "server's deterministic mode with --expect-invariant."
    )


def advise_cached(facts: Facts) -> str:
    return "Compare with prefix caches off, or with both sides served once before; docs/servers.md says how for each server."


def advise_path(facts: Facts) -> str:
    pinned = facts.figures(PinKernelsFigures)
    how = (pinned and pinned.how) or (
        "one kernel path for every number of rows (split_rows above every forward's rows)"
    )
    cost = pinned and pinned.cost
    more = f" Here that cost: {cost}." if cost else ""
    advice = f"Where the text must not depend on the batch, pin the kernels: {how}.{more}{_fix(facts)}"
    if not shows_paths(facts):
        return advice
    return f"{advice} `detdiff probe` measures on your machine at which number of rows the bits change and what each number costs."


def _fix(facts: Facts) -> str:
    """What finds and holds such kernels by itself, with its price where that was measured."""
    if facts.fix is None:
        return ""
    tried = facts.controls.get("invariant")
    if tried is not None and tried.result in ("remains", "not_run"):
        return f" {facts.fix.call} was tried, too: {control_said(facts, 'invariant')}"
    figures = facts.figures(InvariantFigures)
    price = facts.fix.price if figures is None else figures.cost
    return (
        f" {facts.fix.call} finds the cheapest kernels that hold and checks them before it begins; {price}."
    )


def advise_worse(facts: Facts) -> str:
    far = oracle_figures(facts).far or {}
    if not shows_paths(facts) and facts.origin is not None:
        first = (
            f"Have {facts.origin.site} sum in float32 where a setting of the engine asks for such a kernel"
        )
        return f"{first}, or keep to what the other run does. {advise_path(facts)}"
    return f"Let {far['path']} sum in float32, or keep to the path of the other run: {advise_path(facts)}"


def advise_precision(facts: Facts) -> str:
    found = oracle_figures(facts).precision or {}
    return (
        f"Turn the lower precision off on the side of run {found['run']} (a flag such as MLX_ENABLE_TF32, or the kernel's own "
        f"choice), or accept it on both: {advise_path(facts)}"
    )


def advise_nondeterminism(facts: Facts) -> str:
    if only_together(facts):
        return (
            "Sum up many requests and repetitions (compare --prompts FILE --repeats N) to see how far and how often; run the model on an "
            "engine whose batches are fixed (--engine llama.cpp, transformers or mlx) to see why."
        )
    return (
        "Look for what is not fixed between two runs: threads that add in the order they finish, atomics, random numbers "
        "without a seed, memory that is read before it is written. Compare batch compositions only once a repeat is equal."
    )


def advise_served(facts: Facts) -> str:
    return (
        "Look for what outlives a run: a prefix cache, buffers that are read before they are written, what is tuned or compiled "
        "on first use. Compare the two sides on engines that have served the same, or nothing."
    )


def advise_changed(facts: Facts) -> str:
    return "Record both sides again with the code of today, and compare those."


def advise_observed(facts: Facts) -> str:
    repeated = facts.figures(RepeatFigures)
    if repeated is None or facts.result("repeat") == "equal":
        return "Record the run again with fewer sites; what recording changes is a fault of the recording, not of the model."
    return advise_nondeterminism(facts)


def advise_bug(facts: Facts) -> str:
    return "Do not look at this as numerics: neither a tolerance nor pinned kernels make it right, even where pinned kernels hide it."


def advise_configuration(facts: Facts) -> str:
    quantised = facts.quantised_apart or any("kv_" in what for what in facts.settings)
    or_so = ", or quantise the cache at the same position," if quantised else ""
    return f"Give both sides the same settings{or_so} and compare again."


def advise_roles(facts: Facts) -> str:
    return (
        "Expect texts and margins of two engines to be near, never their bits. Where the text must be the same, run one engine; "
        "where numbers matter most, the one that is nearer to float64."
    )


def advise_other_files(facts: Facts) -> str:
    return "Give both engines the same model: import or convert one side's file again from the other's, and compare again."
