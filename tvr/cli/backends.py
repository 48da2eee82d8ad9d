"""`tvr backends`: which backends there are, and who serves what."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvr import contract
from tvr.cli.output import columns

if TYPE_CHECKING:
    from tvr.contract import OpSpec
    from tvr.core.config import ModelConfig
    from tvr.core.engine_config import EngineConfig


def backends(
    *,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show who serves each op, and why others do not.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Explain for this model; default: a Llama shape."),
    ] = None,
    backend: Annotated[str, typer.Option(metavar="NAME", help="Backend put first.")] = "auto",
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Dtype to explain for.")] = "auto",
    device: Annotated[
        str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N.")
    ] = "auto",
    plugins: Annotated[
        str | None, typer.Option(metavar="FILE", help="A plugins.toml to use.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse broken plugins; explain what runs strictly.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """List the installed backends and whether they can run here."""
    from tvr.core.engine_config import EngineConfig
    from tvr.core.loader import device_facts, load_backends
    from tvr.core.plugin_config import find_config
    from tvr.errors import BackendUnavailable

    config = EngineConfig(backend=backend, strict=strict, dtype=dtype, device=device)
    missing: list[str] = []
    try:
        facts = device_facts(config.device)
    except BackendUnavailable as error:
        # Not the end here: which other things does a backend lack for it?
        facts, missing = contract.DeviceFacts(type="cuda"), [str(error)]
    with redirect_stdout(sys.stderr):  # what a plugin prints is no JSON
        manager, table = load_backends(config, facts, find_config(plugins, os.environ))
        data = manager.explain(table.backend)
        data["notes"] += missing
        if explain:
            data["ops"] = table.explain_ops(_specs(model, config, facts.type))
    if as_json:
        typer.echo(json.dumps(data, indent=2))
        return
    _print_backends(data)
    if explain:
        for op in data["ops"]:
            typer.echo()
            _print_op(op)


def _specs(model: str | None, config: EngineConfig, device_type: str) -> list[OpSpec]:
    """Return a spec of each op as `model`, or the shape of Llama-3.2-1B, needs it."""
    from tvr.cli.options import model_path
    from tvr.core.checkpoint_source import open_checkpoint
    from tvr.core.config import ModelConfig
    from tvr.core.loader import resolve_dtype

    if model is not None:
        shape = open_checkpoint(model_path(model)).config
    else:
        shape = ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            dtype="bfloat16",
        )
    dtype = resolve_dtype(config, shape, device_type)
    return op_specs(shape, dtype, config.block_size)


def op_specs(shape: ModelConfig, dtype: str, block_size: int) -> list[OpSpec]:
    """Return one spec for each op of the contract, as a model of `shape` binds it."""
    from tvr.core.products import FUSED_ROWS
    from tvr.core.sampling_params import MAX_LOGPROBS

    heads: dict[str, Any] = {
        "dtype": dtype,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
    }
    paged: dict[str, Any] = {**heads, "block_size": block_size}
    kv = {k: v for k, v in paged.items() if k != "num_heads"}
    hidden = shape.hidden_size
    return [
        contract.RmsNormSpec(dtype=dtype, hidden_size=hidden),
        contract.AddRmsNormSpec(dtype=dtype, hidden_size=hidden),
        contract.RopeSpec(**heads),
        contract.KvWriteSpec(**kv),
        contract.RopeKvWriteSpec(**paged),
        contract.AttentionDecodeSpec(**paged),
        contract.AttentionPrefillSpec(**paged),
        contract.SiluMulSpec(dtype=dtype, intermediate_size=shape.intermediate_size),
        contract.LinearSpec(
            dtype=dtype,
            in_features=shape.num_heads * shape.head_dim,
            out_features=hidden,
            bias=shape.attention_bias,
        ),
        contract.FusedLinearSpec(
            dtype=dtype,
            in_features=hidden,
            out_features=2 * shape.intermediate_size,
            bias=shape.mlp_bias,
            max_rows=FUSED_ROWS,
            rms_norm=True,
            silu_mul=True,
        ),
        contract.ArgmaxSpec(dtype=dtype, vocab_size=shape.vocab_size),
        contract.PrepareStepSpec(dtype=dtype, block_size=block_size),
        contract.SampleSpec(dtype=dtype, vocab_size=shape.vocab_size),
        contract.TopLogprobsSpec(
            dtype=dtype,
            vocab_size=shape.vocab_size,
            num_top=min(MAX_LOGPROBS, shape.vocab_size),
        ),
    ]


def _print_backends(data: dict[str, Any]) -> None:
    typer.echo(f"contract {data['abi']}, device {data['device']}, plugins from {data['config']}")
    rows = [("backend", "status", "from", "ops")]
    for b in data["backends"]:
        origin = f"{b['distribution']} {b['version']}" if b["distribution"] else "-"
        rows.append((b["name"], b["status"], origin, ", ".join(b["ops"]) or "-"))
    for line in columns(rows):
        typer.echo(line)
    for b in data["backends"]:
        for reason in [*b["reasons"], *b["notes"]]:
            typer.echo(f"{b['name']}: {reason}")
    for note in data["notes"]:
        typer.echo(f"note: {note}")


def _print_op(op: dict[str, Any], indent: str = "") -> None:
    """Print who serves an op and why others do not; under a composed op, the same of its parts."""
    typer.echo(f"{indent}{op['op']}: {op['served_by'] or 'nobody'}")
    for b in op["backends"]:
        reasons = f": {'; '.join(b['reasons'])}" if b["reasons"] else ""
        typer.echo(f"{indent}  {b['name']:<12} {b['status']}{reasons}")
    for part in op["parts"]:
        _print_op(part, indent + "    ")
