"""docs/conformance.md lists every planted fault with the check that catches it."""

from __future__ import annotations

from pathlib import Path

from support.faults import FAULTS
from support.faults_contract import CONTRACT_FAULTS, GPU_FAULTS, GRAPH_FAULTS
from support.faults_engine import ENGINE_FAULTS

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
START, END = "<!-- mutations -->\n", "<!-- /mutations -->\n"

#: Each is proven by a test that plants the fault and runs the check; those of a GPU on a GPU.
ALL = {
    "in an op": FAULTS,
    "around a run": CONTRACT_FAULTS,
    "with CUDA graphs": GRAPH_FAULTS,
    "on a GPU": GPU_FAULTS,
    "in a model": ENGINE_FAULTS,
}


def table():
    lines = ["| fault | planted in | caught by | level |", "| --- | --- | --- | --- |"]
    for where, faults in ALL.items():
        for fault in sorted(faults, key=lambda fault: (fault.check, fault.op, fault.name)):
            place = f"`{fault.op}`" + f", {where}" * (where != "in an op")
            said = fault.name.replace("_", " ").strip()
            lines.append(f"| {said} | {place} | `{fault.check}` | {fault.level} |")
    return "".join(f"{line}\n" for line in lines)


def test_the_page_lists_every_planted_fault_and_what_caught_it():
    _, start, rest = PAGE.read_text().partition(START)
    listed, end, _ = rest.partition(END)
    assert start, f"{PAGE.name} has no line {START!r}"
    assert end, f"{PAGE.name} has no line {END!r}"
    right = f"\n{table()}\n"
    assert listed == right, f"put this between {START.strip()} and {END.strip()}:\n{right}"


def test_no_fault_is_planted_twice():
    every = [(f.check, f.op, f.name) for faults in ALL.values() for f in faults]
    assert len(every) == len(set(every))
