"""lastcall: is the last attention call worth it?

At which positions of a frozen language model is an optional operation worth calling, can a cheap router
tell, does that hold under a fixed causal budget against a fair control, and is it faster when really run?

    judged = lastcall.run("study.toml", out="runs/mine")

runs a whole study; the stages are in `lastcall.pipeline`, the paired intervention in `lastcall.measure`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lastcall.version import __version__

if TYPE_CHECKING:
    from lastcall.progress import Reporter
    from lastcall.results import Judged

__all__ = ["__version__", "run"]


def run(
    study: str | Path,
    out: str | Path,
    reporter: Reporter | None = None,
    *,
    workers: int | None = None,
    cluster: str | None = None,
    trust_remote_code: bool = False,
) -> Judged:
    """Run every stage of `study` (a TOML file or a built-in name) in the folder `out`, or what is left of it.

    Measuring is done in this process, or by `workers` processes on Ray, here or on the cluster at address
    `cluster`. Code that comes with a checkpoint runs only where both the study and `trust_remote_code` say
    so. Returns what judged.json holds (`lastcall.results.Judged`). Silent unless given a reporter, such as
    `lastcall.progress.OnConsole(rich.console.Console())`. Raises `lastcall.errors.LastcallError`.
    """
    from lastcall import pipeline
    from lastcall.workspace import Workspace

    ws = Workspace.create(study, Path(out), reporter, trust_remote_code)
    if workers is not None:
        ws.hire(workers, cluster)
    return pipeline.run(ws)
