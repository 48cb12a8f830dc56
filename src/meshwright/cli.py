"""Command line: one function for each command, no logic. torch is imported only where ranks run.

Exit codes: see `errors.py`.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from meshwright.cli_checkpoint import JsonOption, checkpoint
from meshwright.cli_errors import refuse_unwritable, run_command
from meshwright.cli_plan import OptimizerWord, PrecisionWord, show_plans
from meshwright.errors import StorageError
from meshwright.texts import clean

__all__: list[str] = []

app = typer.Typer(
    name="meshwright",
    help="Train any PyTorch model on any set of devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 120},  # of the terminal's; without it text ends at 80 in any
)

ConfigArgument = Annotated[Path, typer.Argument(help="A TOML file.", show_default=False)]
PlanOption = Annotated[
    str | None, typer.Option("--plan", help='A plan, as in "dp=2,tp=2", a preset, "auto", or a DeepSpeed JSON file.')
]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the file.")]
StepsOption = Annotated[int | None, typer.Option("--steps", min=1, help="Steps for each plan.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from meshwright import __version__

        print(f"meshwright {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    config: ConfigArgument,
    plan: PlanOption = None,
    devices: Annotated[int | None, typer.Option(min=1, help="How many devices a preset is spread over.")] = None,
    settings: SetOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run from its newest sound checkpoint.")
    ] = False,
    trace: Annotated[
        str | None,
        typer.Option(metavar="STEPS", help='Record these steps, as in "10" or "10-12": runs/NAME/trace.json.'),
    ] = None,
    profiler: Annotated[
        bool, typer.Option("--profiler", help="Add torch.profiler's operators to these steps, which makes them longer.")
    ] = False,
) -> None:
    """Train a model: runs/NAME/ gets events.jsonl, record.json, report.html and checkpoints/."""
    from meshwright.ranks.agent import end_without_teardown
    from meshwright.ranks.environment import read_place
    from meshwright.train.config.deepspeed import show_rows
    from meshwright.train.config.load import load_config
    from meshwright.train.launcher import run_training

    traced = [] if trace is None else [f"train.trace='{trace}'"]
    traced += ["train.profiler=true"] if profiler else []
    loaded = load_config(config, [*(settings or []), *traced], plan=plan, devices=devices)
    show_rows(loaded.plan_rows, sys.stdout)
    for note in loaded.notes:
        print(clean(note), file=sys.stderr)
    code = run_training(loaded, resume=resume)
    if code and read_place(os.environ).is_of_job:  # the others, or an agent, wait for this process's end
        end_without_teardown(code)
    raise typer.Exit(code)


@app.command()
def compare(
    config: ConfigArgument,
    plans: Annotated[str, typer.Option(help='Plans with ";" between them: "single; dp=2".', show_default=False)],
    settings: SetOption = None,
    json_path: JsonOption = None,
    steps: StepsOption = None,
    report_path: Annotated[Path | None, typer.Option("--report", help="Write an HTML report to this file too.")] = None,
) -> None:
    """Run the same training under several plans and compare them."""
    from meshwright.compare.command import run_comparison

    refuse_unwritable("--json", json_path)
    refuse_unwritable("--report", report_path)
    raise typer.Exit(run_comparison(config, plans, settings or [], json_path, steps, report_path=report_path))


@app.command()
def verify(
    config: ConfigArgument,
    plan: Annotated[str, typer.Option(help="The plan to verify.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 3,
    json_path: JsonOption = None,
    settings: SetOption = None,
) -> None:
    """Prove that a plan computes what one device does; exit 0 only then."""
    from meshwright.compare.verify_config import run_verification

    refuse_unwritable("--json", json_path)
    raise typer.Exit(run_verification(config, plan, steps, json_path, settings or []))


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A known model, a Hugging Face config.json, package.module:callable, what describe --json wrote; or a TOML "
            "file of a training, which is planned for on this machine.",
            show_default=False,
        ),
    ],
    cluster: Annotated[
        str | None, typer.Option(help='Devices: "8xh100-sxm", "2x8xa100-sxm-80gb", a JSON file.', show_default=False)
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of one step over all devices.", show_default=False)
    ] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="Tokens of a sample.")] = None,
    precision: Annotated[
        PrecisionWord | None, typer.Option(help="What products are computed in; bf16.", show_default=False)
    ] = None,
    optimizer: Annotated[OptimizerWord | None, typer.Option(help="adamw.", show_default=False)] = None,
    top: Annotated[int, typer.Option(min=1, help="Plans to show.")] = 5,
    batch: Annotated[
        str | None, typer.Option(metavar="PACKAGE.MODULE:CALLABLE", help="What returns an example batch of the model.")
    ] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="Devices of a TOML file's plans.")] = None,
    refine: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Of a TOML file: run the best N for some steps; auto then takes the fastest."
        ),
    ] = 0,
    strategies: Annotated[
        bool, typer.Option("--strategies", help="Show every preset beside one device, in place of the best plans.")
    ] = False,
    json_path: JsonOption = None,
) -> None:
    """Rank the plans for a model on a cluster: time, memory, and why."""
    if model.endswith(".toml"):
        from meshwright.compare.refine import plan_config

        for name, value in (("global-batch", global_batch), ("sequence", sequence), ("precision", precision),
                            ("optimizer", optimizer), ("batch", batch), ("strategies", strategies or None)):  # fmt: skip
            _refuse(value is not None, f"--{name}", f"'{model}' says it itself")
        _refuse(bool(cluster and refine), "--refine", "plans are run on this machine alone; leave --cluster out")
        found = plan_config(Path(model), cluster=cluster, devices=devices, top=top, refine=refine, json_path=json_path)
        print(clean(found))
        return
    for name, value in (("devices", devices), ("refine", refine or None)):
        _refuse(value is not None, f"--{name}", "for a TOML file of a training alone")
    if cluster is None or global_batch is None:
        missing, example = ("--cluster", "8xh100-sxm") if cluster is None else ("--global-batch", "64")
        raise typer.BadParameter(
            f"missing for '{model}', as in {missing} {example} (a configuration says it itself)", param_hint=missing
        )
    if ":" not in model and not strategies:
        show_plans(
            *(model, cluster, global_batch),
            sequence=sequence,
            precision=precision,
            optimizer=optimizer,
            top=top,
            json_path=json_path,
        )
        return
    from meshwright.hardware import load_cluster
    from meshwright.plan.plan_table import list_plans, read_model
    from meshwright.spec import TrainSpec

    train = TrainSpec(global_batch_size=global_batch, precision=precision or "bf16", optimizer=optimizer or "adamw")
    where = load_cluster(cluster)
    if ":" in model:  # a module has to be built and run, on fake tensors
        from meshwright.train.model_names import find_model

        spec = find_model(model, sequence=sequence, batch=batch, autocast=where.autocast(train.precision))
    else:
        spec = read_model(model, sequence=sequence)
    if strategies:
        from meshwright.plan.strategy_table import strategy_table

        _refuse(json_path is not None, "--json", "--strategies shows a table alone")
        print(clean(strategy_table(spec, where, train)))
        return
    print(clean(list_plans(spec, where, train, top=top, json_path=json_path)))


def _refuse(is_wrong: bool, option: str, why: str) -> None:
    if is_wrong:
        raise typer.BadParameter(why, param_hint=option)


@app.command()
def probe(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the cluster to this JSON file.")] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="Ranks; the visible GPUs, or the cores.")] = None,
) -> None:
    """Measure this machine, for later runs here and for `meshwright plan --cluster FILE`."""
    from meshwright.measure.probe import probe_cluster
    from meshwright.measure.probe_listing import save_cluster, show_cluster, show_stage
    from meshwright.train.planning.this_machine import keep_for_runs

    refuse_unwritable("-o", output)
    cluster = probe_cluster(devices, on_stage=show_stage)
    keep_for_runs(cluster)
    print(show_cluster(cluster))
    if output is not None:
        save_cluster(cluster, output)


@app.command()
def schedule(
    stages: Annotated[int, typer.Option(min=1, help="Pipeline ranks.")] = 4,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches of one step.")] = 8,
    kind: Annotated[
        Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"], typer.Option(help="The order of work.")
    ] = "1f1b",
) -> None:
    """Draw a pipeline schedule."""
    from meshwright.schedule.drawing import draw_schedule

    print(draw_schedule(kind, stages, micro_batches))


@app.command()
def describe(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="package.module:callable, a configuration, a Hugging Face config.json, or a known model.",
            show_default=False,
        ),
    ],
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples of the example batch.")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="Tokens of a sample.")] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="PACKAGE.MODULE:CALLABLE", help="What returns an example batch.")
    ] = None,
    autocast: Annotated[
        Literal["none", "cpu", "cuda"],
        typer.Option(help="For plans in bf16: run it under the autocast of such devices."),
    ] = "none",
    json_path: JsonOption = None,
) -> None:
    """Show a model's layers: parameters, arithmetic, memory and splits, found without running it."""
    from meshwright.describe.model_table import format_model
    from meshwright.train.model_names import find_model

    spec = find_model(model, batch_size=batch_size, sequence=sequence, batch=batch, autocast=autocast)
    if json_path is not None:
        try:
            json_path.write_text(spec.to_json(indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            why = f"the description could not be written to {json_path}: {error.strerror}"
            raise StorageError(why, fix="--json model.json") from error
    print(clean(format_model(spec)))


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", help="Runs' folders; or what compare --json wrote.", show_default=False),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The HTML file; RUN_DIR/report.html.", show_default=False)
    ] = None,
    every_step: Annotated[bool, typer.Option("--every-step", help="With the exact numbers of all steps.")] = False,
) -> None:
    """Write a report of runs: one HTML file that needs no network."""
    from meshwright.compare.run_report import run_report

    print(run_report(runs, output, with_every_step=every_step))


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's folder.", show_default=False)],
    web: Annotated[bool, typer.Option("--web", help="Serve the live report to this machine's browsers.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port of --web; 0 takes a free one.")] = 0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
) -> None:
    """Watch a run: its loss, step time, ranks and memory, and the rank that is late."""
    from meshwright.watch.watch_command import watch_in_browser, watch_in_terminal

    if web:
        _refuse(once, "--once", "--web goes on until Ctrl-C")
        watch_in_browser(run, port)
    else:
        watch_in_terminal(run, once=once)


app.add_typer(checkpoint)


def _asked_for(arguments: list[str]) -> typer.Typer:
    """Return the commands with the one alone that is asked for by name: to build all others takes longer than many plans.

    Where no command is named first, as in a request for help, all are there.
    """
    named = [one for one in app.registered_commands if one.callback and arguments[:1] == [one.callback.__name__]]
    if not named:
        return app
    alone = copy.copy(app)
    alone.registered_commands, alone.registered_groups = named, []
    return alone


def main() -> None:
    """Run the command line."""
    run_command(_asked_for(sys.argv[1:]))
