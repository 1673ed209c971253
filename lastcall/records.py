"""Everything on disk: what each column is, where each file lies, and writes that a kill cannot halve.

A run folder:

    study.toml                               the study, comments kept
    lock.jsonl                               lock, amendments, and the ledger of test files
    measured/<checkpoint>/<split>/<book>.parquet      one row a prediction (MEASURED)
    measured/<checkpoint>/<split>/<book>.safetensors  the states beside it
    fitted/<checkpoint>/…                    routers, standardisation, thresholds, training curves
    routed/<checkpoint>/<book>.parquet       one row a scored test prediction, router and seed (ROUTED)
    measured/<checkpoint>/horizon/…, routed/<checkpoint>/horizon/…    the same of the longer blocks, if asked
    judged.json, report.html
    analyses.json                            answers to secondary questions, where the study asks some
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pyarrow as pa
import pyarrow.parquet as pq

from lastcall.errors import OutputError

VERSION = 1
"""Version of every schema here; a reader refuses another."""


@final
@dataclass(frozen=True)
class Column:
    """One column of a record: its Arrow type, its unit and what it means."""

    name: str
    type: pa.DataType
    unit: str
    meaning: str


SCALARS = (
    Column("entropy", pa.float32(), "nats", "entropy of the bypass next-token distribution"),
    Column("top_logprob", pa.float32(), "nats", "its largest log-probability"),
    Column("margin", pa.float32(), "nats", "log-probability margin of its top two tokens"),
    Column("displacement", pa.float32(), "1", "‖s(t) − s(t−1)‖ / ‖s(t−1)‖ of the bypass state"),
    Column("extrapolation_error", pa.float32(), "1", "‖s(t) − (2 s(t−1) − s(t−2))‖ / ‖s(t−1)‖"),
    Column("curvature", pa.float32(), "1", "1 − cos(s(t) − s(t−1), s(t−1) − s(t−2))"),
    Column("error_change", pa.float32(), "1", "e(t) − e(t−1) of the extrapolation error"),
    Column("incoming_displacement", pa.float32(), "1", "displacement of the incoming state h"),
    Column("incoming_extrapolation_error", pa.float32(), "1", "extrapolation error of h"),
    Column("incoming_curvature", pa.float32(), "1", "curvature of h"),
    Column("incoming_error_change", pa.float32(), "1", "error change of h"),
)
"""Scalar features of section 3 but the position, which `position` gives."""

MEASURED = (
    Column("book", pa.string(), "", "book id"),
    Column("block", pa.int16(), "", "block of the book, from 0"),
    Column("start", pa.int32(), "tokens", "token index in the book at which the block begins"),
    Column("position", pa.int32(), "tokens", "t, the prediction's index in its block"),
    Column("token", pa.int32(), "", "id of the token at t, the last one seen"),
    Column("target", pa.int32(), "", "id of the token at t + 1, the one predicted"),
    Column("scored", pa.bool_(), "", "false for the leading predictions that are context only"),
    Column("loss_full", pa.float32(), "nats", "next-token loss of the full branch, ℓ1"),
    Column("loss_bypass", pa.float32(), "nats", "next-token loss of the bypass branch, ℓ0"),
    Column("kl", pa.float32(), "nats", "KL(full ‖ bypass) of the next-token distributions"),
    *SCALARS,
)
"""One row a prediction. `loss_local<w>` (nats) follows for every local window w of the study."""

ROUTED = (
    Column("book", pa.dictionary(pa.int32(), pa.string()), "", "book id"),
    Column("block", pa.int16(), "", "block of the book, from 0"),
    Column("position", pa.int32(), "tokens", "t, the prediction's index in its block"),
    Column("router", pa.dictionary(pa.int32(), pa.string()), "", "router name"),
    Column("seed", pa.int32(), "", "fit seed; 0 for policies without one"),
    Column("score", pa.float32(), "nats", "the router's score: a predicted utility where it is learned"),
    Column("call", pa.bool_(), "", "whether the quota called the operation"),
)
"""One row a scored test prediction, router and seed, ordered by router (as the study lists them), seed,
block and position."""

SOURCE = b"lastcall_source"
"""Schema metadata of a measured file: the digest of everything it was measured from."""

STATES = ("bypass", "incoming")
"""Tensors of a states file, each [block, horizon, d] in the model's own dtype: s(t), and h."""


def local_loss(window: int) -> str:
    """Column name of the local-w branch's loss."""
    return f"loss_local{window}"


def measured_columns(windows: Iterable[int]) -> tuple[Column, ...]:
    """Columns of a measured file of a study with these local windows."""
    local = (
        Column(local_loss(w), pa.float32(), "nats", f"loss of the branch that attends to {w} positions")
        for w in windows
    )
    return (*MEASURED, *local)


@final
@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    root: Path

    @property
    def study(self) -> Path:
        return self.root / "study.toml"

    @property
    def lock(self) -> Path:
        return self.root / "lock.jsonl"

    @property
    def judged(self) -> Path:
        return self.root / "judged.json"

    @property
    def analyses(self) -> Path:
        return self.root / "analyses.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def measured(self, checkpoint: str, split: str, book: str) -> Path:
        return self.root / "measured" / checkpoint / split / f"{book}.parquet"

    def states(self, checkpoint: str, split: str, book: str) -> Path:
        return self.measured(checkpoint, split, book).with_name(f"{book}.safetensors")

    def fitted(self, checkpoint: str) -> Path:
        return self.root / "fitted" / checkpoint

    def fitted_files(self, checkpoint: str) -> list[Path]:
        """Everything fitted on `checkpoint`, in name order; what a kill left half-written is not."""
        return sorted(p for p in self.fitted(checkpoint).glob("*") if not p.name.startswith("."))

    def routed(self, checkpoint: str, book: str, part: str = "test") -> Path:
        folder = self.root / "routed" / checkpoint
        return (folder if part == "test" else folder / part) / f"{book}.parquet"

    def relative(self, path: Path) -> str:
        """`path` as the lock names it: relative to the run folder, with forward slashes."""
        return path.relative_to(self.root).as_posix()


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed onto it where the block succeeds and removed where it fails.

    One that a kill left behind is written over by the next write of `path`.
    Raises OutputError, naming the path and the reason, where the disk refuses.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise _output_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _output_error(path: Path, error: OSError) -> OutputError:
    todo = "free some space and run again" if error.errno == errno.ENOSPC else "choose another --out"
    return OutputError(f"cannot write {path}", got=error.strerror or str(error), todo=todo)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as one atomic step."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as canonical-order, readable JSON; NaN is refused."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False, sort_keys=False) + "\n")


def read_json(path: Path) -> Any:
    """The JSON value in `path`; OutputError where it is missing or torn."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OutputError(f"{path} is missing", todo="run the stage that writes it") from None
    except (OSError, ValueError) as error:
        raise OutputError(
            f"cannot read {path}", got=str(error), todo="run the stage that writes it again"
        ) from None


def write_table(path: Path, columns: Sequence[Column], data: dict[str, Any], source: str = "") -> None:
    """Write `data` (column name to values) as one parquet file ; its schema carries units and `source`."""
    fields = [
        pa.field(c.name, c.type, nullable=False, metadata={"unit": c.unit, "meaning": c.meaning})
        for c in columns
    ]
    schema = pa.schema(fields, metadata={"lastcall_schema": str(VERSION), SOURCE: source})
    table = pa.table({c.name: pa.array(data[c.name], type=c.type) for c in columns}).cast(schema)
    with atomic(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", row_group_size=1 << 20)


def read_tables(paths: Sequence[Path], columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of `paths`, in order; OutputError where one is missing, torn or of another schema version."""
    return pa.concat_tables([_read_table(path, columns) for path in paths], promote_options="default")


def _read_table(path: Path, columns: Sequence[str] | None) -> pa.Table:
    try:
        found = (pq.read_schema(path).metadata or {}).get(b"lastcall_schema", b"?").decode()
        if found != str(VERSION):
            raise OutputError(
                f"{path} has another schema", got=f"version {found}", todo=f"this lastcall reads {VERSION}"
            )
        table = pq.read_table(path, columns=list(columns) if columns is not None else None, partitioning=None)
    except FileNotFoundError:
        raise OutputError(f"{path} is missing", todo="run `lastcall measure` again") from None
    except (OSError, pa.ArrowException) as error:
        raise OutputError(f"cannot read {path}", got=str(error), todo="delete it and measure again") from None
    return table
