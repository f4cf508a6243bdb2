"""A training of the example model has the losses of the committed record, which a GPU has made."""

import os

import harness
import numpy as np
import pytest

from benchmarks import losses

pytestmark = [
    pytest.mark.one_process("it starts a process of its own"),
    pytest.mark.several_devices("the example makes a mesh of all devices"),
    pytest.mark.promotes("a user's program, which has JAX's defaults"),
]
ON_GPU = os.environ.get("MOE_A2A_TEST_GPU") == "1"


def recorded():
    record = losses.newest().record
    return record, {row["way"]: np.array(row["losses"]) for row in record["rows"]}


def test_the_record_has_a_thousand_steps_of_all_ways():
    record, curves = recorded()
    assert set(curves) == set(losses.WAYS)
    assert all(len(curve) == record["steps"] >= 1000 for curve in curves.values())


def test_all_ways_begin_like_the_dense_reference_and_end_near_it():
    curves = recorded()[1]
    for curve in curves.values():
        np.testing.assert_allclose(curve[:20], curves["dense"][:20], rtol=1e-3)
        # Runs whose rounding differs follow different paths.
        assert curve[-100:].mean() == pytest.approx(curves["dense"][-100:].mean(), rel=0.04)


# The first steps differ by the rounding of bfloat16 and FP8 alone.
@pytest.mark.parametrize("way", losses.WAYS if ON_GPU else ["portable"])
def test_the_first_losses_are_those_of_the_record(way):
    record, curves = recorded()
    if record["text"] != losses.digest(losses.text()):
        pytest.skip("the standard library of this Python has another text")
    stop = 200 if ON_GPU else 20
    devices = min(harness.NUM_DEVICES, 4)
    found = np.array(losses.train(way, record["steps"], stop, devices))
    np.testing.assert_allclose(found[:20], curves[way][:20], rtol=2e-3)
    smoothed, expected = losses.smooth(found), losses.smooth(curves[way][:stop])
    np.testing.assert_allclose(smoothed, expected, rtol=5e-2)
