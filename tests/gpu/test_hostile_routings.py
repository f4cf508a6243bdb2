"""Hostile routings: thousands of exchanges in each case, every one compared with the portable path.

Each step makes another routing on the device, from the number of the step. It exchanges the same
tokens through the kernels and through the portable path, forward and backward, and compares the
results on the device. Only the numbers of differences come back to the host.

Everything that only moves must be equal bit for bit. All data are small integers, so that each sum
is exact in any order and in any dtype: sums and gradients must be equal too.
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import checked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import routings
from jax import lax
from routings import (
    CHOICES,
    EXPERTS,
    KERNELS,
    LOCAL_EXPERTS,
    PORTABLE,
    RANKS,
    ROUTINGS,
    STEPS,
    TIGHT_CAPACITY,
    TOKENS,
    TOP_K,
    ids_of,
)

import jax_moe_a2a as ma

RUNS = 2  # of a program in each case


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static numbers of a program."""

    is_routed: bool  # the dispatch takes ids: it routes and moves in one launch
    is_tight: bool  # the capacity is less than the mean load; otherwise it is the worst case
    alignment: int
    hidden: int

    @property
    def name(self):
        path = "routed_dispatch" if self.is_routed else "route_and_dispatch"
        capacity = "tight" if self.is_tight else "worst_case"
        return f"{path}-{capacity}-alignment_{self.alignment}-hidden_{self.hidden}"

    @property
    def capacity(self):
        return TIGHT_CAPACITY if self.is_tight else None

    @property
    def shape(self):
        return checked.Shape(TOKENS, self.hidden, TOP_K, LOCAL_EXPERTS, alignment=self.alignment)


# Half of all combinations, in which each pair of properties has all four values. Rows take whole
# words of 16 bytes, or 66 bytes.
LAYOUTS = [
    Layout(is_routed, is_tight, alignment, 64 if is_routed ^ is_tight ^ (alignment > 1) else 33)
    for is_routed, is_tight, alignment in itertools.product((False, True), (False, True), (1, 8))
]


# The rows that a routing leads to.


def are_loads_of(name, loads):
    """Return True if the ranks received or dropped as many rows as the routing has in all steps."""
    steps = RUNS * STEPS
    of_all = steps * RANKS * CHOICES
    if name in ("last_expert_of_the_last_rank", "one_expert_of_rank_0"):
        hot = 0 if name == "one_expert_of_rank_0" else RANKS - 1
        return loads[hot] == of_all and loads.sum() == of_all
    if name in ("own_rank_only", "next_rank_only"):
        return (loads == steps * CHOICES).all()
    if name == "outside_the_range":
        return 0 < loads.sum() < of_all
    totals = dict(nothing=0, a_single_choice=steps, every_second_token=of_all // 2)
    return loads.sum() == totals.get(name, of_all)


# A step: both paths, and what differs.


class Differences(NamedTuple):
    """Numbers of elements in which the kernels differ from the portable path."""

    routing: object
    rows: object
    sums: object
    gradients: object
    choices: object  # that were neither received nor dropped: 1 for each step that loses some


def exchange(group, layout, step, ids):
    """Return the results of a dispatch and its combines, with the gradients, as lists by kind."""
    shape, rank = layout.shape, checked.my_rank(group)
    token = jnp.arange(TOKENS)
    tags = checked.tags_at(step, rank, token)
    exchange = ma.Exchange(capacity=layout.capacity, alignment=layout.alignment)
    route_args = dict(num_experts=EXPERTS, exchange=exchange)

    def dispatch(x, weights):
        payload = dict(x=x, tag=tags)
        if layout.is_routed:
            recv = ma.dispatch(payload, ids, weights, group=group, **route_args)
        else:
            recv = ma.dispatch(payload, ma.route(ids, group=group, **route_args), weights)
        return (recv.rows["x"], recv.weights), recv

    def combine(y, weights):
        return ma.combine(y, recv.routing, weights=weights)

    x = checked.tokens_at(shape, step, rank, token)
    weights = checked.own_weights(shape, group, step)
    (rows, row_weights), transpose_dispatch, recv = jax.vjp(dispatch, x, weights, has_aux=True)
    # The experts' outputs: other numbers in each row, and NaN where nothing may be read.
    row = jnp.arange(recv.routing.capacity)
    y = rows + checked.tokens_at(shape, step, rank + RANKS, row)
    y = jnp.where(recv.src_info.rank[:, None] >= 0, y, jnp.nan)
    out, transpose_combine = jax.vjp(combine, y, row_weights)
    cotangent = checked.tokens_at(shape, step, rank + 2 * RANKS, token)
    of_rows = transpose_combine(cotangent)
    of_tokens = transpose_dispatch(of_rows)
    routing = dataclasses.replace(recv, rows=None, weights=None)
    return dict(
        routing=jax.tree.leaves(routing),
        rows=[*jax.tree.leaves(recv.rows), recv.weights],
        sums=[out, combine(y, None)],
        gradients=[*of_rows, *of_tokens],
        recv=recv,
    )


def bits(array):
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")


def count_different(actual, expected):
    """Return how many elements differ; NaN differs from everything."""
    pairs = zip(actual, expected, strict=True)
    return sum(jnp.sum(a != b, dtype=jnp.int32) for a, b in pairs)


def take_step(layout, name_index, step, is_broken):
    """Return the differences, the rows received or dropped, and those dropped, of one rank."""
    group = KERNELS
    ids = ids_of(name_index, group, step)
    others = ids
    if is_broken:  # The portable path has one choice more on rank 0, or another one.
        is_first = jnp.arange(CHOICES).reshape(ids.shape) == 0
        is_first &= (checked.my_rank(group) == 0) & (step == 1)
        others = jnp.where(is_first, jnp.where(ids == 0, 1, 0), ids)
    actual, expected = exchange(group, layout, step, ids), exchange(PORTABLE, layout, step, others)

    recv = actual["recv"]
    load = recv.num_rows + recv.num_dropped
    named = jnp.sum((ids >= 0) & (ids < EXPERTS), dtype=jnp.int32)
    load_of_all, named_by_all = lax.psum((load, named), group.axis_name)
    found = Differences(
        routing=count_different(actual["routing"], expected["routing"]),
        rows=count_different(map(bits, actual["rows"]), map(bits, expected["rows"])),
        sums=count_different(actual["sums"], expected["sums"]),
        gradients=count_different(actual["gradients"], expected["gradients"]),
        choices=jnp.int32(load_of_all != named_by_all),
    )
    return jnp.stack(found), load, recv.num_dropped


@functools.cache
def program(layout, is_broken=False):
    step = functools.partial(take_step, layout, is_broken=is_broken)
    return routings.program(step)


def run_all_steps(run, name):
    """Return the sums of what all steps of all ranks have found."""
    zeros = np.zeros(RANKS, np.int32)
    differences = np.zeros((RANKS, len(Differences._fields)), np.int32)
    sums = routings.run_all_steps(run, name, (differences, zeros, zeros), RUNS)
    differences, loads, dropped = sums
    return Differences(*map(int, differences.sum(axis=0))), loads, int(dropped.sum())


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_kernels_and_portable_path_agree_in_every_step(layout, name):
    differences, loads, dropped = run_all_steps(program(layout), name)
    assert not any(differences), differences
    assert are_loads_of(name, loads), loads
    if not layout.is_tight:
        assert dropped == 0
    elif name in ("last_expert_of_the_last_rank", "one_expert_of_rank_0", "next_rank_only"):
        assert dropped > 0


@pytest.mark.parametrize("layout", LAYOUTS[::7], ids=lambda layout: layout.name)
def test_a_single_other_choice_is_counted_as_a_difference(layout):
    differences, *_ = run_all_steps(program(layout, is_broken=True), "a_single_choice")
    assert all(differences[:4]), differences
