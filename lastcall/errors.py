"""Everything lastcall raises on purpose.

    LastcallError
    ├── InputError            exit 2: bad usage or bad input
    │   ├── StudyError        the study file
    │   ├── BookError         the books
    │   ├── ModelError        the checkpoint or its tokenizer
    │   │   └── UnknownArchitectureError
    │   ├── NonFiniteError    NaN or infinite logits, named by book and position
    │   └── OutputError       the run folder or its disk
    ├── WorkerError           exit 1: workers died, again and again
    └── CheckError            exit 1: a check failed
        ├── EquivalenceError  the patched model is not the stock model
        └── LockError         a locked thing is missing, changed or not locked yet

Every message is one line that says what is wrong, what was found, and what to do.
"""

from __future__ import annotations


class LastcallError(Exception):
    """The root. `what` is wrong, `got` was found, `todo` mends it; `str()` joins them into one line."""

    exit_code = 1

    def __init__(self, what: str, *, got: str | None = None, todo: str | None = None) -> None:
        parts = [what if got is None else f"{what}: got {got}"]
        parts += [todo] if todo else []
        super().__init__("; ".join(" ".join(part.split()) for part in parts))


class InputError(LastcallError):
    """Bad usage or bad input."""

    exit_code = 2


class StudyError(InputError):
    """The study file is missing, unreadable or says something impossible."""


class BookError(InputError):
    """A book, or the set of books, cannot be used."""


class ModelError(InputError):
    """A checkpoint or its tokenizer is missing, unreadable or unsuitable."""


class UnknownArchitectureError(ModelError):
    """The architecture is not in the table; it is never guessed."""


class NonFiniteError(InputError):
    """A loss or a feature is NaN or infinite."""


class OutputError(InputError):
    """The run folder cannot be written, or belongs to another study."""


class WorkerError(LastcallError):
    """A worker of many died, and so did those in its place."""


class CheckError(LastcallError):
    """A check failed."""


class EquivalenceError(CheckError):
    """The patched model does not reproduce the stock model."""


class LockError(CheckError):
    """The lock is missing, or something it covers has changed."""
