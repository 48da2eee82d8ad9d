"""docs/hooks.md cannot drift from the hooks, nor its example from the contract."""

from __future__ import annotations

import inspect
import re
import sys
import types
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from support.fakes import manager_of
from tvr import hookspecs
from tvr.contract import OPS, PROTOCOLS, SPECS, Bounds, RmsNormSpec
from tvr.core.ops import OpTable
from tvr.core.plugin_checks import HOOKS

DOC = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def headed(heading: str) -> str:
    """The text of the section under a heading."""
    _, _, rest = DOC.partition(f"{heading}\n")
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_has_a_section_headed_by_its_signature(name):
    signature = str(inspect.signature(getattr(hookspecs, name))).replace("'", "")
    text = headed(f"### `{name}{signature}`")
    assert text, f"docs/hooks.md needs the heading ### `{name}{signature}`"
    for word in ("**When**", "**Returns**", "```python"):
        assert word in text, f"the section on {name} lacks {word}"
    for argument in HOOKS[name]:
        assert f"`{argument}`" in text, f"the section on {name} does not tell about {argument}"


@pytest.mark.parametrize("op", OPS)
def test_the_section_of_a_bind_hook_tells_the_fields_of_its_spec_and_the_arguments_of_run(op):
    text = DOC.partition(f"### `tvr_bind_{op}(")[2].partition("\n### ")[0]
    for f in fields(SPECS[op]):
        assert f"`{f.name}`" in text
    call = re.search(r"with `run\((.*?)\)`", text).group(1)
    wanted = inspect.signature(PROTOCOLS[op].__call__).parameters
    assert re.findall(r"\w+", re.sub(r"=[\w.]+", "", call)) == list(wanted)[1:]


def test_no_section_is_about_a_hook_that_does_not_exist():
    assert re.findall(r"^### `(tvr_\w+)", DOC, re.MULTILINE) == list(HOOKS)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOC, re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_every_python_example_compiles(code):
    compile(code, "docs/hooks.md", "exec")


def test_every_toml_example_parses():
    assert len(blocks("toml")) >= 2
    for text in blocks("toml"):
        tomllib.loads(text)


@pytest.fixture
def example(monkeypatch):
    """The first python block of the page, as the module that the page says it is."""
    module = types.ModuleType("fast_norm")
    exec(compile(blocks("python")[0], "docs/hooks.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "fast_norm", module)
    return module


def test_the_complete_example_proves_itself_right_as_the_page_says(example, capsys):
    exec(compile(blocks("python")[1], "docs/hooks.md", "exec"), {})
    counts, *failures = capsys.readouterr().out.splitlines()
    assert re.match(r"[1-9]\d* passed, 0 failed, [1-9]\d* skipped$", counts)
    assert not failures


def test_the_complete_example_is_a_backend_that_works(example):
    manager = manager_of(example)
    table = OpTable(manager, manager.device, strict=True)
    bound = table.bind(RmsNormSpec(dtype="float32", hidden_size=64))
    table.allocate(Bounds(max_num_seqs=1, max_num_tokens=1, max_seq_len=1, max_q_len=1))
    x, weight = torch.full((3, 64), 2.0), torch.full((64,), 5.0)
    out = torch.empty(3, 64)
    assert bound.run(x, weight, eps=0.0, out=out) is out
    assert torch.equal(out, torch.full((3, 64), 5.0))
