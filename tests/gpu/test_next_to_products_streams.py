"""Exchanges next to products where the driver does not run the two next to each other.

A combine waits for its product, and a product for the dispatch of its rows. So the order of
launches decides whether they end.
"""

import cases
import harness
import next_to_products as nx
import pytest
from alone import run_alone

SERIAL = {
    "blocking": dict(CUDA_LAUNCH_BLOCKING="1"),
    "one_queue": dict(CUDA_DEVICE_MAX_CONNECTIONS="1"),
    "both": dict(CUDA_LAUNCH_BLOCKING="1", CUDA_DEVICE_MAX_CONNECTIONS="1"),
}


def compare_with_the_sequence():
    """Compare layers whose exchanges run next to products with layers of one after the other, in
    value and all gradients, with another routing in each step."""
    for layout in (nx.WORST, nx.DROPS):
        for graphs in (False, True):
            args = nx.layer, layout, "bfloat16", graphs
            next_to, found = nx.program(*args, dispatch_dot=24, dot_combine=16)
            after, none = nx.program(*args)
            assert (found, none) == ([2 * harness.ON_GPU] * 2, [0, 0])
            for seed, routing in enumerate(("idle_rank", "skewed", "masked", "first_expert_only")):
                assert routing in cases.ROUTINGS
                args = nx.arguments(layout, routing, "bfloat16", seed)
                nx.assert_same_bits(next_to(*args), after(*args), (layout.name, routing))
    print("compared")


@pytest.mark.one_process("it starts a process of its own")
@pytest.mark.exchanges(0)
@pytest.mark.parametrize("environment", SERIAL.values(), ids=SERIAL)
def test_they_end_where_launches_are_serialized(environment):
    output = run_alone(compare_with_the_sequence, timeout=80, **environment)
    assert "compared" in output
