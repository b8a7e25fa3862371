"""Captured steps by family: recorded when one comes for the second time, replayed from then on.

The first step of a family runs eagerly, which answers at once and packs weights. Recording computes
nothing and takes some 50 ms; then every size of the family is one native call. A family that cannot
be captured runs eagerly for good, and the reason is logged once.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from lockstep.engine.step_inputs import StepLimits, StepShape
from lockstep.engine.step_shapes import StepFamily
from lockstep.kernels.arena import Arena, CaptureError
from lockstep.kernels.capture import Program, record

logger = logging.getLogger("lockstep.engine")

ARENA_BYTES = 1 << 30
"""Address space for the intermediate results of a step; memory is taken as it is used."""
MAX_PROGRAMS = 64
MAX_NARROWED = 1024
"""Shapes whose outputs are kept as views of their program's."""

Outputs = TypeVar("Outputs")


class StepPrograms(Generic[Outputs]):
    """Programs for one function of a shape; its outputs hold until it runs again.

    `narrow(outputs, shape)` gives the outputs of a shape as views of its family's largest.
    """

    def __init__(
        self,
        compute: Callable[[StepShape], Outputs],
        narrow: Callable[[Outputs, StepShape], Outputs],
        limits: StepLimits,
        *,
        max_programs: int = MAX_PROGRAMS,
    ) -> None:
        self.arena: Arena | None = None
        """Made for the first program."""
        self._compute, self._narrow, self._limits = compute, narrow, limits
        self._max_programs = max_programs
        self._programs: OrderedDict[StepFamily, tuple[Program, Outputs]] = OrderedDict()
        self._ready: OrderedDict[StepShape, tuple[Program, Outputs]] = OrderedDict()
        self._refused: dict[StepFamily, str] = {}
        self._seen: set[StepFamily] = set()

    def __len__(self) -> int:
        return len(self._programs)

    @property
    def num_bytes(self) -> int:
        """Memory of all programs together."""
        programs = sum(program.num_bytes for program, _ in self._programs.values())
        return programs + (0 if self.arena is None else self.arena.peak_bytes)

    @property
    def refusals(self) -> frozenset[str]:
        """Why steps could not be captured."""
        return frozenset(self._refused.values())

    def run(self, shape: StepShape) -> Outputs:
        ready = self._ready.get(shape) or self._make_ready(shape)
        if ready is None:
            return self._compute(shape)
        program, outputs = ready
        program.replay(shape.sizes)
        return outputs

    def clear(self) -> None:
        """Forget everything recorded: it computes with what is no longer the model."""
        for entries in (self._programs, self._ready, self._refused, self._seen):
            entries.clear()

    def _make_ready(self, shape: StepShape) -> tuple[Program, Outputs] | None:
        family = StepFamily.of(shape, self._limits)
        if family not in self._seen:
            self._seen.add(family)
            return None
        entry = self._programs.get(family) or self._record(family)
        if entry is None:
            return None
        self._programs.move_to_end(family)
        program, outputs = entry
        self._ready[shape] = program, self._narrow(outputs, shape)
        if len(self._ready) > MAX_NARROWED:
            self._ready.popitem(last=False)
        return self._ready[shape]

    def _record(self, family: StepFamily) -> tuple[Program, Outputs] | None:
        if family in self._refused:
            return None
        if self.arena is None:
            self.arena = Arena(ARENA_BYTES)
        smallest, largest = family
        try:
            entry = record(
                lambda *sizes: self._compute(largest.with_sizes(*sizes)),
                self.arena,
                smallest.sizes,
                largest.sizes,
            )
        except CaptureError as error:
            if str(error) not in self.refusals:
                logger.warning("steps like %s run eagerly: %s", largest, error)
            self._refused[family] = str(error)
            return None
        self._programs[family] = entry
        if len(self._programs) > self._max_programs:
            self._programs.popitem(last=False)
            self._ready.clear()
        return entry
