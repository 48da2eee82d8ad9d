"""Writes the README's table of results from the files that `tvr bench` wrote.

    python tools/results_table.py           # write it
    python tools/results_table.py --check   # exit code 1 if README.md says otherwise

The section stands between two markers, before "Honest limits". Where neither `latency.json` nor
`throughput.json` is there, there is no section. A test keeps README.md and the files equal.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tvr.bench.results import Results, load_results

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results" / "h200"

BEGIN = "<!-- results: made by tools/results_table.py from benchmarks/results -->"
END = "<!-- /results -->"
_SECTION = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}\n\n", re.S)
_NEXT = "## Honest limits\n"

#: Pictures beside the files, and what they show.
PICTURES = {
    "itl.png": "ITL against batch and context, beside the memory's limit",
    "timeline.png": "Steps of 256 requests, prompts first: what host and device did when",
}

#: Where the commands find the models that they name.
WHERE = "In `benchmarks/models`, which has the shapes of these models and no weights:"


def updated(readme: str, results: Path, root: Path = ROOT) -> str:
    """Return `readme` with the section that the files in `results` give, or with none.

    Args:
        readme: its text.
        results: a folder with `latency.json`, `throughput.json`, both or neither.
        root: what links are relative to.

    Raises:
        ConfigError: a file holds no results.
        ValueError: there is no heading to put the section before.
    """
    bare = _SECTION.sub("", readme)
    if bare.count(_NEXT) != 1:
        raise ValueError(f"README.md must have one heading {_NEXT.strip()!r}")
    return bare.replace(_NEXT, section(results, root) + _NEXT)


def section(results: Path, root: Path = ROOT) -> str:
    """Return the section, with its markers; "": there are no files."""
    tables = {"latency.json": _latency, "throughput.json": _throughput}
    files = {name: load_results(results / name) for name in tables if (results / name).exists()}
    if not files:
        return ""
    blocks = [BEGIN, "## Results", *_abouts(list(files.values()))]
    for name, found in files.items():
        blocks += tables[name](found)
    blocks += [
        f"![{title}]({(results / name).relative_to(root).as_posix()})"
        for name, title in PICTURES.items()
        if (results / name).exists()
    ]
    blocks.append(f"`docs/benchmarks.md` says how it was measured. {END}")
    return "\n\n".join(blocks) + "\n\n"


def _abouts(files: Sequence[Results]) -> list[str]:
    """Return on what and how the files were measured; what is the same is said once."""
    hardware = list(dict.fromkeys(_hardware(found.header) for found in files))
    commands = "\n".join(dict.fromkeys(found.header["command"] for found in files))
    return ["\n".join(hardware), f"{WHERE}\n\n```bash\n{commands}\n```"]


def _hardware(header: Mapping[str, Any]) -> str:
    driver = f" (driver {header['driver']})" if header.get("driver") else ""
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    return f"One {header['device_name']}{driver}, {header['date'][:10]}: {versions}."


def _latency(found: Results) -> list[str]:
    """Return a table for each model, its backends side by side."""
    tables = []
    for title, rows in _by_model(found).items():
        backends = list(dict.fromkeys(row["backend"] for row in rows))
        head = ["batch", "prompt", "answer"]
        head += [f"{b} {what}" for b in backends for what in ("TTFT ms", "ITL ms", "tok/s")]
        cells: dict[tuple[int, ...], dict[str, Mapping[str, Any]]] = {}
        for row in rows:
            sizes = (row["batch"], row["input_len"], row["output_len"])
            cells.setdefault(sizes, {})[row["backend"]] = row
        lines = []
        for sizes, of_backend in cells.items():
            line = [f"{size:,}" for size in sizes]
            for backend in backends:
                row = of_backend.get(backend, {})
                line += [_ms(row, "ttft_ms"), _ms(row, "itl_ms"), _rate(row, "tok_s")]
            lines.append(line)
        tables += [f"{title}A batch of equal requests:", _table(head, lines, right=0)]
    return tables


def _throughput(found: Results) -> list[str]:
    """Return a table for each model."""
    tables = []
    for title, rows in _by_model(found).items():
        lines = [
            [row["workload"], row["backend"], _rate(row, "output_tok_s"), _seconds(row)]
            for row in rows
        ]
        head = ["workload", "backend", "new tokens/s", "seconds"]
        tables += [f"{title}All requests at once:", _table(head, lines, right=2)]
    return tables


def _by_model(found: Results) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each model, by what begins the line above their table."""
    by_title: dict[str, list[dict[str, Any]]] = {}
    for row in found.rows.values():
        facts = [row.get("model"), row.get("dtype")]
        if row.get("load_format") == "dummy":
            facts.append("random weights")
        title = ", ".join(fact for fact in facts if fact)
        by_title.setdefault(f"**{title}.** " if title else "", []).append(row)
    return by_title


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], *, right: int) -> str:
    """Return a Markdown table; columns from number `right` on end alike."""
    rule = ["---"] * right + ["---:"] * (len(head) - right)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


def _ms(row: Mapping[str, Any], name: str) -> str:
    return _figure(row, name, lambda ms: f"{ms:,.{2 if ms < 10 else int(ms < 100)}f}")


def _rate(row: Mapping[str, Any], name: str) -> str:
    return _figure(row, name, lambda rate: f"{rate:,.0f}")


def _seconds(row: Mapping[str, Any]) -> str:
    return _figure(row, "seconds", lambda seconds: f"{seconds:.2f}")


def _figure(row: Mapping[str, Any], name: str, show: Any) -> str:  # noqa: ANN401
    if row.get(name) is None:
        return "failed" if "error" in row else "-"
    return str(show(row[name]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, and say if it would")
    options = parser.parse_args(arguments)
    before = README.read_text("utf-8")
    after = updated(before, RESULTS)
    if options.check:
        if before != after:
            print("README.md and benchmarks/results differ; run python tools/results_table.py")
        return int(before != after)
    README.write_text(after, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
