"""Every shape belongs to a family that contains it, and there are few families."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.step_inputs import StepLimits, StepShape
from lockstep.engine.step_shapes import StepFamily, num_groups


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepShape, StepLimits]:
    max_tokens = draw(st.integers(1, 3000))
    max_seqs = draw(st.integers(1, min(max_tokens, 300)))
    num_seqs = draw(st.integers(1, max_seqs))
    num_tokens = draw(st.integers(num_seqs, max_tokens))
    num_rows = draw(st.integers(0, num_seqs))
    shape = StepShape(
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_rows=num_rows,
        draws_all=num_rows == num_tokens,
        keeps_logits=draw(st.booleans()),
        keeps_hidden=draw(st.booleans()),
    )
    return shape, StepLimits(max_tokens=max_tokens, max_seqs=max_seqs, max_blocks=4)


@given(steps())
def test_a_family_contains_the_shape(step: tuple[StepShape, StepLimits]) -> None:
    shape, limits = step
    smallest, largest = StepFamily.of(shape, limits)
    for low, size, high in zip(smallest.sizes, shape.sizes, largest.sizes, strict=True):
        assert low <= size <= high
    assert num_groups(smallest) == num_groups(shape) == num_groups(largest)
    assert largest.with_sizes(*shape.sizes) == shape
    assert largest.num_tokens <= limits.max_tokens
    assert largest.num_seqs <= limits.max_seqs


def test_families_are_few() -> None:
    limits = StepLimits(max_tokens=2048, max_seqs=128, max_blocks=4)
    shapes = [
        StepShape(tokens, min(tokens, 128), rows, rows == tokens, False, False)
        for tokens in range(1, 2049)
        for rows in range(min(tokens, 128) + 1)
    ]
    assert len({StepFamily.of(shape, limits) for shape in shapes}) == 10
