"""`lockstep demo`: the whole road on a small model, and whether it keeps its promises."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

command = App(name="demo")


@command.default
def demo(*, out: Path = Path("runs/demo"), port: int = 0, seed: int = 0) -> int:
    """Measure, SFT, RL, measure again, serve and ask SmolLM2-135M, in minutes on two cores.

    Exits 1 if a promise is broken: RL did not help, or trainer and server disagree.

    Parameters
    ----------
    out
        Folder for everything it leaves, report.html included; an earlier demo there is replaced.
    port
        Port of the server; 0 takes a free one.
    seed
        Seed of the data order, the prompts, the draws and the adapters' initial weights.
    """
    from lockstep.demo.config import DemoConfig
    from lockstep.demo.run import run_demo  # torch: two seconds that --help need not pay
    from lockstep.demo.table import print_outcome

    outcome = run_demo(DemoConfig(port=port, seed=seed), out)
    print_outcome(outcome, out)
    return 0 if outcome.is_success else 1
