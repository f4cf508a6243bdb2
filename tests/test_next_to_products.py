"""Test the fallbacks that a product next to its dispatch and a combine next to its product have in
common."""

import pytest
from next_to_products import TARGETS, lower_for_gpus, lowers, text_of

from jax_moe_a2a._src.grouped import lowering as grouped

ASKED = dict(num_sms={"dispatch_dot": 24, "dot_combine": 16})


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    lower_for_gpus(monkeypatch)


@lowers
def test_other_gpus_have_exchanges_only(monkeypatch):
    monkeypatch.setattr(grouped, "_why_other_gpu", lambda: "the kernel needs newer GPUs")
    text = text_of(**ASKED)
    assert "@moe_a2a_dispatch" in text and "@moe_a2a_combine" in text
    assert not any(target in text for target in TARGETS.values())


@lowers
def test_with_two_levels_the_exchanges_within_a_host_have_it():
    text = text_of(hosts=2, gradients=False, **ASKED)
    calls = [line for line in text.splitlines() if "custom_call @moe_a2a" in line]
    for target in ("lands = true", TARGETS["dot_combine"]):
        (call,) = (call for call in calls if target in call)
        assert "num_ranks = 4" in call
    (product,) = (call for call in calls if TARGETS["dispatch_dot"] in call)
    assert "landing_rows" in product
    across = [call for call in calls if "num_ranks = 2" in call]
    assert len(across) == 3  # ids and tokens, and sums
    assert not any("lands = true" in call for call in across)
