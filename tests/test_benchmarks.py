"""The benchmark runs on CPU, its plain methods equal ours, and its checks can fail."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import methods, operations, suite, timing, wire, workload  # noqa: E402

SETTING = workload.Setting(12, hidden=16, top_k=3, experts=16)
ROW_KEYS = {
    *("op", "method", "tokens", "hidden", "top_k", "experts", "dtype", "routing", "num_sms"),
    *("median_us", "min_us", "max_us", "wire_bytes", "wire_us", "includes_route", "capacity"),
}


def test_on_cpu_the_record_is_complete_and_the_output_denies_that_it_is_of_gpus(tmp_path):
    out = tmp_path / "record.json"
    command = ["-m", "benchmarks", "--tokens", "3", "--samples", "1", "--methods", "ours"]
    done = subprocess.run(
        [sys.executable, *command, "--out", str(out)],
        cwd=ROOT,
        env=dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT), MOE_A2A_COMMIT="abc"),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT GPU figures" in done.stdout
    record = json.loads(out.read_text())
    assert {"date", "commit", "gpus", "ranks", "versions", "rows"} <= record.keys()
    assert record["commit"] == "abc"
    assert "not GPU figures" in record["gpus"]
    assert record["failures"] == []
    assert {row["op"] for row in record["rows"]} == set(operations.OPS)
    for row in record["rows"]:
        assert ROW_KEYS <= row.keys()
        assert 0 < row["min_us"] <= row["median_us"] <= row["max_us"]
    assert out.with_suffix(".png").stat().st_size > 0


def emulated_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """What lax.ragged_all_to_all means, for XLA:CPU does not have it."""
    del recv_sizes
    gather = functools.partial(lax.all_gather, axis_name=axis_name)
    operands, starts, sizes, places = map(
        gather, (operand, input_offsets, send_sizes, output_offsets)
    )
    me = lax.axis_index(axis_name)
    for rank in range(operands.shape[0]):
        index = jnp.arange(output.shape[0]) - places[rank, me]
        is_sent = (index >= 0) & (index < sizes[rank, me])
        output = jnp.where(is_sent[:, None], operands[rank][starts[rank, me] + index], output)
    return output


def prepared_by(make, work):
    """What `operations.prepare` gives for a method, on all ranks."""
    mesh = harness.mesh_of(work.ranks)
    method = make(work, harness.group_of(work.ranks))
    run_once, _ = operations.prepare(method)
    return timing.per_rank(run_once, mesh)(*suite.make_inputs(mesh, work))


def test_plain_methods_give_the_rows_sums_and_gradients_of_ours():
    work = workload.draw(SETTING, harness.SEVERAL)
    ours = prepared_by(methods.ours, work)
    operations.check(ours, None)
    ragged = functools.partial(methods.ragged, ragged_all_to_all=emulated_ragged_all_to_all)
    for make in (methods.all_gather, methods.dense, ragged):
        operations.check(prepared_by(make, work), ours)


def test_a_method_with_wrong_rows_or_sums_is_refused():
    prepared = prepared_by(methods.ours, workload.draw(SETTING, harness.SEVERAL))
    wrong_rows = dict(prepared, rows=jnp.roll(prepared["rows"], 1, axis=1))
    with pytest.raises(AssertionError, match="rows"):
        operations.check(wrong_rows, prepared)
    for name in ("out", "dx", "d_weights"):
        wrong = prepared[name].at[0, 0].multiply(-2).at[-1].set(0)
        with pytest.raises(AssertionError, match=name):
            operations.check(dict(prepared, **{name: wrong}), prepared)


def test_a_program_whose_repetitions_were_merged_is_refused():
    mesh = harness.mesh_of(harness.SEVERAL)
    x = jnp.ones((harness.SEVERAL, 4, 8))

    def gathered(x):
        return lax.all_gather(x, mesh.axis_names[0])

    compiled = timing.per_rank(lambda x: gathered(x) + gathered(x), mesh).lower(x).compile()
    timing.check_unmerged(compiled, 1)
    with pytest.raises(RuntimeError, match="must hold 2 repetitions"):
        timing.check_unmerged(compiled, 2)


def test_a_chain_asks_for_every_repetition_with_a_barrier_after_each():
    text = jax.jit(timing.chain(lambda state: jnp.sin(state) + 1, 5)).lower(jnp.ones(3)).as_text()
    assert text.count("optimization_barrier") == 5
    assert text.count("call @") == 5


@pytest.mark.parametrize("routing", ["uniform", "skewed"])
def test_wire_bytes_and_capacity_are_what_a_loop_counts(routing):
    setting = workload.Setting(50, hidden=8, top_k=3, experts=32, routing=routing)
    ranks = 4
    work = workload.draw(setting, ranks)
    local_experts = setting.experts // ranks
    leaving, entering, rows = np.zeros((3, ranks), int)
    for source in range(ranks):
        for token in range(setting.tokens):
            ids = work.ids[source, token]
            assert len(set(ids)) == setting.top_k
            for expert in ids:
                rows[expert // local_experts] += 1
            for rank in {expert // local_experts for expert in ids} - {source}:
                leaving[source] += 1
                entering[rank] += 1
    assert work.leaving_bytes == leaving.max() * setting.hidden * 2
    assert work.entering_bytes == entering.max() * setting.hidden * 2
    assert rows.max() <= work.capacity < rows.max() + 128
    assert work.capacity % 128 == 0


def test_in_a_skewed_routing_rank_0_gets_four_times_its_share():
    setting = workload.Setting(2000, hidden=8, top_k=4, experts=64, routing="skewed")
    ids = workload.draw(setting, 8).ids
    share = (ids < 8).mean() * 8
    assert abs(share - 4) < 0.1


@pytest.mark.skipif(wire.find_nvcc() is None, reason="needs nvcc")
def test_the_wire_program_compiles(tmp_path):
    assert os.access(wire.build(str(tmp_path)), os.X_OK)
