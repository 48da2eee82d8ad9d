"""A third-party backend package: its names, its files, and writing it in one piece."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from tvr.contract import ABI_MAJOR, ABI_MINOR, ENTRY_POINT_GROUP, OPS, SPECS, BackendInfo
from tvr.errors import ConfigError

_LINE_LENGTH = 88

#: Words that mean something else where the name of a backend or an op may stand.
_RESERVED = {"all": "every op", "auto": "the configured order", "engine": "the suite's model"}

#: Names of a template -> where it goes in the package; `$module` is the import package.
_TEMPLATES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "bench.py": "bench.py",
    "init.py": "$module/__init__.py",
    "plugin.py": "$module/plugin.py",
    "ops_init.py": "$module/ops/__init__.py",
    "test_conformance.py": "tests/test_conformance.py",
}


@dataclass(frozen=True)
class Package:
    """A package with one backend.

    Attributes:
        name: name of the backend.
        ops: ops it serves, in the order of the contract.

    Raises:
        PluginError: `name` is no name of a backend.
        ConfigError: `name` cannot be the end of a package's name; no op, an unknown op, or one
            given twice.
    """

    name: str
    ops: tuple[str, ...]

    def __post_init__(self) -> None:
        BackendInfo(name=self.name, abi=(ABI_MAJOR, ABI_MINOR))  # the rules for a name are its own
        if not self.name[-1].isalnum():
            raise ConfigError(
                f"backend name {self.name!r} ends in {self.name[-1]!r}; a package's name must end "
                "in a letter or digit"
            )
        if re.search("[-_.]{2}", self.name):
            raise ConfigError(
                f"backend name {self.name!r} has two of '-', '_' and '.' in a row; a package's "
                "name must have letters or digits between them"
            )
        if self.name in _RESERVED:
            raise ConfigError(
                f"backend name {self.name!r} means {_RESERVED[self.name]}; take another"
            )
        _check_ops(self.ops)
        object.__setattr__(self, "ops", tuple(op for op in OPS if op in self.ops))

    @property
    def distribution(self) -> str:
        """What pip calls it, and the name of its folder."""
        return f"tvr-{self.name}"

    @property
    def module(self) -> str:
        """What Python calls it."""
        return f"tvr_{re.sub('[-.]', '_', self.name)}"

    def files(self) -> dict[str, str]:
        """Return path -> text of every file, paths relative to the package's folder."""
        names = self._names()
        room = resources.files("tvr.scaffold")
        files = {}
        for file, path in _TEMPLATES.items():
            text = (room / "templates" / f"{file}.template").read_text(encoding="utf-8")
            files[Template(path).substitute(names)] = Template(text).substitute(names)
        waiting = list(self.ops)
        while waiting:  # an op may call others, as rope_kv_write does
            op = waiting.pop()
            text = (room / "ops" / f"{op}.py").read_text(encoding="utf-8")
            files[f"{self.module}/ops/{op}.py"] = text.replace("tvr.scaffold", self.module)
            waiting += _ops_called(text)
        return files

    def write(self, parent: Path) -> Path:
        """Write the package into a new folder of `parent` and return it; all of it or nothing.

        Raises:
            ConfigError: `parent` is no folder, or it holds something of that name.
        """
        folder = parent / self.distribution
        if not parent.is_dir():
            raise ConfigError(f"{parent} is not a folder; make it first")
        if folder.exists() or folder.is_symlink():
            raise ConfigError(f"{folder} exists; take another name or --dir, or remove it")
        with tempfile.TemporaryDirectory(prefix=".tvr-new-", dir=parent) as unfinished:
            # A folder in it, since the temporary one can be read by its owner only.
            draft = Path(unfinished) / self.distribution
            for path, text in self.files().items():
                (draft / path).parent.mkdir(parents=True, exist_ok=True)
                (draft / path).write_text(text, encoding="utf-8")
            draft.rename(folder)
        return folder

    def _names(self) -> dict[str, str]:
        """Return what stands for each `$name` of a template."""
        spec_names = {op: SPECS[op].__name__ for op in self.ops}
        contract = ["BackendInfo", "BoundOp", "DeviceFacts", "why_not", *spec_names.values()]
        hooks = [Template(_HOOK).substitute(op=op, spec=spec) for op, spec in spec_names.items()]
        return {
            "name": self.name,
            "distribution": self.distribution,
            "module": self.module,
            "group": ENTRY_POINT_GROUP,
            "abi": f"({ABI_MAJOR}, {ABI_MINOR})",
            "ops": ", ".join(f"`{op}`" for op in self.ops),
            "op_files": _op_files(self.module, self.ops),
            "import_contract": _import("tvr.contract", sorted(contract, key=_isort_key)),
            "import_ops": _import(f"{self.module}.ops", sorted(self.ops)),
            "boxes": "\n".join(f'        "{op}": {op}.BOXES,' for op in self.ops),
            "hooks": "".join(hooks).rstrip(),
        }


_HOOK = '''

@hookimpl
def tvr_bind_$op(spec: $spec, device: DeviceFacts) -> BoundOp | None:
    """Bind what INFO declares; None: not me."""
    return None if why_not(INFO, spec, device) else $op.bind(spec)
'''


def _check_ops(ops: Sequence[str]) -> None:
    known = f"ops: {', '.join(OPS)}"
    if not ops:
        raise ConfigError(f"no op given; {known}")
    for op in ops:
        if op not in OPS:
            raise ConfigError(f"{op!r} is not an op; {known}")
        if ops.count(op) > 1:
            raise ConfigError(f"op {op} is given twice")


def _op_files(module: str, ops: Sequence[str]) -> str:
    """Return where the kernels go: a sentence, or one with a list in Markdown."""
    if len(ops) == 1:
        return f"Put your kernel into `{module}/ops/{ops[0]}.py`."
    files = [f"   - `{module}/ops/{op}.py`" for op in ops]
    return "\n".join(["Put your kernels into these files, one op each:", "", *files, ""])


def _ops_called(text: str) -> list[str]:
    """Return the ops that an op's source imports."""
    lines = re.findall(r"^from tvr\.scaffold\.ops import (.+)$", text, re.M)
    return [op for line in lines for op in line.split(", ")]


def _import(module: str, names: Sequence[str]) -> str:
    """Return an import statement, one name a line if it is long."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= _LINE_LENGTH:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])


def _isort_key(name: str) -> tuple[bool, str]:
    """Classes before functions, as import sorters have it."""
    return name.islower(), name
