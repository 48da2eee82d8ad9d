"""Every block of docs/writing-a-backend.md is run, in order, as a reader would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

import pytest

from tvr.conformance import CHECKS

PAGE = (Path(__file__).parents[2] / "docs" / "writing-a-backend.md").read_text()


class Block(NamedTuple):
    language: str
    text: str
    file: str | None  # named in the line above


BLOCKS = [
    Block(language, text, file or None)
    for file, language, text in re.findall(
        r"(?:^`([^`\n]+)`:\n\n)?^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S
    )
]


@pytest.fixture
def shell(tmp_path):
    """Return how to run a line in an environment of its own, in which all of this one is seen."""
    home = tmp_path / "venv"
    venv.create(home, symlinks=True, with_pip=False)
    scripts = home / "bin"
    (site,) = home.glob("lib/python*/site-packages")
    seen = "; ".join(
        f"site.addsitedir({path!r})" for path in sys.path if path.endswith("-packages")
    )
    (site / "seen.pth").write_text(f"import site; {seen}\n")
    for command in ("pip", "pytest", "tvr"):
        script = scripts / command
        script.write_text(f'#!/bin/sh\nexec "{scripts / "python"}" -m {command} "$@"\n')
        script.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    env = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)

    def run(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line],
            cwd=work,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return work, run


def shape_of(line: str) -> str:
    """Return a line of output without what differs from run to run: numbers and columns."""
    return " ".join(re.sub(r"-?\d[\d.,]*(?:e-?\d+)?", "N", line).split())


@pytest.mark.slow
def test_every_block_runs_and_prints_what_the_page_says(shell):
    work, run = shell
    output = ""
    for block in BLOCKS:
        if block.file is not None:
            (work / block.file).write_text(block.text)
        elif block.language == "text":
            found = {shape_of(line) for line in output.splitlines()}
            for line in block.text.splitlines():
                assert shape_of(line) in found, f"{line!r} was not printed:\n{output}"
        else:
            output = ""
            for line in block.text.splitlines():
                done = run(line)
                output += done.stdout
                wanted = re.search(r"# exit code (\d+)$", line)
                code = int(wanted.group(1)) if wanted else 0
                assert done.returncode == code, f"{line}\n{done.stdout}\n{done.stderr}"


def test_each_block_is_a_file_commands_or_their_output():
    assert len(BLOCKS) == PAGE.count("\n```\n")
    for block in BLOCKS:
        is_file = block.file is not None
        assert is_file == (block.language in ("python", "toml")), block
        assert is_file or block.language in ("bash", "text"), block


def test_each_flag_names_the_checks_that_prove_it():
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (`[^|]+`) \|$", PAGE, re.M)
    named = {flag: re.findall(r"`(\w+)`", checks) for flag, checks in rows}
    known = {}
    for check in CHECKS:
        if check.flag is not None:
            known.setdefault(check.flag, []).append(check.name)
    assert named == known


def test_every_check_that_is_named_exists():
    words = set(re.findall(r"`([a-z]+(?:_[a-z]+){2,})`", PAGE))
    ops_and_flags = {"attention_decode", "attention_prefill", "plan_in_graph"}
    unknown = words - {check.name for check in CHECKS} - ops_and_flags
    assert not unknown
