"""The commands about what lies there already: show, profiles and import-gguf."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .group import main, print_answer, print_json, text_width
from .options import LocalPath, TracePath, json_option

if TYPE_CHECKING:
    from detdiff.trace import Place


@main.command()
@click.argument("trace", type=TracePath())
@click.option("--forwards", is_flag=True, help="Show all forwards; with --json, the line of each as well.")
@click.option(
    "--sites",
    is_flag=True,
    help="List all sites by name; rules take those of kind linear and head, window_sites all.",
)
@click.option("--partial", is_flag=True, help="Read what is left of a damaged trace.")
@json_option
def show(trace: Place, forwards: bool, sites: bool, partial: bool, as_json: bool) -> None:
    """Say what TRACE holds.

    Its scenario, model and environment, each request's prompt and generated text, the forwards with who was in them
    and on which kernel paths, whether it is complete, and the observer check.
    """
    from detdiff.commands.show import opened, summary, summary_text

    found = summary(opened(trace, partial=partial), every=forwards, sites=sites)
    print_answer(as_json, lambda: found, lambda: summary_text(found, width=text_width()))


@main.command()
@click.argument("name", required=False)
@click.option("--op", type=click.Choice(["linear", "head", "switch", "attention"]), help="Default: linear.")
@click.option("--m", metavar="RANGE", help="Rows, as 8 or 1..32; of a switch, gathered rows.")
@click.option("--k", type=click.IntRange(1), help="Inputs of the weight.")
@click.option("--n", type=click.IntRange(1), help="Outputs of the weight.")
@click.option("--bits", metavar="BITS", help="Width of the weight, or dense. Default: 4.")
@click.option("--group-size", type=click.IntRange(1), help="Default: 64.")
@click.option("--format", help="affine, or a GGUF block such as Q4_K. Default: affine, or dense.")
@click.option(
    "--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Of the input. Default: bfloat16."
)
@click.option(
    "--layout",
    type=click.Choice(["packed", "padded"]),
    help="Rows as [1, M, K] or as [M, 1, K]. Default: packed.",
)
@click.option("--experts", type=click.IntRange(1), help="Of a switch. Default: 8.")
@click.option("--sorted", is_flag=True, default=None, help="A switch's rows are sorted by expert.")
@click.option("--query", metavar="RANGE", help="Attention: query length. Default: 1.")
@click.option("--keys", metavar="RANGE", help="Attention: key length with padding, as 1..4096.")
@click.option("--head-dim", type=click.IntRange(1), help="Attention. Default: 64.")
@click.option("--heads", type=click.IntRange(1), help="Attention. Default: 1.")
@click.option("--kv-heads", type=click.IntRange(1), help="Attention. Default: as many as heads.")
@click.option("--batch", type=click.IntRange(1), help="Attention: sequences. Default: 1.")
@click.option("--mask", type=click.Choice(["none", "causal", "array"]), help="Attention. Default: none.")
@json_option
def profiles(name: str | None, as_json: bool, **options: Any) -> None:
    """Say which kernel a dispatch profile takes for which number of rows.

    Without NAME, lists all profiles. NAME may carry parameters, as in mlx-metal:generation=13,letter=d, or be a
    .toml file of your own. Without a size, shows the profile's rules; with a range, where the kernel changes.

    Example: detdiff profiles mlx-metal --m 1..32 --k 2048 --n 2048
    """
    from detdiff.commands import profiles as answers

    question = answers.asked(options)
    if name is None:
        if question is not None:
            raise click.UsageError("The sizes ask about a profile; give its NAME first.")
        found = answers.listed()
        text = answers.list_text(found, text_width())
        answer = answers.list_json(found)
    else:
        one = answers.opened(name)
        if question is None:
            text, answer = answers.profile_text(one, text_width()), answers.rules_json(one)
        else:
            bands = answers.bands(one, question)
            text = answers.answer_text(one, question, bands, text_width())
            answer = answers.answer_json(one, question, bands)
    print_answer(as_json, lambda: answer, lambda: text)


@main.command("import-gguf")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("directory", type=LocalPath())
@click.option("--packed", is_flag=True, help="Keep Q4_0, Q4_1 and Q8_0 blocks as they are.")
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "f16", "f32"]),
    default="bf16",
    show_default=True,
    help="Of other arrays.",
)
@json_option
def import_gguf(file: Path, directory: Path, packed: bool, dtype: str, as_json: bool) -> None:
    """Turn the model in a GGUF FILE into a DIRECTORY that mlx-lm and detdiff can load."""
    from detdiff.engines.mlx.gguf_import import import_gguf as run

    found = run(file, directory, dtype=dtype, packed=packed)
    if as_json:
        fields = dataclasses.asdict(found) | {"directory": str(found.directory)}
        print_json({"schema": "detdiff.import/1", **fields})
        return
    click.echo(
        f"{found.directory}: {found.architecture} ({found.model_type}), {found.layers} layers, {found.tensors} tensors "
        f"({found.packed} packed), {found.dtype}, {found.bytes:,} bytes"
        f"{'' if found.chat_template else ', no chat template'}"
    )
