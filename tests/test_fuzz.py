"""Random exchanges, layers and products are those of the oracle, and the fuzzer notices a package
that is broken.

`python -m tests.fuzz` runs for as long as wanted, draws others with another seed, and repeats a
failure.
"""

import jax.numpy as jnp
import pytest
from fuzz import fuzzer

from jax_moe_a2a._src.exchange import reference
from jax_moe_a2a._src.grouped import reference as grouped_reference
from jax_moe_a2a._src.layer import load, mlp

pytestmark = [
    pytest.mark.one_process("several would have to draw the same in the same time"),
    pytest.mark.exchanges(0),  # everything is on the portable path
]

SECONDS = 15
SEED = 1


def test_exchanges_are_those_of_the_oracle():
    done = fuzzer.fuzz(SEED, seconds=SECONDS)
    print(done)
    assert not done.failures, done.failures[0]


def rows_beyond_are_not_zero(take_rows):
    return lambda x, index, *otherwise: take_rows(x, jnp.maximum(index, 0), *otherwise)


def groups_begin_too_early(plan_route):
    def plan(*args, options):
        return plan_route(*args, options._replace(alignment=max(1, options.alignment - 1)))

    return plan


def masked_choices_count(plan_route):
    return lambda ids, rank, options: plan_route(jnp.where(ids == -1, 0, ids), rank, options)


def gradients_of_weights_are_halved(scale_and_dot):
    def weigh(moved, rows, *args, **options):
        return scale_and_dot(moved, [row / 2 for row in rows], *args, **options)

    return weigh


def last_rows_have_no_group(groups_of):
    return lambda sizes, num_rows: groups_of(sizes, num_rows - 1)


def large_weights_are_cut(activate):
    def cut(activation, intermediate, product, row_weights, is_row):
        row_weights = jnp.minimum(row_weights, jnp.ones_like(row_weights))
        return activate(activation, intermediate, product, row_weights, is_row)

    return cut


def rows_of_experts_are_not_those_before(running_sum):
    return lambda x: 2 * running_sum(x)


@pytest.mark.parametrize(
    ("module", "name", "breaking", "number"),
    (
        (reference, "take_rows", rows_beyond_are_not_zero, 22),
        (reference, "plan_route", groups_begin_too_early, 22),
        (reference, "plan_route", masked_choices_count, 3),
        (reference, "scale_and_dot", gradients_of_weights_are_halved, 110),
        (grouped_reference, "groups_of", last_rows_have_no_group, 1),
        (mlp, "_activate", large_weights_are_cut, 4),
        (load, "running_sum", rows_of_experts_are_not_those_before, 33),
    ),
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_broken_package_is_noticed(monkeypatch, module, name, breaking, number):
    monkeypatch.setattr(module, name, breaking(getattr(module, name)))
    told = []
    done = fuzzer.fuzz(SEED, numbers=[number], report=told.append)
    assert done.failures == told != []
    assert f"python -m tests.fuzz --seed {SEED} --program {number}" in told[0]
    assert "Traceback" not in told[0]  # the comparison noticed it
