"""A product and the combine next to it, where a foreign kernel holds the other multiprocessors
(SMs) and waits for what a peer does after its own call, as a collective of NCCL may.

`docs/protocol_split.md` ("Next to kernels that wait for a peer") says why room for one cluster of
the product, and for one block of the combine of each rank, is enough.
"""

import contextlib
import dataclasses
import functools
import re
import time

import cases
import checked
import harness
import holder
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_moe_a2a as ma

pytestmark = pytest.mark.one_process("it waits for results of all ranks")

RANKS = harness.SEVERAL
CALL = "moe_a2a_dot_combine"
INNER = 512
LAYOUT = cases.Layout("room", tokens=512, top_k=3, local_experts=2, hidden=2048)
TIMEOUT = 2.0
# A block of the foreign kernel ends by itself long after the exchange must have ended.
LIMIT = 10 * TIMEOUT
# One cluster of the product has two SMs. Ranks that share a GPU need a block each.
LEAST = max(2, harness.RANKS_ON_ONE_GPU)
OF_A_COLLECTIVE = 64  # the most blocks that NCCL launches
# More blocks than SMs: those that start on a free SM end at once.
QUEUED = 4096


def arrive(x, ids, topk_weights, *, group):
    """Return the operands of `leave`, except the weights [L, K, H]."""
    recv = ma.dispatch(x, ids, topk_weights, **LAYOUT.route_args(group))
    return recv.rows[:, :INNER], recv.group_sizes, recv.routing


def leave(rows, group_sizes, routing, w_out, *, group):
    routing = dataclasses.replace(routing, group=group)  # whose num_sms decides
    return ma.combine(ma.grouped_dot(rows, w_out, group_sizes), routing)


@functools.cache
def group_of(num_sms):
    return harness.group_of(
        RANKS,
        num_sms={"dot_combine": num_sms},
        timeout=TIMEOUT,
        first_timeout=TIMEOUT,
        cuda_graphs=False,
    )


@functools.cache
def program(fn, num_sms):
    """Return the compiled function of all ranks' arrays. With `num_sms` 0, a combine follows its
    product."""
    return jax.jit(harness.over_ranks(functools.partial(fn, group=group_of(num_sms))))


def operands(routing, seed):
    """Return the operands of `leave` on all ranks."""
    rng = np.random.default_rng(seed)
    x = cases.normal(rng, (RANKS, LAYOUT.tokens, LAYOUT.hidden), "float32")
    w_out = cases.normal(rng, (RANKS, LAYOUT.local_experts, INNER, LAYOUT.hidden), "float32")
    topk_weights = cases.normal(rng, (RANKS, LAYOUT.tokens, LAYOUT.top_k), "float32")
    ids = cases.Case(LAYOUT, routing).ids(RANKS, seed)
    sharding = harness.placement(harness.mesh_of(RANKS))
    x, w_out = (harness.put(jnp.asarray(0.2 * a, jnp.bfloat16), sharding) for a in (x, w_out))
    return *program(arrive, 0)(x, ids, topk_weights), w_out


@functools.cache
def first_number(device):
    """Return a program that runs on a device after the program that makes its operand."""
    program = jax.jit(lambda sums: sums.ravel()[0] + 1)
    jax.block_until_ready(program(jax.device_put(jnp.zeros((2, 2), jnp.bfloat16), device)))
    return program


def parts_of(sums):
    """Return the sums by device, in the order of ranks."""
    shards = {shard.device: shard.data for shard in sums.addressable_shards}
    return [shards[device] for device in devices()]


def devices():
    return jax.devices()[:1] if checked.ONE_GPU else list(harness.mesh_of(RANKS).devices.flat)


def release_each_after_its_peer(holders, sums):
    """Release each foreign kernel when a program that follows the call on the next GPU has
    ended."""
    parts = parts_of(sums)
    for rank, each in enumerate(holders):
        peer = (rank + 1) % len(holders)
        jax.block_until_ready(first_number(devices()[peer])(parts[peer]))
        each.release()


def bits(sums):
    return np.asarray(sums).view(np.uint16)


@pytest.fixture(scope="module")
def holders():
    """Return the foreign kernel of each GPU. No program is loaded while one of them runs."""
    made = [holder.Holder(device.local_hardware_id, LIMIT) for device in devices()]
    for device, shape in ((device, part.shape) for device, part in zip(devices(), warm_up())):
        jax.block_until_ready(
            first_number(device)(jax.device_put(jnp.zeros(shape, jnp.bfloat16), device))
        )
    yield made
    for each in made:
        each.close()


def warm_up():
    """Run all programs, and return the parts of the sums."""
    args = operands("uniform", 0)
    text = program(leave, 16).lower(*args).as_text()
    assert len(re.findall(f"@{CALL}", text)) == 1
    assert CALL not in program(leave, 0).lower(*args).as_text()
    jax.block_until_ready(program(leave, 0)(*args))
    return parts_of(jax.block_until_ready(program(leave, 16)(*args)))


@pytest.fixture(autouse=True)
def closed_afterwards():
    """Close the group, because these tests note no exchanges."""
    yield
    checked.close(group_of(0))


@pytest.mark.parametrize("room", ("least", "next_to_a_collective"))
@pytest.mark.parametrize("blocks", (None, QUEUED), ids=("before", "during"))
def test_sums_are_right_while_other_kernels_hold_the_rest(holders, blocks, room):
    num_held = []
    for seed, routing in enumerate(("uniform", "skewed", "masked", "idle_rank") * 2):
        args = operands(routing, seed)
        expected = bits(program(leave, 0)(*args))
        jax.block_until_ready(program(leave, 16)(*args))  # the memory that it needs is there
        with contextlib.ExitStack() as stack:
            if blocks is not None:
                sums = program(leave, 16)(*args)
                time.sleep(5e-5 * seed)
            for each in holders:
                num_free = LEAST if room == "least" else each.num_sms - OF_A_COLLECTIVE
                stack.enter_context(each.holding(num_free, blocks=blocks))
            if blocks is None:
                sums = program(leave, 16)(*args)
            release_each_after_its_peer(holders, sums)
            num_held += [len(each.held) for each in holders]
        assert not any(each.has_expired for each in holders), (routing, seed)
        np.testing.assert_array_equal(bits(sums), expected, err_msg=f"{routing} {seed}")
        group_of(16).check()
        if blocks is None:
            assert num_held[-1] == holders[-1].num_sms - num_free
    assert max(num_held) > 0


def test_a_call_without_room_ends_with_an_error_in_time(holders):
    """One SM is too few for a cluster. The foreign kernel waits for longer than the exchange
    may."""
    args = operands("uniform", 1)
    expected = np.asarray(program(leave, 0)(*args)).astype(np.float32)
    jax.block_until_ready(program(leave, 16)(*args))
    with holders[0].holding(1):
        start = time.monotonic()
        sums = program(leave, 16)(*args)
        error = first_error(start + LIMIT / 2)
        seconds = time.monotonic() - start
        assert not holders[0].has_expired
    found = np.asarray(sums).astype(np.float32)
    # The wait for the product's start, and then the wait for its first slice.
    assert TIMEOUT <= seconds < 2 * TIMEOUT + 1.0, (seconds, error)
    assert re.search(
        r"timeout: combine on rank \d+, waiting for a (slice of columns|chunk of rows)", error
    ), error
    assert np.isnan(found).any()
    assert (np.isnan(found) | (found == expected)).all()

    checked.close(group_of(0))
    again = np.asarray(program(leave, 16)(*args)).astype(np.float32)
    np.testing.assert_array_equal(again, expected)


def first_error(end):
    """Return the error of the group, which it reports while a kernel that cannot end still waits;
    "" after the time `end`."""
    while time.monotonic() < end:
        try:
            group_of(16).check()
        except RuntimeError as error:
            return str(error)
        time.sleep(0.01)
    return ""
