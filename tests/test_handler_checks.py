"""The handlers of the kernels refuse arrays that do not fit each other, which an exported program
may pass without any check by Python.

The checks before the program runs are taken away here; all ranks share one GPU.
"""

import contextlib

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_damaged_routing import CAPACITY, DAMAGES, EXPERTS, RANKS, TOKENS, TOP_K, replaced

import jax_moe_a2a as ma
from jax_moe_a2a._src.exchange import rules
from jax_moe_a2a._src.exchange.lowering import READ_BY_KERNELS
from jax_moe_a2a._src.group import native
from jax_moe_a2a._src.routing.types import RoutedRows, Routing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        harness.RANKS_ON_ONE_GPU > 0, reason="it closes ranks of its own that share the GPU"
    ),
]

HIDDEN = 128


@pytest.fixture
def unchecked(monkeypatch):
    assert ma.available()
    monkeypatch.setattr(native, "why_not", lambda *args: ("", 1 << 20))
    monkeypatch.setattr(rules, "check_arrays", lambda *args, **options: None)
    monkeypatch.setattr(Routing, "check", lambda *args: None)
    monkeypatch.setattr(RoutedRows, "check_rows", lambda *args: None)


def on_one_gpu(fn):
    return jax.jit(jax.vmap(fn, axis_name="ep"))


def group_of():
    return ma.Group(axis_name="ep", size=RANKS, implementation="cuda", timeout=5.0)


def arguments():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, EXPERTS, (RANKS, TOKENS, TOP_K)).astype(np.int32)
    x = rng.normal(size=(RANKS, TOKENS, HIDDEN)).astype(np.float32)
    y = rng.normal(size=(RANKS, CAPACITY, HIDDEN)).astype(np.float32)
    return ids, x, y


def damaged(use, name, damage):
    def layer(ids, x, y):
        routing = ma.route(
            ids, group=group_of(), num_experts=EXPERTS, exchange=ma.Exchange(capacity=CAPACITY)
        )
        return use(replaced(routing, name, damage), x, y)

    return on_one_gpu(layer)(*arguments())


USES = dict(
    dispatch=lambda routing, x, y: ma.dispatch(x, routing).rows,
    split=lambda routing, x, y: ma.dispatch_done(ma.dispatch_start(x, routing)).rows,
    format=lambda routing, x, y: (
        ma.dispatch(x, routing, exchange=ma.Exchange(token_format=ma.BlockwiseFp8())).rows
    ),
    combine=lambda routing, x, y: ma.combine(y, routing),
    weighted=lambda routing, x, y: ma.combine(y, routing, weights=jnp.ones(CAPACITY)),
)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", READ_BY_KERNELS)
def test_a_damaged_routing_array_is_refused_by_the_handler(unchecked, use, name):
    group_of().close()
    refused = 0
    kinds = ["float32", "int16", "more_axes"]
    if name != "row_slot":  # another length of it alone is another capacity
        kinds += ["shorter", "longer"]
    for kind in kinds:
        with contextlib.suppress(TypeError, ValueError, IndexError):  # refused before by its shape
            with pytest.raises(jax.errors.JaxRuntimeError, match="jax_moe_a2a.*must.*; got") as e:
                jax.block_until_ready(damaged(USES[use], name, DAMAGES[kind]))
            assert "INVALID_ARGUMENT" in str(e.value)
            refused += 1
    assert refused >= 2
    group_of().close()
    rows = damaged(USES["dispatch"], name, lambda array: array)
    assert np.isfinite(np.asarray(rows)).all()


@pytest.mark.parametrize("lead", (TOKENS - 1, TOKENS + 1))
def test_a_payload_with_another_leading_axis_is_refused_by_the_handler(lead):
    assert ma.available()
    group = group_of()
    native.register_targets()
    route = lambda ids: ma.route(
        ids, group=group, num_experts=EXPERTS, exchange=ma.Exchange(capacity=CAPACITY)
    )
    routing = on_one_gpu(route)(arguments()[0])
    attributes = dict(
        devices=np.array([], np.int64),
        num_ranks=np.int64(RANKS),
        workspace_kind=np.int64(native.WHOLE),
        num_sms=np.int64(8),
        timeout_ns=np.int64(5e9),
        first_timeout_ns=np.int64(5e9),
        half_bytes=np.int64(1 << 20),
        raise_failures=True,
        scopes=np.int64(0),
    )
    arrays = [getattr(routing, name) for name in READ_BY_KERNELS]

    def dispatch(x, *arrays):
        rows = jax.ShapeDtypeStruct((RANKS, CAPACITY, HIDDEN), jnp.float32)
        call = jax.ffi.ffi_call("moe_a2a_dispatch", [rows])
        return call(x, *arrays, num_choice_arrays=np.int64(0), leaves_tail=False, **attributes)

    right = jax.jit(dispatch)(jnp.ones((RANKS, TOKENS, HIDDEN)), *arrays)
    assert np.isfinite(np.asarray(right[0])).all()
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"leading axes.*; got F32\[{lead},128\]"):
        jax.block_until_ready(jax.jit(dispatch)(jnp.ones((RANKS, lead, HIDDEN)), *arrays))
