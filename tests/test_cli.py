"""The command line as a user meets it: exit codes, one clear line, one JSON object last."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lastcall.version import __version__
from tests.little import write_books, write_study
from tests.tiny import save

CODE = "from lastcall.cli import main; main()"
ENVIRONMENT = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}


def lastcall(*arguments: Any, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own."""
    command = [sys.executable, "-c", CODE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=cwd, check=False)


def last(result: subprocess.CompletedProcess[str]) -> Any:
    """The JSON object that ends stdout."""
    return json.loads(result.stdout.splitlines()[-1])


def refused(result: subprocess.CompletedProcess[str], message: str, code: int = 2) -> None:
    """One line on stderr that says `message` (a pattern), nothing on stdout, exit `code`."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("lastcall: ")]
    assert result.returncode == code, result.stderr
    assert len(lines) == 1, result.stderr
    assert re.search(message, lines[0]), lines[0]
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_help_and_version_need_no_torch(tmp_path: Path) -> None:
    """With torch and transformers made impossible to import."""
    code = f"import sys; sys.modules['torch'] = sys.modules['transformers'] = None; {CODE}"
    for arguments in (["--help"], ["run", "--help"], ["check", "--help"], ["--version"]):
        command = [sys.executable, "-c", code, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
        assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == __version__


def test_run_prints_tables_the_page_and_one_json_line(tmp_path: Path) -> None:
    result = lastcall("run", write_study(tmp_path, {"llama": "llama"}), "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    for word in ("oracle", "C_RP3", "planned: llama", "T over B", "every-fifth", "Warning: 4 test clusters"):
        assert word in result.stdout
    assert f"Report: {tmp_path / 'run' / 'report.html'}" in result.stdout
    facts = last(result)
    assert set(facts["verdicts"]) == {f"{c} on llama" for c in ("T over B", "J32 over S32", "J32 over C_RP3")}
    assert Path(facts["report"]).is_file()
    assert Path(facts["judged"]).is_file()
    for stage in (
        "Tokenising books",
        "Loading llama",
        "Measuring llama, fit",
        "Fitting routers",
        "Measuring llama, test",
    ):
        assert stage in result.stderr


def test_each_stage_alone_gives_what_run_gives(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"llama": "llama"})
    lastcall("run", study, "--out", tmp_path / "whole")
    (tmp_path / "staged").mkdir()
    whole, staged = tmp_path / "whole", tmp_path / "staged"
    (staged / "study.toml").write_text((whole / "study.toml").read_text())
    for stage in ("measure", "fit", "lock", "measure", "judge", "report"):
        result = lastcall(stage, "--out", staged)
        assert result.returncode == 0, result.stderr
        assert last(result)["command"] == stage
    for name in ("judged.json", "report.html", "lock.jsonl"):
        assert (staged / name).read_bytes() == (whole / name).read_bytes()


def test_interrupted_is_130_and_resumes(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"llama": "llama"}, routers={"epochs": 60})
    command = [sys.executable, "-c", CODE, "run", str(study), "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        # a job that was itself put in the background ignores SIGINT, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "fitted").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "lastcall: interrupted; the same command goes on from here"
    again = lastcall("run", study, "--out", tmp_path / "run")
    assert again.returncode == 0
    assert "Measuring llama, fit" not in again.stderr


def test_check_passes_and_prints_its_table(tmp_path: Path) -> None:
    result = lastcall("check", save("qwen3_5", tmp_path / "q"), "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert last(result)["passed"] is True
    assert "chunk_gated_delta_rule: torch" in result.stdout
    assert "falling back" not in result.stderr  # transformers' notices
    assert result.stdout.count("│ passed │") == len(last(result)["checks"]) == 7


def test_books_lists_what_there_is_and_what_is_refused(tmp_path: Path) -> None:
    write_books(tmp_path / "books", 3, letters=9000)
    (tmp_path / "books" / "4.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "books" / "5.txt").write_text("short")
    result = lastcall("books", tmp_path / "books")
    assert result.returncode == 0, result.stderr
    assert last(result)["splits"]["all"]["blocks"] == 6
    assert last(result)["exact"] is False
    assert set(last(result)["refused"]) == {"4", "5"}
    assert "refused 5: too short" in result.stdout


def test_bad_usage_is_exit_2() -> None:
    for arguments in (["nonsense"], ["run"], ["fit"], ["check", "x", "--nonsense"]):
        result = lastcall(*arguments)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr


def test_studies_that_are_refused(tmp_path: Path) -> None:
    refused(lastcall("run", "demos"), 'no such study: got "demos"; .* did you mean demo')
    refused(
        lastcall("run", tmp_path / "none.toml"), "cannot read the study file .*none.toml: got No such file"
    )
    (tmp_path / "bad.toml").write_text("name = ")
    refused(lastcall("run", tmp_path / "bad.toml"), "is not TOML: got Invalid value")
    study = write_study(tmp_path, {"llama": "llama"}, quota={"budgt": 0.2})
    refused(
        lastcall("run", study, "--out", tmp_path / "run"), 'unknown key "quota.budgt"; did you mean "budget"'
    )
    for budget, calls in ((0, 0), (1.5, 52)):
        study = write_study(tmp_path, {"llama": "llama"}, quota={"budget": budget})
        refused(
            lastcall("run", study, "--out", tmp_path / "run"), f"gives {calls} calls of 35 scored positions"
        )
    assert not (tmp_path / "run").exists()


BAD_BOOKS = {
    "empty": (b"", r"2\.txt.* empty"),
    "not UTF-8": (b"A book.\xff\xfe" * 40, r"2\.txt.*UTF-8"),
    "binary": (b"A book.\x00" * 40, r"2\.txt.*(binary|NUL)"),
    "too short": (
        b"A short book.",
        "too short for blocks of 41 tokens: got 13 tokens in book 2; a book needs 123",
    ),
}


@pytest.mark.parametrize("kind", BAD_BOOKS)
def test_books_that_are_refused(tmp_path: Path, kind: str) -> None:
    data, message = BAD_BOOKS[kind]
    study = write_study(tmp_path, {"llama": "llama"})
    (tmp_path / "books" / "2.txt").write_bytes(data)
    refused(lastcall("run", study, "--out", tmp_path / "run"), message)
    assert not (tmp_path / "run" / "measured").exists()


def test_sets_of_books_that_are_refused(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"llama": "llama"})
    (tmp_path / "books" / "2.txt").write_bytes((tmp_path / "books" / "1.txt").read_bytes())
    refused(lastcall("run", study, "--out", tmp_path / "run"), "books (1 and 2|2 and 1) have the same text")
    for book in (tmp_path / "books").iterdir():
        book.unlink()
    refused(lastcall("run", study, "--out", tmp_path / "run"), "books")
    write_books(tmp_path / "books", 11)
    refused(
        lastcall("run", study, "--out", tmp_path / "run"), "too few books for counts.test = 4: got 3 left"
    )


def test_models_that_are_refused(tmp_path: Path) -> None:
    refused(lastcall("check", tmp_path / "none"), "no model folder at")
    refused(
        lastcall("check", "package:no_such_package/x.gguf"), "no_such_package is not installed; pip install"
    )
    refused(
        lastcall("check", "random:nothing"), 'no such full-size architecture: got "nothing"; known: smollm2'
    )
    refused(lastcall("check", "nobody/nothing"), "neither a folder here nor a repository on the hub")
    refused(
        lastcall("check", save("mamba", tmp_path / "mamba")),
        'not in the table: got model_type "mamba"; known are',
    )
    refused(lastcall("check", save("llama", tmp_path / "m"), "--dtype", "int8"), "dtype: got 'int8'")
    (tmp_path / "torn.gguf").write_bytes(b"GGUF\x03\x00")
    refused(lastcall("check", tmp_path / "torn.gguf"), "cannot (read|load)")


def test_a_context_smaller_than_the_block_is_refused(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"llama": "llama"}, blocks={"horizon": 129})
    write_books(tmp_path / "books", letters=500)
    message = "llama: its context is shorter than a block: got 128 positions where 129 are needed"
    refused(lastcall("run", study, "--out", tmp_path / "run"), message)


def test_output_folders_that_are_refused(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"llama": "llama"})
    refused(lastcall("fit", "--out", tmp_path / "none"), "is no run folder: it has no study.toml")
    refused(lastcall("run", study, "--out", tmp_path / "books"), "is not empty and is no run folder")
    refused(lastcall("run", study, "--out", study / "run"), "cannot make .*: got Not a directory")
    refused(lastcall("run", study, "--out", "/proc/run"), "cannot make /proc/run: got ")
    lastcall("run", study, "--out", tmp_path / "run")
    other = write_study(tmp_path, {"llama": "llama"}, quota={"budget": 0.4})
    refused(
        lastcall("run", other, "--out", tmp_path / "run"), "belongs to another study: got plan quota budget"
    )


def test_a_broken_lock_is_exit_1(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"llama": "llama"})
    lastcall("run", study, "--out", tmp_path / "run")
    (tmp_path / "books" / "1.txt").write_text((tmp_path / "books" / "1.txt").read_text() + ".")
    result = lastcall("judge", "--out", tmp_path / "run")
    refused(result, "the lock is broken: got book 1 sha256 was", code=1)


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = lastcall("--debug", "fit", "--out", tmp_path / "none")
    assert result.returncode == 2
    assert "Traceback" in result.stderr
