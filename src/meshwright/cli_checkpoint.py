"""Commands of `meshwright checkpoint`: one function for each, no logic; see `cli.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

__all__: list[str] = []

JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the result to this file too.")]

checkpoint = typer.Typer(
    name="checkpoint", help="Look into checkpoints, prove them, and convert weights.", no_args_is_help=True
)
PlaceArgument = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="One step, a directory of steps, or a run's directory.", show_default=False),
]
StepOption = Annotated[int | None, typer.Option("--step", min=0, help="This step.")]
SourceArgument = Annotated[Path, typer.Argument(metavar="SRC", help="What is read.", show_default=False)]
SourceKindOption = Annotated[
    Literal["meshwright", "safetensors", "hf", "dcp"] | None, typer.Option("--from", help="The kind of SRC.")
]
TargetArgument = Annotated[
    Path, typer.Argument(metavar="DST", help="What is made; it must not exist.", show_default=False)
]
ShardOption = Annotated[str, typer.Option("--max-shard-size", help="Largest shard of a Hugging Face directory.")]
ModelConfigOption = Annotated[
    Path | None, typer.Option("--config", help="A config.json, or its directory, that a Hugging Face directory gets.")
]
TiedOption = Annotated[bool, typer.Option("--copies-of-tied", help="Write tied weights under each of their names.")]


@checkpoint.command("inspect")
def inspect_step(
    place: PlaceArgument,
    step: StepOption = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show long lists whole.")] = False,
    json_path: JsonOption = None,
) -> None:
    """Show what a checkpoint holds: step, plan, files, tensors, tied names, state."""
    from meshwright.checkpoint.listing import inspect_checkpoint

    raise typer.Exit(inspect_checkpoint(place, step=step, json_path=json_path, show_all=show_all))


@checkpoint.command("verify")
def verify_digests(place: PlaceArgument, step: StepOption = None) -> None:
    """Check every digest; exit 14 where a file is damaged, 13 where one cannot be read."""
    from meshwright.checkpoint.verification import verify_checkpoints

    raise typer.Exit(verify_checkpoints(place, step=step))


@checkpoint.command("convert")
def convert_weights(
    source: SourceArgument,
    target: TargetArgument,
    *,
    source_kind: SourceKindOption = None,
    target_kind: Annotated[
        Literal["meshwright", "safetensors", "hf"] | None, typer.Option("--to", help="The kind of DST.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="The step that is read, or made.")] = None,
    config: ModelConfigOption = None,
    max_shard_size: ShardOption = "5GB",
    copies_of_tied: TiedOption = False,
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Read the index of torch's DCP, a pickle: only if you trust who wrote it."),
    ] = False,
    prefix: Annotated[str | None, typer.Option("--prefix", help="What names of the model begin with in a DCP.")] = None,
    tied: Annotated[
        list[str] | None,
        typer.Option("--tied", metavar="NAME=KEPT", help="Keep two equal tensors once, which the model ties."),
    ] = None,
) -> None:
    """Convert weights: a checkpoint, a safetensors file, a Hugging Face directory; from torch's DCP."""
    from meshwright.checkpoint.bridges.converting import convert

    raise typer.Exit(
        convert(
            source,
            target,
            source_kind=source_kind,
            target_kind=target_kind,
            step=step,
            config=config,
            max_shard_size=max_shard_size,
            copies_of_tied=copies_of_tied,
            allow_pickle=allow_pickle,
            prefix=prefix,
            tied=tied or [],
        )
    )


@checkpoint.command("export")
def export_weights(
    source: SourceArgument,
    target: TargetArgument,
    *,
    kind: Annotated[Literal["hf", "safetensors"], typer.Option("--format", help="What is made.", show_default=False)],
    source_kind: SourceKindOption = None,
    dtype: Annotated[str | None, typer.Option(help="Type of floating-point tensors, bfloat16 for example.")] = None,
    step: StepOption = None,
    config: ModelConfigOption = None,
    max_shard_size: ShardOption = "5GB",
    copies_of_tied: TiedOption = False,
) -> None:
    """Export a model's weights alone, in another type if asked for."""
    from meshwright.checkpoint.bridges.converting import convert

    raise typer.Exit(
        convert(
            source,
            target,
            source_kind=source_kind,
            target_kind=kind,
            step=step,
            dtype=dtype,
            config=config,
            max_shard_size=max_shard_size,
            copies_of_tied=copies_of_tied,
        )
    )
