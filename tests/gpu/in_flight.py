"""Define orders of split exchanges that check themselves, like those of `checked`: (shape, group,
step) -> counts, of one rank."""

import dataclasses
import random

import checked
import jax.numpy as jnp
from jax import lax

import jax_moe_a2a as ma
from jax_moe_a2a._src.exchange import split


def in_order(inflights, *arrays):
    """Return the arrays. Nothing that uses them begins before all of them are computed."""
    tied = iter(split.tie(*(a for each in inflights for a in each._arrays), *arrays))
    for each in inflights:
        each._arrays = [next(tied) for _ in each._arrays]
    return list(tied)


def check_dispatch(shape, group, step, inflight):
    """Return (what was received, counts)."""
    recv = ma.dispatch_done(inflight)
    return recv, checked.count_rows(shape, step, recv)


def check_combine(shape, group, step, inflight):
    ids = checked.own_ids(shape, group, step)
    return checked.count_sums(shape, group, step, ids, ma.combine_done(inflight))


@checked.makes(route=1, dispatch_start=1, combine_start=1)
def split_whole(shape, group, step):
    """Run a route, a dispatch and a combine, with a product during each of the two exchanges."""
    routing = checked.route(shape, group, step)
    inflight = checked.dispatch_start(shape, group, step, routing)
    inflight, rows = ma.overlap(inflight, product, step)
    recv, counts = check_dispatch(shape, group, step, inflight)
    inflight = checked.combine_start(group, recv)
    inflight, more = ma.overlap(inflight, product, step)
    counts += check_combine(shape, group, step, inflight)
    wrong = jnp.sum(rows != 1) + jnp.sum(more != 1)
    return (
        counts + checked.counted(wrong=wrong) + checked.count_routing(shape, group, step, routing)
    )


def product(step):
    """Multiply matrices that the compiler does not know; all elements are one."""
    side = 512
    ones = jnp.ones((side, side), jnp.bfloat16) + (step * 0).astype(jnp.bfloat16)
    return ones @ jnp.full((side, side), 1 / side, jnp.bfloat16)


def two_in_flight(reverse, number=2):
    """Start two dispatches and finish them in the same or the other order; then the same with
    combines."""

    @checked.makes(route=number, dispatch_start=number, combine_start=number)
    def order(shape, group, step):
        steps = [number * step + i for i in range(number)]
        routings = [checked.route(shape, group, s) for s in steps]
        counts, recvs, inflights = 0, [None] * number, []
        for s, routing in zip(steps, routings):
            (s,) = in_order(inflights, s)
            inflights.append(checked.dispatch_start(shape, group, s, routing))
        in_order(inflights)
        sequence = list(range(number))[:: -1 if reverse else 1]
        for position, i in enumerate(sequence):
            recvs[i], found = check_dispatch(shape, group, steps[i], inflights[i])
            (found,) = in_order([inflights[j] for j in sequence[position + 1 :]], found)
            counts += found
        inflights = []
        for recv in recvs:
            (x,) = in_order(inflights, recv.rows["x"])
            recv = dataclasses.replace(recv, rows=dict(recv.rows, x=x))
            inflights.append(checked.combine_start(group, recv))
        in_order(inflights)
        for position, i in enumerate(sequence):
            found = check_combine(shape, group, steps[i], inflights[i])
            (found,) = in_order([inflights[j] for j in sequence[position + 1 :]], found)
            counts += found
        return counts

    return order


@checked.makes(route=3, dispatch=2, combine=2, dispatch_start=1, combine_start=1)
def whole_between(shape, group, step):
    """Run whole exchanges while a dispatch and a combine are in flight."""
    first, others = 3 * step, (3 * step + 1, 3 * step + 2)
    routing = checked.route(shape, group, first)
    inflight = checked.dispatch_start(shape, group, first, routing)
    inflight, counts = ma.overlap(inflight, lambda s: checked.whole(shape, group, s), others[0])
    recv, found = check_dispatch(shape, group, first, inflight)
    counts += found
    inflight = checked.combine_start(group, recv)
    inflight, found = ma.overlap(inflight, lambda s: checked.whole(shape, group, s), others[1])
    return counts + found + check_combine(shape, group, first, inflight)


def random_script(seed, num_actions, most):
    """Return random actions as (name, index), where a done has the index of what is in flight."""
    draw = random.Random(seed)
    actions = [
        draw.choice(("start", "done", "done", "whole", "psum", "product"))
        for _ in range(num_actions)
    ]
    draw = random.Random(seed)
    script, pool = [], []

    def finish():
        i = draw.randrange(len(pool))
        if pool.pop(i) == "dispatch":
            pool.append("combine")
        return "done", i

    for action in ["start", *actions]:
        if action == "start" and len(pool) < most:
            pool.append("dispatch")
            script.append((action, None))
        elif action == "done" and pool:
            script.append(finish())
        else:
            is_nothing = action in ("start", "done")
            script.append(("nothing" if is_nothing else action, None))
    while pool:
        script.append(finish())
    return script


def random_order(seed, num_actions=14, most=4):
    """Run random starts, dones in any order, whole exchanges, psums and products."""
    script = random_script(seed, num_actions, most)
    names = [name for name, _ in script]
    starts, wholes = names.count("start"), names.count("whole")

    @checked.makes(
        route=starts + wholes,
        dispatch=wholes,
        combine=wholes,
        dispatch_start=starts,
        combine_start=starts,
    )
    def order(shape, group, step):
        pool, counts, next_step = [], checked.counted(), num_actions * step

        def finish(i):
            kind, at, inflight = pool.pop(i)
            if kind == "combine":
                return check_combine(shape, group, at, inflight)
            recv, found = check_dispatch(shape, group, at, inflight)
            pool.append(("combine", at, checked.combine_start(group, recv)))
            return found

        for action, i in script:
            at = next_step
            next_step += 1
            at, counts = in_order([each[2] for each in pool], jnp.asarray(at, jnp.int32), counts)
            if action == "start":
                routing = checked.route(shape, group, at)
                pool.append(("dispatch", at, checked.dispatch_start(shape, group, at, routing)))
            elif action == "done":
                counts += finish(i)
            elif action == "whole":
                counts += checked.whole(shape, group, at)
            elif action == "psum":
                mine = checked.hashed(at, checked.my_rank(group), jnp.arange(1 << 12))
                total = lax.psum(mine, group.axis_name)
                every = checked.hashed(at, jnp.arange(group.size)[:, None], jnp.arange(1 << 12))
                expected = jnp.sum(every, axis=0, dtype=every.dtype)
                counts += checked.counted(wrong=total != expected)
            elif action == "product":
                counts += checked.counted(wrong=product(at) != 1)
        return counts

    return order


# With a routing made elsewhere, of step 0.


@checked.makes(dispatch_start=1)
def dispatch_given(shape, group, step, routing):
    inflight = checked.dispatch_start(shape, group, step, routing)
    return check_dispatch(shape, group, step, inflight)[1]


@checked.makes(combine_start=1)
def combine_given(shape, group, step, routing):
    rank, token, k = routing.row_rank, routing.row_token, routing.row_k
    y = checked.tokens_at(shape, step, rank, token)
    y = checked.expert_output(y, routing, group)
    inflight = ma.combine_start(y, routing, weights=checked.weights_at(step, rank, token, k))
    ids = checked.own_ids(shape, group, 0)
    return checked.count_sums(shape, group, step, ids, ma.combine_done(inflight))
