"""Define orders of `checked` with split exchanges."""

import random

import checked
import jax.numpy as jnp

import jax_moe_a2a as ma
from jax_moe_a2a._src.exchange import split


def in_order(inflights, *arrays):
    """Return arrays that XLA cannot use before all arrays and `inflights` are computed."""
    tied = iter(split.tie(*(a for each in inflights for a in each._arrays), *arrays))
    for each in inflights:
        each._arrays = [next(tied) for _ in each._arrays]
    return list(tied)


def check_dispatch(shape, group, step, inflight):
    recv = ma.dispatch_done(inflight)
    return recv, checked.count_rows(shape, step, recv)


def check_combine(shape, group, step, inflight):
    ids = checked.own_ids(shape, group, step)
    return checked.count_sums(shape, group, step, ids, ma.combine_done(inflight))


def split_whole(shape, group, step):
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
    """Return a product whose elements are 1, which XLA cannot compute at compile time."""
    side = 512
    ones = jnp.ones((side, side), jnp.bfloat16) + (step * 0).astype(jnp.bfloat16)
    return ones @ jnp.full((side, side), 1 / side, jnp.bfloat16)


def started_first(number, reverse):
    """Return a script that finishes all dispatches, then all combines, in order or in reverse."""
    places = reversed(range(number)) if reverse else [0] * number
    return [("start", None)] * number + [("done", i) for i in places] * 2


def random_script(seed, num_actions=14, most=4):
    draw, script, pool = random.Random(seed), [], []
    names = ("start", "done", "done", "whole", "psum", "product")

    def finish():
        i = draw.randrange(len(pool))
        if pool.pop(i) == "dispatch":
            pool.append("combine")
        script.append(("done", i))

    for action in ["start", *draw.choices(names, k=num_actions)]:
        if action == "start" and len(pool) < most:
            pool.append("dispatch")
            script.append((action, None))
        elif action == "done" and pool:
            finish()
        elif action not in ("start", "done"):
            script.append((action, None))
    while pool:
        finish()
    return script


def scripted(script):
    """Return an order that runs a script. When a dispatch is done, its combine starts."""

    def order(shape, group, step):
        pool, counts, first = [], checked.counted(), len(script) * step

        def finish(i):
            kind, at, inflight = pool.pop(i)
            if kind == "combine":
                return check_combine(shape, group, at, inflight)
            recv, found = check_dispatch(shape, group, at, inflight)
            pool.append(("combine", at, checked.combine_start(group, recv)))
            return found

        for number, (action, i) in enumerate(script):
            at = jnp.asarray(first + number, jnp.int32)
            at, counts = in_order([each[2] for each in pool], at, counts)
            if action == "start":
                routing = checked.route(shape, group, at)
                pool.append(("dispatch", at, checked.dispatch_start(shape, group, at, routing)))
            elif action == "done":
                counts += finish(i)
            elif action == "whole":
                counts += checked.whole(shape, group, at)
            elif action == "psum":
                counts += checked.count_psum(group, at, 1 << 12)
            elif action == "product":
                counts += checked.counted(wrong=product(at) != 1)
        return counts

    return order


whole_between = scripted(
    [("start", None), ("whole", None), ("done", 0), ("whole", None), ("done", 0)]
)


# These orders also take the routing of step 0 from a separate program.


def dispatch_given(shape, group, step, routing):
    inflight = checked.dispatch_start(shape, group, step, routing)
    return check_dispatch(shape, group, step, inflight)[1]


def combine_given(shape, group, step, routing):
    rank, token, k = routing.row_rank, routing.row_token, routing.row_k
    y = checked.tokens_at(shape, step, rank, token)
    y = checked.expert_output(y, routing, group)
    weights = checked.weights_at(step, rank, token, k)
    inflight = ma.combine_start(checked.weighted(y, weights), routing)
    ids = checked.own_ids(shape, group, 0)
    return checked.count_sums(shape, group, step, ids, ma.combine_done(inflight))
