"""Progress bars: for people at a terminal, and for nobody else."""

from __future__ import annotations

import io
import logging
import time
from contextlib import redirect_stderr

import pytest

from support.cli import run_here
from tvr.cli import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def load(report):
    for done in (1, 2, 3):
        report(done * 10**9, 3 * 10**9)


def test_a_long_load_shows_how_far_it_is(terminal, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with redirect_stderr(terminal), progress.loading_bar() as report:
        load(report)
    assert "loading" in terminal.getvalue()
    assert "3.0/3.0 GB" in terminal.getvalue()


def test_a_long_load_shows_which_kernels_are_compiled(terminal, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    log = logging.getLogger("tvr.backends.some")
    with redirect_stderr(terminal), progress.loading_bar():
        log.info("compiling %s", "rope_bf16")
        time.sleep(0.2)  # the bar is drawn ten times a second
    assert "compiling rope_bf16" in terminal.getvalue()
    assert not logging.getLogger("tvr").handlers
    assert not log.isEnabledFor(logging.INFO)


def test_a_short_load_shows_nothing(terminal):
    with redirect_stderr(terminal), progress.loading_bar() as report:
        load(report)
    assert terminal.getvalue() == ""


def test_a_bar_is_taken_away_when_the_load_fails(terminal, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)

    def load_half() -> None:
        with progress.loading_bar() as report:
            report(1, 2)
            raise ValueError("damaged")

    with redirect_stderr(terminal), pytest.raises(ValueError, match="damaged"):
        load_half()
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is erased


def test_a_batch_shows_lines_and_speed(terminal):
    with redirect_stderr(terminal), progress.batch_bar(total=4, done=1) as report:
        report(4, 100)
    assert "4/4" in terminal.getvalue()
    assert "tokens/s" in terminal.getvalue()


def test_where_no_terminal_is_there_is_no_bar(tmp_path):
    with redirect_stderr(io.StringIO()) as stream:
        with progress.loading_bar() as report:
            assert report is None
        with progress.batch_bar(2, 0) as report_lines:
            report_lines(2, 5)
    assert stream.getvalue() == ""
    prompts = tmp_path / "in.txt"
    prompts.write_text("ROMEO:\n")
    assert run_here("run", "--input", prompts, "--max-tokens", 2).stderr == ""
