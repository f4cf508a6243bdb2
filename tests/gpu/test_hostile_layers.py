"""Compare thousands of `moe_mlp` layers on unusual routings with the portable path.

All data are small integers, so results and gradients must be equal.
"""

import dataclasses
import functools
from typing import NamedTuple

import checked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import routings
from routings import (
    EXPERTS,
    KERNELS,
    LOCAL_EXPERTS,
    PORTABLE,
    RANKS,
    ROUTINGS,
    TIGHT_CAPACITY,
    TOKENS,
    TOP_K,
    ids_of,
)

import jax_moe_a2a as ma

HIDDEN, INTERMEDIATE = 16, 8
SHAPE_IN, SHAPE_OUT = (LOCAL_EXPERTS, HIDDEN, INTERMEDIATE), (LOCAL_EXPERTS, INTERMEDIATE, HIDDEN)
activation = jax.nn.relu


@dataclasses.dataclass(frozen=True)
class Layout:
    is_tight: bool  # True: the capacity is TIGHT_CAPACITY. False: it has room for all rows
    dtype: str

    @property
    def name(self):
        return f"{'tight' if self.is_tight else 'worst_case'}-{self.dtype}"

    @property
    def largest(self):
        """Return the largest input. If 1, weighted bfloat16 rows are at most 256 and thus exact."""
        return 1 if self.dtype == "bfloat16" else 2

    @property
    def route_args(self):
        capacity = TIGHT_CAPACITY if self.is_tight else None
        return dict(num_experts=EXPERTS, exchange=ma.Exchange(capacity=capacity, alignment=8))


LAYOUTS = [
    Layout(is_tight, dtype) for dtype in ("float32", "bfloat16") for is_tight in (False, True)
]


class Differences(NamedTuple):
    out: object
    x: object
    topk_weights: object
    w_in: object
    w_out: object


def integers(shape, salt, step, rank, largest, dtype="float32"):
    index = jnp.arange(int(np.prod(shape))).reshape(shape)
    drawn = (checked.hashed(salt, step, rank, index) >> 9) % (2 * largest + 1)
    return (drawn.astype(jnp.int32) - largest).astype(dtype)


def fused(layout, ids, x, topk_weights, *w):
    choices, experts = ma.RouterChoices(ids, topk_weights), ma.Experts(*w, activation=activation)
    return ma.moe_mlp(x, choices, experts, group=KERNELS, **layout.route_args)


def unfused(layout, ids, x, topk_weights, w_in, w_out):
    recv = ma.dispatch(x, ids, topk_weights, group=PORTABLE, **layout.route_args)
    h = activation(ma.grouped_dot(recv.rows, w_in, recv.group_sizes))
    return ma.combine(ma.grouped_dot(h, w_out, recv.group_sizes), recv)


def take_step(layout, name_index, step, is_broken):
    rank = checked.my_rank(KERNELS)
    ids = ids_of(name_index, KERNELS, step)
    made = functools.partial(
        integers, step=step, rank=rank, largest=layout.largest, dtype=layout.dtype
    )
    floats = (
        made((TOKENS, HIDDEN), 40),
        1 + jnp.abs(integers((TOKENS, TOP_K), 41, step, rank, layout.largest)),
        made(SHAPE_IN, 42),
        made(SHAPE_OUT, 43),
    )
    cotangent = made((TOKENS, HIDDEN), 44)

    def results(layer, floats):
        out, transpose = jax.vjp(functools.partial(layer, layout, ids), *floats)
        return out, *transpose(cotangent)

    actual = results(fused, floats)
    if is_broken:
        is_it = (rank == 0) & (step == 1)
        floats = floats[0].at[0, 0].add(is_it.astype(layout.dtype)), *floats[1:]
    expected = results(unfused, floats)
    pairs = zip(actual, expected, strict=True)
    return jnp.stack([jnp.sum(a != b, dtype=jnp.int32) for a, b in pairs])


@functools.cache
def program(layout, is_broken=False):
    step = functools.partial(take_step, layout, is_broken=is_broken)
    return routings.program(step)


def differences(run, name):
    """Return the differences of STEPS steps with a routing, summed over steps and ranks."""
    zeros = np.zeros((RANKS, len(Differences._fields)), np.int32)
    sums = routings.run_all_steps(run, name, zeros)
    return Differences(*map(int, sums.sum(axis=0)))


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layers_and_their_portable_form_agree_in_every_step(layout, name):
    if layout.dtype == "bfloat16":
        zeros = np.zeros((RANKS, len(Differences._fields)), np.int32)
        run = program(layout)
        jitted = getattr(run, "program", run)  # with all ranks on one GPU, `run` counts exchanges
        calls = ma.explain(jitted, *routings.begin(name, zeros))
        assert any("activation" in call.name and not call.why for call in calls)
    assert not any(differences(program(layout), name))


def test_a_single_changed_number_is_counted_as_a_difference():
    found = differences(program(LAYOUTS[0], is_broken=True), "own_rank_only")
    assert found.out and found.w_in, found
