"""Test that random exchanges, layers and products have the oracle's results, and that the fuzzer
detects a broken package."""

import jax.numpy as jnp
import pytest
from fuzz import draw, fuzzer

from jax_moe_a2a._src.exchange import reference
from jax_moe_a2a._src.grouped import reference as grouped_reference
from jax_moe_a2a._src.layer import forms

pytestmark = [
    pytest.mark.one_process("each process would run the same programs"),
    pytest.mark.exchanges(0),  # no kernel runs
]

SEED = 1


def has_chunks(p):
    return p.num_chunks and p.batch > 1 and "ids" in p.batched


# For SEED, these programs combine options that no test outside of tests/fuzz combines.
PROGRAMS = {
    16: lambda p: p.derivative == "reverse over forward",  # 16, 4 and 8 are layers
    4: lambda p: p.derivative == "reverse over reverse",
    8: lambda p: p.derivative == "forward over reverse",
    43: lambda p: p.place.hosts > 1 and p.topk_weights is None and p.activation == "tanh of p",
    413: lambda p: p.depth and p.policy == "routing",
    34138: lambda p: has_chunks(p) and p.spare and p.weigh_input and p.topk_weights,
    1135: lambda p: p.replicated and p.activation == "p nan",
    263: lambda p: p.replicated and p.has_token_scales,
    260: lambda p: p.is_split and p.format and p.combine_wire in draw.FORMATS,
    438: lambda p: p.replicated and p.batch > 1 and p.derivative == "vjp",
    23710: lambda p: p.hosts > 1 and p.has_token_scales and p.is_split,
    331: lambda p: p.tail == "unspecified" and p.batch > 1 and p.derivative == "jvp",
    7110: lambda p: p.hosts > 1 and p.combine_wire in draw.FORMATS and p.is_split,
    680: lambda p: p.has_load and p.batch > 1 and p.derivative == "vjp",
    328: lambda p: p.hosts > 1 and p.addends and p.is_weighted and p.has_load and p.x64,
    58: lambda p: p.derivative == "forward over reverse",  # this and the following are products
    65: lambda p: min(p.vmaps) > 1 and len(p.vmaps) > 1 and p.derivative == "vjp",
    141: lambda p: p.derivative == "reverse over forward",
    199: lambda p: p.is_scanned and p.is_checkpointed and p.derivative == "vjp",
    3559: lambda p: p.derivative == "reverse over reverse" and p.dtype == "float64",
}


@pytest.mark.parametrize("number", PROGRAMS)
def test_a_program_is_that_of_the_oracle(number):
    drawn = fuzzer.KINDS[fuzzer.kind_of(SEED, number)].program(SEED, number)
    assert PROGRAMS[number](drawn)
    done = fuzzer.fuzz(SEED, numbers=[number])
    assert not done.failures, done.failures[0]


def rows_beyond_are_not_zero(take_rows):
    return lambda x, index, *otherwise: take_rows(x, jnp.maximum(index, 0), *otherwise)


def last_rows_have_no_group(groups_of):
    return lambda sizes, num_rows: groups_of(sizes, num_rows - 1)


def large_weights_are_cut(activate):
    def cut(activation, intermediate, why, product, row_weights, is_row):
        row_weights = jnp.minimum(row_weights, jnp.ones_like(row_weights))
        return activate(activation, intermediate, why, product, row_weights, is_row)

    return cut


@pytest.mark.parametrize(
    ("module", "name", "breaking", "number"),
    (
        (reference, "take_rows", rows_beyond_are_not_zero, 22),
        (grouped_reference, "groups_of", last_rows_have_no_group, 1),
        (forms, "_activate", large_weights_are_cut, 29),
    ),
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_broken_package_is_noticed(monkeypatch, module, name, breaking, number):
    monkeypatch.setattr(module, name, breaking(getattr(module, name)))
    told = []
    done = fuzzer.fuzz(SEED, numbers=[number], report=told.append)
    assert done.failures == told != []
    assert f"python -m tests.fuzz --seed {SEED} --program {number}" in told[0]
    assert "Traceback" not in told[0]  # only the comparison failed
