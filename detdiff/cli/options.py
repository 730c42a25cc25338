"""Arguments and options that several commands take, and what they say together."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .group import JSON, noted

if TYPE_CHECKING:
    from detdiff.commands.sides import ComparisonArguments
    from detdiff.trace import Place

F = TypeVar("F", bound=Callable[..., Any])


class TracePath(click.Path):
    """A local path, or an address of fsspec's where a trace lies."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and ("://" in value or value.endswith(".zip")):
            from detdiff.trace import place

            return place(value)
        return super().convert(value, param, ctx)


class LocalPath(click.Path):
    """A path of this machine, where no address can be."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and ":/" in value:
            from detdiff.trace import local

            return local(value)
        return super().convert(value, param, ctx)


def json_option(function: F) -> F:
    """--json; eager, so that errors about the other arguments know of it."""
    return click.option(
        "--json", "as_json", is_flag=True, is_eager=True, callback=noted(JSON), help="Answer in JSON."
    )(function)


def engine_option(short: str) -> Callable[[F], F]:
    """--engine, and what it is short for."""
    return click.option(
        "--engine",
        metavar="NAME",
        help=f"Short for {short} engine=NAME: mlx, transformers, llama.cpp, server, an installed one, or a factory as package.module:factory.",
    )


def import_option(function: F) -> F:
    """--import: a module before a run."""
    return click.option(
        "--import",
        "imports",
        metavar="MODULE",
        multiple=True,
        help="Import this module first, such as a patch of mlx-lm; traces name it with its source's hash.",
    )(function)


def import_first(names: tuple[str, ...]) -> None:
    if names:
        from detdiff.engines.registry import import_before_runs

        for name in names:
            import_before_runs(name)


across_models_option = click.option(
    "--across-models",
    is_flag=True,
    help="The sides may have different weights: tokens, logits and sites of the same name are compared.",
)
partial_option = click.option("--partial", is_flag=True, help="Read what is left of damaged traces.")
replay_option = click.option(
    "--replay", is_flag=True, help="Run both again and capture values around each divergence: ULPs."
)
across_engines_option = click.option(
    "--across-engines",
    is_flag=True,
    help="The sides are different engines with the same weights: sites are aligned by role, such as q of layer 3.",
)


def sides_options(traces: str, *, keep: bool = True) -> Callable[[F], F]:
    """What says which two sides there are; ``traces`` opens what --model means beside them, ``keep`` adds --keep."""
    options = (
        click.argument("files", nargs=-1, metavar="[A] [B]", type=TracePath()),
        click.option(
            "--model",
            help=f"Without files: builtin, a directory, a hub id, or a server's address. {traces}: where their model is now.",
        ),
        click.option(
            "--prompt", "prompts", multiple=True, help="Without files: a request's text; give one for each."
        ),
        click.option(
            "--prompts",
            "prompts_file",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="Without files: prompts, one a line, as text or as JSON with prompt or messages.",
        ),
        click.option(
            "--a",
            "flags_a",
            metavar="FLAGS",
            default="",
            help="Side a: key=value key=value, as in a scenario.",
        ),
        click.option(
            "--b", "flags_b", metavar="FLAGS", default="", help="Side b; --a and --b win over --both."
        ),
        click.option("--both", metavar="FLAGS", default="", help="The same for both sides."),
        click.option(
            "--split-rows", metavar="N", help="Short for --both split_rows=N: at most N rows go row by row."
        ),
        click.option(
            "--kernels", metavar="NAME", help="Short for --both kernels=NAME: a dispatch profile, or native."
        ),
        engine_option("--both"),
        click.option(
            "--server-kind",
            metavar="KIND",
            help="Short for --both engine.kind=KIND: vllm, sglang, llama.cpp, tgi, mlx_lm, transformers, detdiff or openai.",
        ),
        import_option,
    )
    keep_option = click.option(
        "--keep", metavar="DIR", type=TracePath(), help="Keep the traces as DIR/a and DIR/b."
    )

    def decorate(function: F) -> F:
        # Decorators apply from the last to the first, and so click lists them.
        for option in reversed((*options, keep_option) if keep else options):
            function = option(function)
        return function

    return decorate


def file_option(name: str, metavar: str, help: str, **more: Any) -> Callable[[F], F]:
    """An option that names a file or a folder of this machine."""
    return click.option(name, metavar=metavar, type=LocalPath(), help=help, **more)


def comparison_asked(files: tuple[Place, ...], options: Mapping[str, Any]) -> ComparisonArguments:
    from detdiff.commands.sides import ComparisonArguments

    if len(files) > 2:
        name = click.get_current_context().info_name
        raise click.UsageError(f"{name} takes two files at most, and there are {len(files)}.")
    import_first(options["imports"])
    short = [
        f"{key}={options[key]}" for key in ("split_rows", "kernels", "engine") if options[key] is not None
    ]
    if options["server_kind"] is not None:
        short.append(f"engine.kind={options['server_kind']}")
    return ComparisonArguments(
        files=files,
        model=options["model"],
        prompts=options["prompts"],
        prompts_file=options["prompts_file"],
        both=f"{options['both']} {as_flags(short)}",
        a=options["flags_a"],
        b=options["flags_b"],
        partial=options["partial"],
        keep=options["keep"],
        replay=options.get("replay", False),
        force_tokens=options.get("force_tokens"),
        across_models=options.get("across_models", False),
        across_engines=options.get("across_engines", False),
        imports=options["imports"],
    )


def as_flags(pairs: tuple[str, ...] | list[str]) -> str:
    """Single pairs as flags: a space inside of a value stays inside."""
    return shlex.join(pairs)
