"""Random exchanges, layers and products are those of the oracle, and the fuzzer notices a package
that is broken.

Each commit draws others. `python -m tests.fuzz` runs for as long as wanted, and repeats a failure.
"""

import subprocess

import jax.numpy as jnp
import pytest
from fuzz import fuzzer

from jax_moe_a2a._src.exchange import reference

pytestmark = [
    pytest.mark.one_process("several would have to draw the same in the same time"),
    pytest.mark.exchanges(0),  # everything is on the portable path
]

SECONDS = 30
SEED = 1  # of what a broken package is tried with


def seed_of_commit():
    """Return a number that changes with each commit."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return int(done.stdout.strip()[:6] or "0", 16)


def test_exchanges_are_those_of_the_oracle():
    done = fuzzer.fuzz(seed_of_commit(), seconds=SECONDS)
    print(done)
    assert not done.failures, done.failures[0]


def rows_beyond_are_not_zero(take_rows):
    return lambda x, index: take_rows(x, jnp.maximum(index, 0))


def groups_begin_too_early(plan_route):
    def plan(*args, alignment, **numbers):
        return plan_route(*args, alignment=max(1, alignment - 1), **numbers)

    return plan


def masked_choices_count(plan_route):
    return lambda ids, rank, **numbers: plan_route(jnp.where(ids == -1, 0, ids), rank, **numbers)


def gradients_of_weights_are_halved(scale_and_dot):
    def weigh(moved, rows, *args, **numbers):
        return scale_and_dot(moved, [row / 2 for row in rows], *args, **numbers)

    return weigh


@pytest.mark.parametrize(
    ("name", "breaking", "within"),
    (
        ("take_rows", rows_beyond_are_not_zero, 5),
        ("plan_route", groups_begin_too_early, 10),
        ("plan_route", masked_choices_count, 5),
        ("scale_and_dot", gradients_of_weights_are_halved, 10),
    ),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_package_is_noticed(monkeypatch, name, breaking, within):
    monkeypatch.setattr(reference, name, breaking(getattr(reference, name)))
    told = []
    done = fuzzer.fuzz(SEED, numbers=range(within), report=told.append)
    assert done.failures == told != []
    assert f"python -m tests.fuzz --seed {SEED} --program {done.programs - 1}" in told[0]
