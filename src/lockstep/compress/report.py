"""What a compression leaves beside the model: its settings, the gate's figures, the verdict."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.compress.config import QuantizeConfig
from lockstep.compress.gate import GateReport
from lockstep.core.files import write_json
from lockstep.core.hardware import detect_hardware, detect_versions
from lockstep.core.run_folder import as_json, git_revision

if TYPE_CHECKING:
    from lockstep.compress.run import Outcome

REPORT_NAME = "quantization.json"


def write_report(folder: Path, config: QuantizeConfig, outcome: Outcome) -> None:
    """`quantization.json` in the folder."""
    write_json(
        folder / REPORT_NAME,
        {
            "passed": outcome.passed,
            "gate": gate_record(outcome.gate),
            "seconds": round(outcome.seconds, 1),
            "peak_memory_bytes": outcome.peak_memory_bytes,
            "config": as_json(config),
            "command": sys.argv,
            "git": git_revision(),
            "hardware": as_json(detect_hardware()),
            "versions": as_json(detect_versions()),
        },
    )


def gate_record(gate: GateReport) -> dict[str, Any]:
    """The gate's figures, with what follows from them."""
    return {
        "failures": gate.failures,
        "perplexity_increase": gate.perplexity_increase,
        **as_json(gate),
    }


def summary(gate: GateReport) -> list[str]:
    """The figures for a terminal: a table of layers where there is one, then a line a figure."""
    lines = []
    for row in gate.layers:
        if not lines:
            names = [name.rpartition(".")[2].removesuffix("_proj") for name in row.projections]
            lines.append("layer  output  " + "  ".join(f"{name:>6}" for name in names))
        cells = "  ".join(f"{error:6.4f}" for error in row.projections.values())
        lines.append(f"{row.layer:5d}  {row.output_error:6.4f}  {cells}")
    lines += [
        f"held-out text: {gate.text}, {gate.num_tokens} tokens",
        f"perplexity: {gate.perplexity_before:.3f} -> {gate.perplexity_after:.3f} "
        f"({gate.perplexity_increase:+.2%} +- {gate.increase_error:.2%}, "
        f"allowed {gate.max_perplexity_increase:+.2%})",
        f"KL(original || quantised): {gate.kl_mean:.5f} nats a token, p99 {gate.kl_p99:.4f}",
        f"same likeliest token: {gate.agreement:.2%}",
    ]
    return lines
