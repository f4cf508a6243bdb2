"""Compare losses of the example model with the newest record, computed on a GPU."""

import harness
import numpy as np
import pytest

from benchmarks import losses

pytestmark = [
    pytest.mark.one_process("it starts a process of its own"),
    pytest.mark.several_devices("the example makes a mesh of all devices"),
    pytest.mark.promotes("a user's program uses JAX's defaults"),
]


def recorded():
    """Return the newest record, and a dict from each way to train to its losses [seeds, steps]."""
    record = losses.newest().record
    of_way = lambda way: np.array([row["losses"] for row in record["rows"] if row["way"] == way])
    return record, {way: of_way(way) for way in losses.WAYS}


def test_the_record_has_a_thousand_steps_of_all_ways():
    record, curves = recorded()
    assert record["steps"] >= 1000
    assert {curve.shape for curve in curves.values()} == {(len(record["seeds"]), record["steps"])}


def test_all_ways_begin_like_the_dense_reference_and_end_near_it():
    curves = recorded()[1]
    for curve in curves.values():
        np.testing.assert_allclose(curve[:, :20], curves["dense"][:, :20], rtol=1e-3)
        # Runs with different rounding diverge: one run may differ by 4 percent, the mean of n runs
        # by 4 / sqrt(n) percent.
        last, rel = slice(-losses.END, None), 0.04 / np.sqrt(len(curve))
        assert curve[:, last].mean() == pytest.approx(curves["dense"][:, last].mean(), rel=rel)


# In the first steps, losses differ only by the rounding to bfloat16 and FP8.
@pytest.mark.parametrize("way", losses.WAYS if harness.ON_GPU else ["portable"])
def test_the_first_losses_are_those_of_the_record(way):
    record, curves = recorded()
    if record["text"] != losses.digest(losses.text()):
        pytest.skip("the standard library of this Python differs from the recorded text")
    stop = 200 if harness.ON_GPU else 4
    found = np.array(losses.train(way, record["seeds"][0], steps=record["steps"], stop=stop))
    expected = curves[way][0, :stop]
    np.testing.assert_allclose(found[:20], expected[:20], rtol=2e-3)
    if harness.ON_GPU:
        smoothed, expected = losses.smooth(found), losses.smooth(expected)
        np.testing.assert_allclose(smoothed, expected, rtol=5e-2)
