"""The study file: TOML in, a validated Study out, and back with its comments kept.

Whatever is wrong with it is one line: the key, what was found, and the nearest known key.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import tomlkit
from pydantic import BaseModel, ValidationError

from lastcall.errors import StudyError
from lastcall.records import write_text
from lastcall.study import Checkpoint, Study


def built_in_studies() -> tuple[str, ...]:
    """Names of the packaged study files, in order."""
    folder = resources.files("lastcall.studies")
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def read_study(source: str | Path) -> Study:
    """The study in a TOML file, or the built-in one of that name.

    Relative paths in a file are resolved against its folder. Raises StudyError where the file is missing,
    is not TOML, has an unknown key (the nearest known one is named) or says something impossible.
    """
    return parse_study(*_locate(source))


def parse_study(text: str, origin: str, folder: Path) -> Study:
    """The study in `text`; `origin` names it in errors, `folder` anchors its relative paths."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise StudyError(f"{origin} is not TOML", got=str(error), todo="mend the line it names") from None
    try:
        return Study.model_validate(_anchored(data, folder))
    except ValidationError as error:
        raise StudyError(f"{origin}: {_explain(error)}") from None


def parse_checkpoint(values: dict[str, Any]) -> Checkpoint:
    """One checkpoint from its keys; StudyError where one is impossible."""
    try:
        return Checkpoint.model_validate(values)
    except ValidationError as error:
        raise StudyError(_explain(error)) from None


def save_study(source: str | Path, study: Study, target: Path) -> None:
    """Write the study file `source` to `target`, comments kept and paths absolute, as one atomic step."""
    text, _, _ = _locate(source)
    document: Any = tomlkit.parse(text)
    books = study.books
    for key, path in (("path", books.path), ("splits_csv", books.splits_csv)):
        if path is not None:
            document["books"][key] = str(path)
    for entry, checkpoint in zip(document["checkpoints"], study.checkpoints, strict=True):
        entry["model"] = checkpoint.model
        if checkpoint.tokenizer is not None:
            entry["tokenizer"] = checkpoint.tokenizer
    write_text(target, tomlkit.dumps(document))


def _locate(source: str | Path) -> tuple[str, str, Path]:
    """Text, display name and anchor folder of a study file or built-in study."""
    path = Path(source)
    if str(source) in built_in_studies():
        text = resources.files("lastcall.studies").joinpath(f"{source}.toml").read_text(encoding="utf-8")
        return text, f"built-in study {source}", Path.cwd()
    if path.suffix == ".toml" or path.is_file():
        try:
            return path.read_text(encoding="utf-8"), str(path), path.resolve().parent
        except (OSError, UnicodeDecodeError) as error:
            raise StudyError(
                f"cannot read the study file {path}", got=_reason(error), todo="check the path"
            ) from None
    near = difflib.get_close_matches(str(source), built_in_studies(), n=1)
    hint = f"did you mean {near[0]}?" if near else f"built-in studies are {', '.join(built_in_studies())}"
    raise StudyError("no such study", got=f'"{source}"', todo=f"give a .toml file or a built-in name; {hint}")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _anchored(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`data` with relative paths made absolute against `folder`."""
    books = data.get("books")
    if isinstance(books, dict):
        for key in ("path", "splits_csv"):
            if isinstance(books.get(key), str):
                books[key] = _absolute(books[key], folder)
    for checkpoint in data["checkpoints"] if isinstance(data.get("checkpoints"), list) else []:
        for key in ("model", "tokenizer"):
            value = checkpoint.get(key) if isinstance(checkpoint, dict) else None
            if not isinstance(value, str) or value == "bytes":
                continue
            if is_local(value) or os.path.exists(folder / value):
                checkpoint[key] = _absolute(value, folder)
            elif os.path.isdir(value):
                checkpoint[key] = _absolute(value, Path.cwd())
    return data


def _absolute(path: str, folder: Path) -> str:
    try:
        return str((folder / Path(path).expanduser()).resolve())
    except (RuntimeError, OSError) as error:
        raise StudyError(f"cannot resolve the path {path}", got=str(error), todo="write it out") from None


def is_local(model: str) -> bool:
    """Whether a model string is written as a path: a `.gguf` file, or with a leading `.`, `/` or `~`."""
    return not model.startswith(("package:", "random:")) and (
        model.endswith(".gguf") or model.startswith((".", "/", "~"))
    )


def _explain(error: ValidationError) -> str:
    """The first problem in one clause; an unknown key comes with the nearest known one."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = _known_keys(first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f'did you mean "{near[0]}"?' if near else f"known keys here: {', '.join(known)}"
        return f'unknown key "{where}"; {hint}'
    if first["type"] == "missing":
        return f'"{where}" is missing; add it'
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where}: got {first['input']!r}; {message[:1].lower()}{message[1:]}"


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """Field names of the section that `location` leads to."""
    section: Any = Study
    for part in location:
        if part in section.model_fields:  # else it is an index, or a key of a dictionary of sections
            section = _section_of(section.model_fields[part].annotation)
    return list(section.model_fields)


def _section_of(annotation: Any) -> Any:
    """The section within a field's type, such as Comparison in `dict[str, tuple[Comparison, ...]] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_of, get_args(annotation))), None)
