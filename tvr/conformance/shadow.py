"""Finds a fault in a running model: repeats every op on a reference and names the first wrong one.

    LLM(model, backend="mine", shadow=Shadow("torch"))

The engine then runs eagerly, one step at a time, and `generate`, `stream` and `step` raise
`OpFault` at the first result over its limit. What the reference serves is not repeated, nor is
what core does itself: looking up embeddings, and drawing random tokens.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tvr.conformance.attempt import Attempt, attempt
from tvr.conformance.finding import Finding, row_of
from tvr.conformance.record import Record
from tvr.conformance.shadow_file import save
from tvr.conformance.snapshot import Snapshot, call_of, take
from tvr.conformance.subject import Subject
from tvr.contract import BoundOp, LinearSpec, matching_box
from tvr.errors import ConfigError, OpFault

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.fault import Fault
    from tvr.conformance.subject import Call
    from tvr.contract import Bounds, DeviceFacts, OpSpec, StepMeta
    from tvr.core.plugins import BackendManager


class Packed(NamedTuple):
    """The weight of a product as its backend wants it, and as the reference does."""

    own: Any
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Place:
    """An op at one place in a model. `rounding`: where its backend declares that a norm rounds."""

    site: str
    backend: str
    spec: OpSpec
    bound: BoundOp
    rounding: str


class Shadow:
    """Watches one engine.

    Weights are taken to stay as they are. All other inputs are checked for damage, and so are
    the caches: in the blocks that a call reads or that the layer has ever written.

    Args:
        reference: name of the backend to compare with.
        file: where to write the call at fault; None: `tvr-shadow-OP.safetensors` in the working
            directory. What is there is replaced.
        replay_options: more options for the command that a finding names.

    Attributes:
        calls: (backend, op) -> calls compared so far.
        unserved: (backend, op) of what the reference cannot repeat -> its reasons.
        finding: what is wrong; None: nothing, so far.
    """

    one_at_a_time = True

    def __init__(
        self,
        reference: str = "torch",
        *,
        file: str | Path | None = None,
        replay_options: str = "",
    ) -> None:
        self.reference = reference
        self.calls: Counter[tuple[str, str]] = Counter()
        self.unserved: dict[tuple[str, str], list[str]] = {}
        self.finding: Finding | None = None
        self._file = None if file is None else Path(file)
        self._replay_options = replay_options
        self._manager: BackendManager | None = None
        self._num_places = 0
        self._repeats: dict[OpSpec, Callable[[Call], object]] = {}
        self._in_use: dict[str, Tensor] = {}  # site -> blocks written there, [n] int64
        self._step: StepMeta | None = None
        self._step_idx = -1

    def begin(self, manager: BackendManager, device: DeviceFacts) -> None:
        """Get ready for an engine with these backends.

        Raises:
            BackendUnavailable: there is no such reference, or it cannot be used.
            ConfigError: this shadow has watched another engine.
        """
        if self._manager is not None:
            raise ConfigError("a Shadow watches one engine; make a new one for the next")
        self._manager = manager
        self._subject = Subject(manager.require(self.reference), device)

    def watch(self, site: str, backend: str, spec: OpSpec, bound: BoundOp) -> BoundOp:
        """Return `bound` with every call compared; itself, if the reference is no other."""
        assert self._manager is not None, "an op table begins before it binds"
        if backend == self.reference:
            return bound
        if reasons := self._subject.why_not(spec):
            self.unserved[backend, spec.op] = reasons
            return bound
        self._num_places += 1
        box = matching_box(self._manager.known[backend].info, spec, self._manager.device)
        assert box is not None, "nothing is bound that is not declared"
        place = Place(
            site=site, backend=backend, spec=spec, bound=bound, rounding=box.norm_rounding
        )
        pack = partial(_pack, bound) if isinstance(spec, LinearSpec) else None
        return BoundOp(run=partial(self._run, place), pack=pack)

    def start(self, bounds: Bounds) -> None:
        """Compare from the next step on, which will be within `bounds`.

        Raises:
            ConfigError: there is nothing to compare.
        """
        if not self._num_places:
            raise ConfigError(
                f"shadow {self.reference!r} has nothing to compare with: {self._why_nothing()}"
            )
        self._bounds = bounds

    def begin_step(self, step: StepMeta) -> None:
        """Note the step that the next calls belong to.

        Raises:
            OpFault: a fault was found before; what comes after it would mean nothing.
        """
        if self.finding is not None:
            raise OpFault(str(self.finding))
        self._step = step
        self._step_idx += 1

    def summary(self, backend: str | None = None) -> str:
        """Return what was compared, in one line.

        Raises:
            ConfigError: nothing was, or nothing of `backend`.
        """
        mine = {op: n for (name, op), n in self.calls.items() if backend in (None, name)}
        if not mine:
            whom = "" if backend is None else f" of backend {backend!r}"
            why = self._why_nothing(backend)
            raise ConfigError(f"shadow {self.reference!r} has compared no call{whom}: {why}")
        by_op = Counter[str]()
        for (_, op), n in self.calls.items():
            by_op[op] += n
        counts = ", ".join(f"{op} {n:,}" for op, n in sorted(by_op.items()))
        calls, ops = _counted(by_op.total(), "call"), _counted(len(by_op), "op")
        left_out = "".join(
            f"; {op} of {name} was not compared: {', '.join(reasons)}"
            for (name, op), reasons in self.unserved.items()
        )
        return f"{calls} of {ops} agree with {self.reference}: {counts}{left_out}"

    def _why_nothing(self, backend: str | None = None) -> str:
        reasons = [
            f"{op} of {name}: {', '.join(why)}"
            for (name, op), why in self.unserved.items()
            if backend in (None, name)
        ]
        if not reasons and self._num_places:
            reasons = ["no op was called that the reference could repeat to the end"]
        return "; ".join(reasons) or "no other backend served an op; see `tvr backends --explain`"

    def _run(self, place: Place, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        packed = args[1] if isinstance(place.spec, LinearSpec) else None
        own = args if packed is None else (args[0], packed.own)
        if self._step is None:  # the engine measures its memory
            return place.bound.run(*own, **kwargs)
        live = call_of(place.spec, args, kwargs)
        if packed is not None:
            live = live.replace(weight=packed.weight, bias=packed.bias)
            del live.args["packed"]
        snapshot = take(live, self._in_use.get(place.site))
        outcome = attempt(
            snapshot,
            live,
            partial(self._run_to_end, place, *own, **kwargs),
            partial(self._repeat, snapshot),
            place.rounding,
        )
        if outcome.failed:
            self.finding = self._found(place, snapshot, outcome)
            raise OpFault(str(self.finding))
        if snapshot.blocks is not None and "slot_mapping" in live.args:
            self._in_use[place.site] = snapshot.blocks
        self.calls[place.backend, place.spec.op] += 1
        return outcome.result

    def _run_to_end(self, place: Place, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401
        result: object = place.bound.run(*args, **kwargs)
        if self._subject.device.type == "cuda":
            # What a kernel does wrong must show here, not while the reference runs.
            torch.cuda.synchronize(self._subject.torch_device)
        return result

    def _repeat(self, snapshot: Snapshot) -> Mapping[str, Tensor]:
        """Run a copy of the call on the reference, which has a plan and a workspace of its own."""
        spec = snapshot.call.spec
        if spec not in self._repeats:
            binding = self._subject.binding(spec, self._bounds)
            self._repeats[spec] = self._subject.with_runner(binding).run
        call = snapshot.fresh_call()
        self._repeats[spec](call)
        return call.written

    def _found(self, place: Place, snapshot: Snapshot, outcome: Attempt) -> Finding:
        step, fault = self._step, outcome.fault
        assert step is not None
        finding = Finding(
            op=place.spec.op,
            backend=place.backend,
            site=place.site,
            step=self._step_idx,
            problem=outcome.problem,
            fault=None if fault is None else _in_the_pool(fault, snapshot),
            row="" if fault is None else row_of(fault, snapshot, step, place.site),
            kept="",
        )
        path = self._file or Path(f"tvr-shadow-{place.spec.op}.safetensors")
        record = Record(
            snapshot=snapshot,
            bounds=self._bounds,
            found=outcome.found,
            reference=outcome.reference,
            finding=str(finding),
        )
        device = "" if self._subject.device.type == "cpu" else f" --device {self._subject.device}"
        try:
            save(record, path)
        except Exception as e:  # a broken device, a full disk: the fault matters more
            return replace(finding, kept=f"not kept in {path}: {' '.join(str(e).split())}")
        options = f"--backend {place.backend}{device}{self._replay_options}"
        again = f"tvr conformance {options} --replay {shlex.quote(str(path))}"
        return replace(finding, kept=f"kept in {path}; `{again}` runs it again")


def _in_the_pool(fault: Fault, snapshot: Snapshot) -> Fault:
    """Return a fault in a cache with the block's id in the model's pool."""
    if not fault.output.endswith("_cache"):
        return fault
    assert snapshot.blocks is not None
    block = int(snapshot.blocks[fault.index[0] - 1])
    return replace(fault, index=(block, *fault.index[1:]))


def _counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + "s" * (n != 1)


def _pack(bound: BoundOp, weight: Tensor, bias: Tensor | None) -> Packed:
    own = (weight, bias) if bound.pack is None else bound.pack(weight, bias)
    return Packed(own, weight, bias)
