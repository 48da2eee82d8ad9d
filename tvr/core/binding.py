"""Who serves an op: the rank rule, asked and answered once per spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tvr.contract import BoundOp, DeviceFacts, OpSpec, check_bound, declared_flags, why_not
from tvr.core.backend import Backend
from tvr.core.composites import compose
from tvr.core.plugin_checks import BIND, describe
from tvr.core.plugins import BackendManager
from tvr.core.streams import on_stream
from tvr.errors import BackendUnavailable, PluginError, UnsupportedSpec

#: Composites that a model takes whole or not at all, to save launches: less than a graph saves.
_OPTIONAL = frozenset({"fused_linear"})

_UNCAPTURED = (
    "it is not declared cuda_graph and its parts are, so with it steps could not be CUDA graphs"
)


class PassedOver(NamedTuple):
    """A backend that might have served an op, and why it does not."""

    op: str
    backend: str
    reasons: list[str]


@dataclass(frozen=True)
class Binding:
    """The settled answer for one spec.

    Attributes:
        bound: what the model calls.
        backend: name of the backend that serves it; of a composed op, those of its parts.
        flags: what is declared for it; of a composed op, what is declared for all its parts.
        passed_over: backends that might have served it, and why they do not.
        parts: of a composed op, the bindings it calls.
    """

    spec: OpSpec
    bound: BoundOp
    backend: str
    flags: frozenset[str]
    passed_over: list[PassedOver]
    parts: tuple[Binding, ...] = ()


class Refusal(NamedTuple):
    reasons: list[str]
    error: BaseException | None = None


class Binder:
    """Asks the backends for specs, each backend at most once for each spec.

    Args:
        strict: ask only the best-ranked backend.
        first: name of a backend to rank before all others, or None.
        graphs: whether steps may be CUDA graphs. A backend whose `fused_linear` cannot be captured
            is then passed over where its parts can: it would cost all decodes their graphs.

    Attributes:
        stream: the stream of the best-ranked backend that can launch on its own only, or None.
        left_out: what was passed over for that.

    Raises:
        BackendUnavailable: `first` cannot be used; the message says why.
    """

    def __init__(
        self,
        manager: BackendManager,
        device: DeviceFacts,
        *,
        strict: bool,
        first: str | None,
        graphs: bool = False,
    ) -> None:
        if first is not None:
            manager.require(first)
        self._manager = manager
        self._device = device
        self._strict = strict
        self._first = first
        self._graphs = graphs
        self.left_out: dict[tuple[str, OpSpec], PassedOver] = {}
        self._pins = manager.config.pins
        self._ranked = manager.ranked(first)
        self._answers: dict[tuple[str, OpSpec], BoundOp | Refusal] = {}
        self._settled: dict[OpSpec, Binding] = {}
        self._why_composed: dict[OpSpec, str] = {}
        self._stateful: list[BoundOp] = []  # those with a plan or a workspace

        pinned = [manager.known[name] for name in self._pins.values()]
        askable = {b.name: b for b in [*self._ranked, *pinned] if not b.why_not_used()}
        self._streams = {name: self._ask_stream(b) for name, b in askable.items()}
        refusal = self._streams.get(first or "")
        if isinstance(refusal, Refusal):
            raise BackendUnavailable(
                f"backend {first!r} cannot be used: {'; '.join(refusal.reasons)}"
            ) from refusal.error
        offers = [s for s in self._streams.values() if not isinstance(s, Refusal)]
        self.stream = next((stream for stream in offers if stream is not None), None)

    def settle(self, spec: OpSpec) -> Binding:
        """Return the binding of `spec`.

        Raises:
            UnsupportedSpec: nobody that may serve it does; the message has each one's reasons.
        """
        if spec not in self._settled:
            self._settled[spec] = self._decide(spec)
        return self._settled[spec]

    def serves_whole(self, spec: OpSpec, instead_of: OpSpec) -> bool:
        """Return whether one backend serves `spec`, ranked no lower than any of `instead_of`.

        Raises:
            UnsupportedSpec: the one that `spec` is pinned to does not serve it.
        """
        try:
            whole, other = self.settle(spec), self.settle(instead_of)
        except UnsupportedSpec:
            if spec.op in self._pins:
                raise
            return False
        return not whole.parts and self._rank(whole) <= self._rank(other)

    def explain(self, spec: OpSpec) -> dict[str, Any]:
        """Return who serves `spec` and why others do not; see `OpTable.explain_ops`."""
        served_by, error = None, None
        parts: tuple[Binding, ...] = ()
        servers: set[str] = set()
        try:
            binding = self.settle(spec)
        except UnsupportedSpec as e:
            error = str(e)
        else:
            served_by, parts = binding.backend, binding.parts
            servers = {part.backend for part in parts or (binding,)}

        def status(name: str, reasons: list[str]) -> str:
            if name in servers:
                return "serves a part" if parts else "serves"
            return "passed over" if reasons else "not asked"

        rows = [(b.name, self._reasons(b, spec)) for b in self._candidates(spec)]
        return {
            "op": spec.op,
            "spec": str(spec),
            "served_by": served_by,
            "error": error,
            "backends": [
                {"name": name, "status": status(name, reasons), "reasons": reasons}
                for name, reasons in rows
            ],
            "parts": [self.explain(part.spec) for part in parts],
        }

    def _decide(self, spec: OpSpec) -> Binding:
        """Find who serves `spec`.

        A composite is served whole only by a backend ranked no lower than the best-ranked binder
        of any of its parts. Going down the ranks, that is: whoever first binds the whole or any
        part decides. A pinned part outranks every whole that is not itself pinned.
        """
        pin = self._pins.get(spec.op)
        parts = spec.parts() if pin is None else ()
        for part in parts:
            if part.op in self._pins:
                return self._composed(spec, parts, f"{part.op} is pinned to {self._pins[part.op]}")
        asked = self._ranked[:1] if self._strict else self._ranked
        for backend in asked if pin is None else [self._manager.known[pin]]:
            answer = self._ask(backend, spec)
            if isinstance(answer, BoundOp):
                flags = declared_flags(backend.info, spec, self._device)
                if "cuda_graph" in flags or not self._are_captured(spec, parts):
                    return Binding(spec, answer, backend.name, flags, self._passed_over(spec))
                passed = PassedOver(spec.op, backend.name, [_UNCAPTURED])
                self.left_out[backend.name, spec] = passed
            for part in parts:
                if isinstance(self._ask(backend, part), BoundOp):
                    why = f"{backend.name}, which ranks higher, serves {part.op}"
                    return self._composed(spec, parts, why)
        raise self._unsupported(spec)

    def _are_captured(self, spec: OpSpec, parts: tuple[OpSpec, ...]) -> bool:
        """Return whether graphs can have the parts of an optional composite in its place."""
        if not self._graphs or spec.op not in _OPTIONAL or not parts:
            return False
        try:
            return all("cuda_graph" in self.settle(part).flags for part in parts)
        except UnsupportedSpec:
            return False

    def _rank(self, binding: Binding) -> int:
        """Return the place of the best-ranked backend that has a share in `binding`."""
        names = [backend.name for backend in self._ranked]
        return min(
            -1 if part.spec.op in self._pins else names.index(part.backend)
            for part in binding.parts or (binding,)
        )

    def _composed(self, spec: OpSpec, specs: tuple[OpSpec, ...], why: str) -> Binding:
        self._why_composed[spec] = f"{spec.op} is composed of its parts, since {why}"
        parts = tuple(self.settle(part) for part in specs)
        servers = {part.backend for part in parts}
        return Binding(
            spec,
            compose(spec, [part.bound for part in parts]),
            " + ".join(part.backend for part in parts),
            frozenset.intersection(*(part.flags for part in parts)),
            [passed for passed in self._passed_over(spec) if servers != {passed.backend}],
            parts,
        )

    def _ask(self, backend: Backend, spec: OpSpec) -> BoundOp | Refusal:
        """Ask `backend` for `spec`: once, whatever comes of it."""
        key = (backend.name, spec)
        if key not in self._answers:
            self._answers[key] = self._ask_once(backend, spec)
        return self._answers[key]

    def _ask_once(self, backend: Backend, spec: OpSpec) -> BoundOp | Refusal:
        reasons = backend.why_not_used() or why_not(backend.info, spec, self._device)
        if reasons:
            return Refusal(reasons)
        stream = self._streams[backend.name]
        if isinstance(stream, Refusal):
            return stream
        try:
            bound = backend.call(BIND + spec.op, spec=spec, device=self._device)
        except (Exception, SystemExit) as e:
            return Refusal([f"{BIND}{spec.op} raised {describe(e)}"], e)
        if bound is None:
            return Refusal([f"declares support, but {BIND}{spec.op} returned None"])
        try:
            check_bound(spec.op, bound)
        except PluginError as e:
            return Refusal([describe(e)], e)
        if bound.plan is not None or bound.attach is not None:
            if any(bound is other for other in self._stateful):
                return Refusal(
                    [
                        f"{BIND}{spec.op} returned one BoundOp for two specs; one with a plan or a "
                        "workspace must be new for each"
                    ]
                )
            self._stateful.append(bound)
        return bound if stream in (None, self.stream) else on_stream(bound, stream)

    def _ask_stream(self, backend: Backend) -> Any:  # noqa: ANN401
        """Return the stream `backend` has to launch on, None, or why it cannot be used."""
        if self._device.type == "cpu":
            return None
        try:
            stream = backend.call("tvr_stream", device=self._device)
        except (Exception, SystemExit) as e:
            return Refusal([f"tvr_stream raised {describe(e)}"], e)
        if stream is not None and not hasattr(stream, "wait_stream"):
            found = type(stream).__name__
            return Refusal([f"tvr_stream returned {found}; it must return a torch stream or None"])
        return stream

    def _candidates(self, spec: OpSpec) -> list[Backend]:
        """Return the backends in rank order, usable or not, and the one `spec` is pinned to."""
        ranked = self._manager.ranked(self._first, usable=False)
        pin = self._pins.get(spec.op)
        if pin is not None and all(b.name != pin for b in ranked):
            ranked.append(self._manager.known[pin])
        return ranked

    def _reasons(self, backend: Backend, spec: OpSpec) -> list[str]:
        """Return why `backend` does not serve `spec`, as far as it was asked."""
        pin = self._pins.get(spec.op)
        if pin not in (None, backend.name):
            return [f"{spec.op} is pinned to {pin}"]
        answer = self._answers.get((backend.name, spec))
        if isinstance(answer, Refusal):
            return answer.reasons
        if (backend.name, spec) in self.left_out:
            return [_UNCAPTURED]
        reasons = backend.why_not_used()
        if not reasons and spec in self._why_composed:
            reasons = why_not(backend.info, spec, self._device) or [self._why_composed[spec]]
        return reasons

    def _passed_over(self, spec: OpSpec) -> list[PassedOver]:
        rows = [(b.name, self._reasons(b, spec)) for b in self._ranked]
        return [PassedOver(spec.op, name, reasons) for name, reasons in rows if reasons]

    def _unsupported(self, spec: OpSpec) -> UnsupportedSpec:
        pin = self._pins.get(spec.op)
        rows = [(b, self._reasons(b, spec)) for b in self._candidates(spec)]
        if pin is not None:
            problem = f"{spec.op} is pinned to {pin}, which does not serve {spec}"
            rows = [(b, reasons) for b, reasons in rows if b.name == pin]
        elif self._strict:
            problem = f"{spec.op} would fall through, which strict refuses, for {spec}"
        else:
            problem = f"{spec.op}: no backend serves {spec}"
        reasons = "; ".join(f"{b.name}: {', '.join(r)}" for b, r in rows if r) or "none is listed"
        error = UnsupportedSpec(f"{problem}; {reasons}; see `tvr backends --explain`")
        errors = (self._answers.get((b.name, spec)) for b, _ in rows)
        error.__cause__ = next(
            (e.error for e in errors if isinstance(e, Refusal) and e.error), None
        )
        return error
