"""The command line: parse, call one function, print. Imports are lazy, so that --help needs no torch.

Every command ends stdout with one JSON object on one line; tables are on stdout, progress on stderr.
Exit 0: done. 1: a check failed or a lock was broken. 2: bad usage or bad input. 130: interrupted.
"""

from __future__ import annotations

import math
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import typer
from rich.console import Console
from typer.core import TyperGroup

from lastcall.errors import CheckError, LastcallError, StudyError
from lastcall.printing import last_line
from lastcall.version import __version__

if TYPE_CHECKING:
    from lastcall.workspace import Workspace

_debug = False


@final
class _Commands(TyperGroup):
    """Commands whose errors made on purpose are one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (LastcallError, KeyboardInterrupt) as error:
            if _debug:
                traceback.print_exc()
            interrupted = "interrupted; the same command goes on from here"
            print(f"lastcall: {str(error) or interrupted}", file=sys.stderr)
            raise typer.Exit(error.exit_code if isinstance(error, LastcallError) else 130) from None


app = typer.Typer(
    name="lastcall",
    help="Is the last attention call worth it? An honest instrument for optional operations.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    cls=_Commands,
)

Out = Annotated[Path, typer.Option("--out", help="The run folder.")]
Trust = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Let code run that comes with a checkpoint, if the study asks."),
]
Code = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python code that comes with the model: it can do whatever you can."
    ),
]
Pickle = Annotated[
    bool,
    typer.Option(
        "--pickle-may-run-code",
        help="Read pickled weights where there are no safetensors: a pickle can run any code as you.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(help="Measure with so many processes, one a GPU, on Ray; in this process without.", min=1),
]
Cluster = Annotated[
    str | None,
    typer.Option(help="Address of the Ray cluster the workers are on: auto, HOST:PORT or ray://HOST:PORT."),
]


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Options of every command."""
    global _debug
    _debug = debug


@app.command()
def run(
    study: Annotated[str, typer.Argument(help="A study file (TOML), or the name of a built-in study.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The run folder; runs/<study> by default.")
    ] = None,
    workers: Workers = None,
    cluster: Cluster = None,
    trust_remote_code: Trust = False,
) -> None:
    """All stages of a study: measure, fit, lock, measure the test split, judge, report. Resumes."""
    from lastcall import pipeline
    from lastcall.analysing import current_answers
    from lastcall.printing import print_judged
    from lastcall.study_file import read_study
    from lastcall.workspace import Workspace

    folder = out or Path("runs") / read_study(study).name
    ws = Workspace.create(study, folder, _reporter(), trust_remote_code)
    _hire(ws, workers, cluster)
    judged = pipeline.run(ws)
    print_judged("run", ws, judged, current_answers(ws))


@app.command()
def demo(out: Annotated[Path, typer.Option("--out", help="The run folder.")] = Path("runs/demo")) -> None:
    """The built-in demonstration: a small model and presidents' messages, on the CPU, in minutes."""
    run("demo", out)


@app.command()
def measure(
    out: Out,
    study: Annotated[
        str | None, typer.Argument(help="A study to begin in the run folder, where it holds none yet.")
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(help="fit, calibration or test; by default the first two, and test once locked."),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(help="i/n: only every n-th batch, from the i-th on; the shards may run side by side."),
    ] = None,
    workers: Workers = None,
    cluster: Cluster = None,
    trust_remote_code: Trust = False,
) -> None:
    """Measure the books: losses of every branch, features and states."""
    from lastcall import lock as locking
    from lastcall import pipeline
    from lastcall.holding import Shard
    from lastcall.study import SPLITS
    from lastcall.workspace import Workspace

    if unknown := set(split or ()) - set(SPLITS):
        raise StudyError(
            "no such split", got=", ".join(sorted(unknown)), todo=f"choose of {', '.join(SPLITS)}"
        )
    part = None if shard is None else Shard.parse(shard)
    ws = (
        Workspace.create(study, out, _reporter(), trust_remote_code)
        if study is not None
        else _open(out, trust_remote_code)
    )
    _hire(ws, workers, cluster)
    locked = bool(locking.read(ws.run.lock).locks)
    chosen = [s for s in SPLITS if (s in split if split else s != "test" or locked)]
    pipeline.measure(ws, chosen, part)
    last_line("measure", out, splits=chosen, **({} if shard is None else {"shard": shard}))


@app.command()
def fit(out: Out, trust_remote_code: Trust = False) -> None:
    """Fit every router on the fit split and cut its threshold on the calibration split."""
    from lastcall import pipeline

    ws = _open(out, trust_remote_code)
    pipeline.fit(ws)
    last_line("fit", out, checkpoints=[c.name for c in ws.study.checkpoints])


@app.command()
def lock(
    out: Out,
    amend: Annotated[str | None, typer.Option(help="Why a locked thing changed; shown for ever.")] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Lock plan, checkpoints, books, routers and thresholds, before any test utility exists."""
    from lastcall import pipeline

    last_line("lock", out, lock=pipeline.lock(_open(out, trust_remote_code), amend))


@app.command()
def judge(out: Out) -> None:
    """Judge the locked comparisons from the records. Needs no torch."""
    from lastcall.judging import judge as judge_records
    from lastcall.printing import print_judged

    ws = _open(out)
    with ws.alone():
        judged = judge_records(ws)
    print_judged("judge", ws, judged)


@app.command()
def power(out: Out, trust_remote_code: Trust = False) -> None:
    """The smallest differences the planned comparisons can show, from fit and calibration books alone."""
    from lastcall import pipeline
    from lastcall.printing import print_power

    rows = pipeline.power(_open(out, trust_remote_code))
    print_power(rows)
    last_line("power", out, comparisons=rows)


@app.command()
def analyse(out: Out) -> None:
    """Answer the study's secondary questions. Needs torch, but neither the books nor the weights."""
    from lastcall import pipeline
    from lastcall.analysing import asked_of
    from lastcall.printing import print_answers

    ws = _open(out)
    answers = pipeline.analyse(ws)
    print_answers(answers)
    where = None if answers is None else str(ws.run.analyses)
    last_line("analyse", out, analyses=where, sections=asked_of(ws))


@app.command()
def report(out: Out) -> None:
    """Draw report.html from judged.json."""
    from lastcall import pipeline

    ws = _open(out)
    pipeline.report(ws)
    print(f"Report: {ws.run.report}")
    last_line("report", out, report=str(ws.run.report))


@app.command()
def check(
    model: Annotated[
        str, typer.Argument(help="Hub id, folder, .gguf file, package:NAME/FILE or random:NAME.")
    ],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    attention: Annotated[str, typer.Option(help="sdpa or eager.")] = "sdpa",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Commit of a hub repository.")] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the random tokens it is checked on.", min=0, max=2**31 - 1)
    ] = 0,
    pickle_may_run_code: Pickle = False,
    trust_remote_code: Code = False,
) -> None:
    """Check that a patched model is its stock self; exit 1 where it is not."""
    from lastcall.measure.checking import check_checkpoint
    from lastcall.printing import print_checks
    from lastcall.study_file import parse_checkpoint

    values = {"dtype": dtype, "attention": attention, "device": device, "revision": revision}
    risks = {"pickle_may_run_code": pickle_may_run_code, "trust_remote_code": trust_remote_code}
    checkpoint = parse_checkpoint({"name": "model", "model": model, **values, **risks})
    facts, checks = check_checkpoint(checkpoint, seed, _reporter())
    print_checks(model, facts, checks)
    failed = [c.name for c in checks if not c.passed]
    found = {c.name: c.found if math.isfinite(c.found) else None for c in checks}
    last_line("check", None, model=model, passed=not failed, checks=found)
    if failed:
        raise CheckError(f"{model} fails {len(failed)} of {len(checks)} checks", got="; ".join(failed))


@app.command()
def books(
    folder: Annotated[Path, typer.Argument(help="A folder of .txt files, or one in PG-19's layout.")],
    model: Annotated[str | None, typer.Option(help="Count tokens with this model's tokenizer.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Its tokenizer, where it is elsewhere.")] = None,
    horizon: Annotated[int, typer.Option(help="Predictions a block.", min=18)] = 512,
    pickle_may_run_code: Pickle = False,
    trust_remote_code: Code = False,
) -> None:
    """What a folder of books would give: splits, blocks and refusals."""
    from lastcall.measure.describe import describe_folder
    from lastcall.printing import print_books
    from lastcall.study import Blocks
    from lastcall.study_file import parse_checkpoint

    tokenize = None
    if model is not None or tokenizer is not None:
        from lastcall.measure.loading import load_tokenizer

        values = {"name": "model", "model": model or "random:", "tokenizer": tokenizer}
        risks = {"pickle_may_run_code": pickle_may_run_code, "trust_remote_code": trust_remote_code}
        tokenize = load_tokenizer(parse_checkpoint({**values, **risks})).tokenize
    summary = describe_folder(folder, tokenize, Blocks(horizon=horizon))
    print_books(summary)
    splits = {s.name: {"books": s.books, "tokens": s.tokens, "blocks": s.blocks} for s in summary.splits}
    refused = {one.id: one.reason for one in summary.refused}
    last_line("books", None, folder=str(folder), exact=summary.exact, splits=splits, refused=refused)


@app.command()
def plan(
    study: Annotated[str, typer.Argument(help="A study file (TOML), or the name of a built-in study.")],
    workers: Annotated[
        int, typer.Option(help="Workers that share the measuring, each on a device of its own.", min=1)
    ] = 1,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Plan for GPUs whose matrix product, in the checkpoint's type, runs at so many TFLOP/s."
        ),
    ] = None,
) -> None:
    """What a study will cost, and what would stop it, before anything runs."""
    from dataclasses import asdict

    from lastcall import planning
    from lastcall.study_file import read_study

    found = planning.plan(read_study(study), workers=workers, rate=rate, reporter=_reporter())
    console = Console()
    for table in planning.tables(found):
        console.print(table)
    for sentence in planning.sentences(found):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    last_line("plan", None, **asdict(found))


def main() -> None:
    """Entry point."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of other libraries; ours say how long it takes
    app()


def _reporter() -> Any:
    from lastcall.progress import OnConsole

    return OnConsole(Console(stderr=True))


def _open(out: Path, trust_remote_code: bool = False) -> Workspace:
    from lastcall.workspace import Workspace

    return Workspace.open(out, _reporter(), trust_remote_code)


def _hire(ws: Workspace, workers: int | None, cluster: str | None) -> None:
    """Let other processes measure where that is asked for."""
    if cluster is not None and workers is None:
        raise StudyError("--cluster without --workers", todo="say how many workers it may give, one a GPU")
    if workers is not None:
        ws.hire(workers, cluster)
