"""Entry point of `lockstep`: the list of commands, and nothing that any of them needs.

Commands are registered by import path and imported when called, so help answers in a fraction of a
second and a command pays only for what it uses.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from lockstep import __version__
from lockstep.cli.errors import exit_code_of
from lockstep.core.errors import ConfigError

COMMANDS = {
    "demo": "The whole road on SmolLM2-135M: fetch, measure, SFT, RL, measure again, serve.",
    "fetch": "Download a named model into the cache and print its folder.",
    "serve": "Serve a model over the OpenAI API.",
    "sft": "Fine-tune a model on conversations or prompt/completion pairs (full or LoRA).",
    "rl": "Train a model by reinforcement learning (GRPO) on a verifiable task.",
    "eval": "Measure a model on tasks, or compare two measurements with a paired test.",
    "export": "Write a model as a Hugging Face folder, a PEFT adapter merged in if there is one.",
    "quantize": "Quantise a model to int8, int4 or fp8, and measure what it cost.",
    "info": "Show versions, hardware, and which kernels run here.",
}
FLAGS = ("--help", "-h", "--version")


def build_app() -> App:
    """The command line, every command still unimported."""
    app = App(
        name="lockstep",
        help="Post-train, evaluate and serve language models on one code path.",
        version=__version__,
    )
    for order, (name, summary) in enumerate(COMMANDS.items()):
        app.command(f"lockstep.cli.{name}:command", name=name, help=summary, sort_key=order)
    return app


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    if arguments and arguments[0] not in {*COMMANDS, *FLAGS}:
        # Cyclopts would import every command to look for the nearest name.
        raise ConfigError(f"unknown command {arguments[0]!r}; use one of {', '.join(COMMANDS)}")
    try:
        result = build_app()(
            arguments, exit_on_error=False, print_error=False, result_action="return_value"
        )
    except CycloptsError as error:
        raise ConfigError(str(error)) from error
    return result if isinstance(result, int) else 0


def main() -> None:
    """Exit 0 when done, 2 on a user's mistake (one sentence on stderr), 130 when interrupted."""
    sys.exit(exit_code_of(lambda: run(sys.argv[1:])))
