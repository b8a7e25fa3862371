"""Captured steps by shape: recorded when a shape comes again, replayed from then on.

The first step of a shape runs eagerly, which also packs weights and grows tables; the second is
recorded; later ones are one native call. Shapes not seen for longest are dropped. A step that
cannot be captured runs eagerly for good, and the reason is logged once.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from lockstep.kernels.capture import Arena, CaptureError, Program, record

logger = logging.getLogger("lockstep.engine")

ARENA_BYTES = 1 << 30
"""Address space for the intermediate results of a step; memory is taken as it is used."""
MAX_PROGRAMS = 256
MAX_SHAPES = 4096
"""Shapes remembered as seen once, or as not capturable."""

Shape = TypeVar("Shape", bound=Hashable)
Outputs = TypeVar("Outputs")


class StepPrograms(Generic[Shape, Outputs]):
    """Programs for one function of a shape; its outputs hold until it runs again."""

    def __init__(
        self, compute: Callable[[Shape], Outputs], *, max_programs: int = MAX_PROGRAMS
    ) -> None:
        self.arena: Arena | None = None
        """Made for the first program."""
        self._compute = compute
        self._max_programs = max_programs
        self._programs: OrderedDict[Shape, tuple[Program, Outputs]] = OrderedDict()
        self._seen: OrderedDict[Shape, bool] = OrderedDict()  # value: whether it can be captured
        self._reasons: set[str] = set()

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
        return frozenset(self._reasons)

    def run(self, shape: Shape) -> Outputs:
        entry = self._programs.get(shape)
        if entry is not None:
            self._programs.move_to_end(shape)
            entry[0].replay()
            return entry[1]
        if self._seen.get(shape, False):
            return self._record(shape)
        self._remember(shape, can_capture=shape not in self._seen)
        return self._compute(shape)

    def clear(self) -> None:
        """Forget everything recorded: it computes with what is no longer the model."""
        self._programs.clear()
        self._seen.clear()

    def _record(self, shape: Shape) -> Outputs:
        if self.arena is None:
            self.arena = Arena(ARENA_BYTES)
        try:
            program, outputs = record(lambda: self._compute(shape), self.arena)
        except CaptureError as error:
            self._remember(shape, can_capture=False)
            if str(error) not in self._reasons:
                self._reasons.add(str(error))
                logger.warning("steps like %s run eagerly: %s", shape, error)
            return self._compute(shape)
        self._programs[shape] = program, outputs
        if len(self._programs) > self._max_programs:
            self._programs.popitem(last=False)
        return outputs

    def _remember(self, shape: Shape, *, can_capture: bool) -> None:
        self._seen[shape] = can_capture
        self._seen.move_to_end(shape)
        if len(self._seen) > MAX_SHAPES:
            self._seen.popitem(last=False)
