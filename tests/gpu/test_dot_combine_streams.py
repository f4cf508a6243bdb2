"""A combine next to its product where the driver does not run the two next to each other.

The combine waits for its product, so the order of launches decides whether it ends.
"""

import cases
import harness
import pytest
import test_dot_combine as dot_combine
from alone import run_alone

SERIAL = {
    "blocking": dict(CUDA_LAUNCH_BLOCKING="1"),
    "one_queue": dict(CUDA_DEVICE_MAX_CONNECTIONS="1"),
    "both": dict(CUDA_LAUNCH_BLOCKING="1", CUDA_DEVICE_MAX_CONNECTIONS="1"),
}


def compare_with_the_sequence():
    """Compare layers whose combine runs next to its product with layers whose combine follows it,
    in value and all gradients, with another routing in each step."""
    for layout in (dot_combine.WORST, dot_combine.DROPS):
        for graphs in (False, True):
            next_to, found = dot_combine.program(
                dot_combine.layer, layout, "bfloat16", 16, graphs=graphs
            )
            after, none = dot_combine.program(
                dot_combine.layer, layout, "bfloat16", 0, graphs=graphs
            )
            assert (found, none) == (2 * harness.ON_GPU, 0)
            for seed, routing in enumerate(("idle_rank", "skewed", "masked", "first_expert_only")):
                assert routing in cases.ROUTINGS
                args = dot_combine.arguments(layout, routing, "bfloat16", seed)
                what = layout.name, routing
                dot_combine.assert_same_bits(next_to(*args), after(*args), what)
    print("compared")


@pytest.mark.one_process("it starts a process of its own")
@pytest.mark.exchanges(0)
@pytest.mark.parametrize("environment", SERIAL.values(), ids=SERIAL)
def test_a_combine_ends_where_launches_are_serialized(environment):
    output = run_alone(compare_with_the_sequence, timeout=80, **environment)
    assert "compared" in output
