"""docs/cli.md names every command, option and chat command there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from tvr.cli.app import app
from tvr.cli.commands import COMMANDS

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
PROGRAM = typer.main.get_command(app)


def leaves(group, above: str = "") -> dict[str, object]:
    """Return every command by its words: those of a group, as `backend new`, by both."""
    found = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found |= leaves(command, f"{above}{name} ") if inner else {above + name: command}
    return found


LEAVES = leaves(PROGRAM)


def section(title: str) -> str:
    """Return a section of the page, and that of the shared options if it refers to it."""
    text = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    shared = "](#options-of-the-model)" in text
    return text + (section("Options of the model") if shared else "")


def options_of(command) -> set[str]:
    names = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    return {name for name in names if name.startswith("--")}


@pytest.mark.parametrize("name", ["", *LEAVES])
def test_every_option_of_every_command_is_named_and_no_other(name):
    text = section(f"tvr {name}".strip())
    assert f"tvr {name}".strip() in re.search(r"```bash\n(.*?)```", text, re.S).group(1)
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `--")]
    named = set(re.findall(r"--[\w-]+", "".join(rows)))
    assert named == options_of(LEAVES[name] if name else PROGRAM)


def test_every_command_has_a_section():
    sections = re.findall(r"^## tvr (.+)$", PAGE, re.M)
    assert sorted(sections) == sorted(LEAVES)


def test_every_command_of_a_chat_is_named():
    assert re.findall(r"^\| `/(\w+)", PAGE, re.M) == list(COMMANDS)
