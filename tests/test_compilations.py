"""Test that JAX compiles the training step of docs/recipes.md only once."""

import contextlib

import jax
import numpy as np
import optax
import pytest
import test_docs
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma

pytestmark = [
    pytest.mark.one_process("meshes of several axes"),
    pytest.mark.several_devices("meshes of several axes"),
    pytest.mark.exchanges(0),
]

COMPILED = []  # functions that are called after each compilation
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: (
        [noted() for noted in COMPILED] if event.endswith("backend_compile_duration") else None
    )
)


@contextlib.contextmanager
def counted():
    found = []
    COMPILED.append(lambda: found.append(1))
    try:
        yield found
    finally:
        COMPILED.clear()


def restored(tree, folder):
    """Return a pytree that was saved as a checkpoint and restored with the same shardings."""
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree
    )
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder, shapes)


@pytest.fixture(params=(AxisType.Auto, AxisType.Explicit), ids=str)
def recipes(request, monkeypatch):
    """Return the global variables of the first snippet of docs/recipes.md, run with one type of
    mesh axes."""
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    make_mesh = jax.make_mesh
    monkeypatch.setattr(
        jax,
        "make_mesh",
        lambda shape, names, *_, **options: make_mesh(
            shape, names, (request.param,) * len(names), **options
        ),
    )
    names = {"__name__": "__main__"}
    test_docs.run(test_docs.snippets_of("docs/recipes.md")[0], names)
    assert set(names["mesh"].axis_types) == {request.param}
    return names


@pytest.mark.promotes("optax mixes numbers and arrays")
def test_the_recipe_compiles_once_with_adamw_accumulation_and_restore(recipes, tmp_path):
    recipes["optimizer"] = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=2)
    axes, mesh = ma.Axes("ep", data="data", fsdp="data"), recipes["mesh"]
    with jax.set_mesh(mesh):
        params, state = recipes["start"](axes)
        specs = ma.moe_partition_specs(params, axes)
        moments = state.inner_opt_state[0].mu, state.inner_opt_state[0].nu, state.acc_grads
        for tree in (params, *moments):
            is_placed = lambda array, spec: array.sharding.is_equivalent_to(
                NamedSharding(mesh, spec), array.ndim
            )
            assert all(jax.tree.leaves(jax.tree.map(is_placed, tree, specs)))
        step, x = recipes["train_step"](), recipes["x"]
        params, state, *_ = step(params, state, x)
        with counted() as compiled:
            for _ in range(2):
                params, state, *_ = step(params, state, x)
        assert not compiled
        before = jax.tree.map(np.asarray, (params, state))
        params, state = restored((params, state), tmp_path / "step")
        jax.tree.map(np.testing.assert_array_equal, (params, state), before)
        with counted() as compiled:
            step(params, state, x)
        assert not compiled
        # With Explicit axes, results have longer specs than arguments, so the cache has 2 entries.
        if AxisType.Auto in mesh.axis_types:
            assert step._cache_size() == 1


@pytest.mark.promotes("optax mixes numbers and arrays")
def test_only_a_state_that_is_placed_otherwise_compiles_a_second_program(recipes):
    """Equal shardings in another form, such as `P(None)` for `P()`, compile no second program."""
    optimizer, mesh, x = recipes["optimizer"], recipes["mesh"], recipes["x"]
    is_auto = set(mesh.axis_types) == {AxisType.Auto}
    with jax.set_mesh(mesh):
        step = recipes["train_step"]()
        params, state = recipes["start"]()
        step(params, state, x)

        def padded(array):
            spec = array.sharding.spec
            spec = P(*spec, *(None,) * (array.ndim - len(spec)))
            return jax.device_put(array, NamedSharding(mesh, spec))

        with counted() as compiled:
            step(*jax.tree.map(padded, (params, state)), x)
        assert not compiled
        unplaced = jax.jit(optimizer.init)(params)
        with counted() as compiled:
            step(params, unplaced, x)
        assert bool(compiled) == is_auto  # with Explicit axes, `init` shards the state
