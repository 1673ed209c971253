"""Batches over many workers on Ray, one a GPU: on this machine, or on a cluster that runs already.

Ray restarts a worker that died and repeats its batch; a batch that dies RETRIES times more stops the run.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, final

from lastcall.errors import InputError, LastcallError, StudyError, WorkerError
from lastcall.measure.crew import Crew, Job, Ready, Worker
from lastcall.measure.engine import Batch
from lastcall.measure.loading import environment
from lastcall.progress import Reporter
from lastcall.study import Checkpoint

RETRIES = 3
"""Times that a batch whose worker died is done again."""
AHEAD = 2
"""Batches in hand a worker: one on the device, one being written."""
_STORE = 256 * 2**20
"""Bytes of Ray's object store on this machine: it carries tokens and facts, never states."""


@final
class OnRay(Crew):
    """`workers` processes, started when first needed; the run folder is on a file system that all see."""

    def __init__(self, workers: int, address: str | None, reporter: Reporter) -> None:
        """`address`: of a running cluster (`auto`, `HOST:PORT`, `ray://HOST:PORT`); None starts one here."""
        self._count, self._address, self._reporter = workers, address, reporter
        self._ray = _import_ray(local=address is None)
        self._workers: list[Any] = []
        self._processes: dict[int, int] = {}
        self._kind = ""

    def environment(self, checkpoint: Checkpoint) -> dict[str, str]:
        if self._address is None:
            return environment(checkpoint)
        self._start(checkpoint)
        found: dict[str, str] = self._get(self._workers[0].environment.remote(checkpoint))
        return found

    def prepare(self, job: Job) -> Ready:
        self._start(job.checkpoint)
        shared = self._ray.put(job)
        ready: list[Ready] = [self._get(r) for r in [w.prepare.remote(shared) for w in self._workers]]
        for at, one in enumerate(ready):
            self._note(at, one.process)
        different = next((one.facts for one in ready if one.facts != ready[0].facts), None)
        if different is not None:
            key = next(k for k in ready[0].facts if different.get(k) != ready[0].facts[k])
            raise InputError(
                f"the workers of {job.checkpoint.name} differ in {key}",
                got=f"{ready[0].facts[key]} and {different.get(key)}",
                todo="use machines of one kind",
            )
        return ready[0]

    def measure(self, job: Job, pending: Sequence[Batch]) -> Iterator[Batch]:
        shared = self._ray.put(job)
        running: deque[tuple[Batch, int, Any]] = deque()
        waiting = deque(pending)
        for i in range(len(pending)):
            while waiting and len(running) < AHEAD * self._count:
                batch, at = waiting.popleft(), (i + len(running)) % self._count
                running.append((batch, at, self._workers[at].measure.remote(shared, batch)))
            batch, at, result = running.popleft()
            self._note(at, self._get(result))
            yield batch

    def _note(self, worker: int, process: int) -> None:
        """Say so where the process behind a worker is another than before."""
        if self._processes.setdefault(worker, process) != process:
            self._processes[worker] = process
            self._reporter.say(
                f"Worker {worker + 1} died and was replaced; what it had in hand was done again"
            )

    def _get(self, result: Any) -> Any:
        """What a worker gave, or raised; WorkerError where it died too often or cannot run at all."""
        try:
            return self._ray.get(result)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LastcallError):
                raise error.cause from None
            if isinstance(error.cause, self._ray.exceptions.RaySystemError):  # lastcall is not there, mostly
                reason = str(error.cause).strip().splitlines()[-1]
                todo = "install lastcall there as it is here"
                raise InputError("the workers cannot run", got=reason, todo=todo) from error
            raise
        except self._ray.exceptions.RayActorError as error:
            reason = str(error).strip().splitlines()[0]
            todo = "run again with fewer workers, and look at memory; what was measured is kept"
            raise WorkerError(f"a worker died {RETRIES + 1} times", got=reason, todo=todo) from error

    def _start(self, checkpoint: Checkpoint) -> None:
        """Join or start Ray, and create the workers; a named device is refused, for each has its own."""
        if checkpoint.device not in ("auto", "cpu", "cuda"):
            raise StudyError(
                f'{checkpoint.name}: device = "{checkpoint.device}" is one device',
                todo='with several workers give "auto", "cuda" or "cpu"',
            )
        self._join()
        kind = "CPU" if checkpoint.device == "cpu" or not self._has("GPU") else "GPU"
        if self._workers and kind == self._kind:
            return
        for worker in self._workers:
            self._ray.kill(worker)
        self._kind, self._processes = kind, {}
        if self._has(kind) < self._count:
            raise InputError(
                f"{self._count} workers need {self._count} {kind}s",
                got=f"{self._has(kind):g} in all",
                todo="lower --workers",
            )
        create = self._ray.remote(Worker).options(
            **{f"num_{kind.lower()}s": 1},
            max_restarts=-1,
            max_task_retries=RETRIES,
            max_concurrency=AHEAD,
        )
        self._workers = [create.remote() for _ in range(self._count)]

    def _join(self) -> None:
        if self._ray.is_initialized():
            return
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._address is not None:
            try:
                _require_answer(self._address)
                self._ray.init(address=self._address, **quiet)
            except Exception as error:  # Ray raises many kinds, by what is wrong with the address
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                what = f'no Ray cluster could be joined at "{self._address}"'
                raise InputError(what, got=reason, todo="start one, or leave --cluster out") from error
            return
        self._ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, self._count),
            include_dashboard=False,
            object_store_memory=_STORE,
            **quiet,
        )

    def _has(self, kind: str) -> float:
        found: float = self._ray.cluster_resources().get(kind, 0.0)
        return found


def _require_answer(address: str) -> None:
    """OSError where nothing listens at `address`; Ray itself would try for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def _import_ray(*, local: bool) -> Any:
    """Ray, told before it is imported to report nothing and, where it is for this machine alone, to listen on
    the loopback only (the switch it has for systems whose firewall would ask)."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # the first one is raised by us
    if local:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ImportError:
        raise InputError("several workers need Ray", todo="pip install 'lastcall[ray]'") from None
    return ray
