"""How fast a workload is served whose requests all come at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tvr.bench.comparison import says
from tvr.bench.engine_latency import timed
from tvr.bench.engine_model import BenchModel
from tvr.bench.gate_model import ModelGate, gate_lengths
from tvr.bench.model_rows import failed_row, throughput_row

if TYPE_CHECKING:
    from tvr.bench.rows import Row
    from tvr.bench.workload import Workload

MEASURES = ("output_tok_s", "seconds")


class Throughput:
    """Measures a workload on one backend after the other: each has the device to itself.

    Args:
        model: what is measured.
        backends: their names.
        workload: the requests.
        num_iters: how often it is served.

    Raises:
        ConfigError: a request does not fit into the context.
    """

    def __init__(
        self, model: BenchModel, backends: Sequence[str], workload: Workload, *, num_iters: int
    ) -> None:
        model.refuse_longer(f"workload {workload.name!r}", workload.longest)
        self._model = model
        self._backends = backends
        self._workload = workload
        self._num_iters = num_iters

    def rows(self) -> Iterator[list[Row]]:
        """Yield the row of each backend.

        Raises:
            TvrError: the model, or its fp32 reference, cannot be loaded.
        """
        gate = ModelGate(self._model)
        for backend in self._backends:
            fields = {
                "backend": backend,
                **self._model.fields,
                "workload": self._workload.name,
                **self._workload.fields,
            }
            try:
                seconds, facts = self._serve(backend, gate)
                yield [throughput_row(fields, self._workload, seconds, facts)]
            except (Exception, SystemExit) as error:
                yield [failed_row(fields, MEASURES, says(error))]

    def _serve(self, backend: str, gate: ModelGate) -> tuple[list[float], dict[str, Any]]:
        """Return the seconds of each run, and facts for the row."""
        workload = self._workload
        longest = max(workload.longest, sum(gate_lengths(self._model)))
        context = self._model.max_model_len or longest
        llm = self._model.load(backend, context=context)
        try:
            num_running = min(len(workload.prompts), llm.limits.max_num_seqs)
            # Served at its full batch, in prompts of all lengths: that warms up, too.
            facts = gate.facts(llm, backend, num_running)
            seconds = [
                timed(llm, workload.prompts, workload.output_lens) for _ in range(self._num_iters)
            ]
        finally:
            llm.close()
        return seconds, facts
