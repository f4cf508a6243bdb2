"""The benchmark runs on CPU, its plain methods equal ours, and its checks can fail."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import sys
import time
import types

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

pytestmark = [
    pytest.mark.one_process("the benchmarks are programs of one process"),
    pytest.mark.several_devices("the benchmarks divide the devices of a mesh"),
]
ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
    experts,
    kernels,
    layer,
    methods,
    model,
    operations,
    placement,
    products,
    record,
    report,
    run,
    slice_layers,
    standard,
    suite,
    sweeps,
    timing,
    wire,
    workload,
)

SETTING = workload.Setting(12, hidden=16, top_k=3, experts=16)
ROW_KEYS = {
    *("op", "method", "sweep", "tokens", "hidden", "top_k", "experts", "dtype", "routing", "skew"),
    *("num_sms", "cuda_graphs", "includes_route", "capacity", "us", "min_us", "max_us"),
    *("measured_us", "tie_us", "wire_bytes", "wire_us", "memory_us", "bound_us", "gb_per_s"),
}


def run_of(mesh, wires=None):
    """Return a run that has found nothing yet."""
    head = dict(wire=wires, rows=[], failures=[])
    return run.Run(mesh, head, None, 1, 0.001, time.perf_counter() + 600)


def run_on_cpu(module, options, out):
    """Run a benchmark with two ranks; return its record."""
    few = "--ranks 2 --samples 1 --budget 1e9"  # a budget counts from the start of the process
    assert module.main([*options.split(), *few.split(), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["failures"] == []
    return found


on_cpu = pytest.mark.skipif(harness.ON_GPU, reason="GPUs run the benchmarks themselves")


@on_cpu
def test_on_cpu_the_record_is_complete_and_denies_that_it_is_of_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv(record.COMMIT_VARIABLE, "abc")
    out = tmp_path / "record.json"
    found = run_on_cpu(standard, "--tokens 3 --methods ours", out)
    assert {"date", "commit", "gpus", "ranks", "versions", "rows"} <= found.keys()
    assert found["commit"] == "abc"
    assert "not GPU figures" in found["gpus"]
    assert {(row["op"], row["includes_route"]) for row in found["rows"]} == {*operations.STANDARD}
    for row in found["rows"]:
        assert ROW_KEYS <= row.keys()
        assert 0 <= row["min_us"] <= row["us"] <= row["max_us"]
        assert row["measured_us"] >= row["us"]
    assert out.with_suffix(".png").stat().st_size > 0


def emulated_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """Compute the result of lax.ragged_all_to_all, because XLA:CPU does not have it."""
    del recv_sizes
    gather = functools.partial(lax.all_gather, axis_name=axis_name)
    operands, starts, sizes, places = map(
        gather, (operand, input_offsets, send_sizes, output_offsets)
    )
    me, ranks = lax.axis_index(axis_name), operands.shape[0]
    starts, sizes, places = (a.reshape(ranks, ranks, -1)[:, me] for a in (starts, sizes, places))
    for rank, update in np.ndindex(sizes.shape):
        index = jnp.arange(output.shape[0]) - places[rank, update]
        is_sent = (index >= 0) & (index < sizes[rank, update])
        output = jnp.where(is_sent[:, None], operands[rank][starts[rank, update] + index], output)
    return output


def prepared_by(make, work, ops=operations.STANDARD):
    """Return what `operations.prepare` returns for a method, on all ranks."""
    mesh = harness.mesh_of(work.ranks)
    method = make(work, harness.group_of(work.ranks))
    run_once, _ = operations.prepare(method, ops)
    return timing.per_rank(run_once, mesh)(*suite.make_inputs(mesh, work))


def test_plain_methods_return_the_rows_sums_and_gradients_of_ours():
    work = workload.draw(SETTING, harness.SEVERAL)
    ours = prepared_by(methods.ours, work)
    operations.check(ours, None)
    ragged, ragged3 = (
        functools.partial(
            methods.ragged, updates=updates, ragged_all_to_all=emulated_ragged_all_to_all
        )
        for updates in (1, 3)
    )
    for make in (methods.all_gather, methods.dense, ragged, ragged3):
        operations.check(prepared_by(make, work), ours)


def test_a_method_with_wrong_rows_or_sums_is_refused():
    work = workload.draw(SETTING, harness.SEVERAL)
    prepared = prepared_by(methods.ours, work, ())
    operations.check(prepared, prepared)
    wrong_rows = dict(prepared, rows=jnp.roll(prepared["rows"], 1, axis=1))
    with pytest.raises(AssertionError, match="rows"):
        operations.check(wrong_rows, prepared)

    @jax.custom_vjp
    def wrong_gradient(x):
        return x

    wrong_gradient.defvjp(lambda x: (x, None), lambda _, g: (g.at[0].multiply(-2),))

    def wrong(name, work, group):
        right = methods.ours(work, group)

        def dispatch(x, ids, weights):
            x = wrong_gradient(x) if name == "dx" else x
            weights = wrong_gradient(weights) if name == "d_weights" else weights
            return right.dispatch(x, ids, weights)

        def combine(rows, state):
            out = right.combine(rows, state)
            if name == "out":
                out = out - lax.stop_gradient(jnp.zeros_like(out).at[0].set(out[0]))
            return out

        return right._replace(dispatch=dispatch, combine=combine)

    for name in ("out", "dx", "d_weights"):
        with pytest.raises(AssertionError, match=f"^{name} is wrong"):
            operations.check(prepared_by(functools.partial(wrong, name), work), None)


def test_a_program_whose_repetitions_were_merged_is_refused():
    mesh = harness.mesh_of(harness.SEVERAL)
    x = jnp.ones((harness.SEVERAL, 4, 8))

    def gathered(x):
        return lax.all_gather(x, mesh.axis_names[0])

    compiled = timing.per_rank(lambda x: gathered(x) + gathered(x), mesh).lower(x).compile()
    timing.check_unmerged(compiled, 1)
    for reps, exchanges in ((2, 1), (1, 2)):
        with pytest.raises(RuntimeError, match=f"must hold {reps} repetitions"):
            timing.check_unmerged(compiled, reps, exchanges)


def test_a_tie_changes_nothing_and_needs_every_result_but_no_reduction():
    leaves = [jnp.arange(6.0), jnp.arange(6).reshape(3, 2), jnp.arange(2)]
    results = [jnp.ones((2, 3), jnp.bfloat16), jnp.zeros(4, jnp.int32), jnp.ones((1, 1), jnp.uint8)]
    tied = timing.pick_tied(leaves)
    for leaf, after in zip(leaves, timing.tie(leaves, tied, results), strict=True):
        np.testing.assert_array_equal(leaf, after)
    text = jax.jit(timing.tie, static_argnums=1).lower(leaves, tuple(tied), results).as_text()
    assert text.count("stablehlo.compare") == len(results)
    assert text.count("stablehlo.add") == 1
    assert not re.search("stablehlo.(reduce|concatenate|gather|dynamic)", text)


def test_ties_are_measured_once_for_each_kind_of_program(monkeypatch):
    monkeypatch.setattr(timing, "TIE_REPS", 1)  # XLA:CPU merges several
    mesh = harness.mesh_of(harness.FEW)
    a_run = run_of(mesh)
    operation = operations.Operation(*operations.COMBINE, None, None, 2)
    ids, rows = jnp.ones((harness.FEW, 5, 2), jnp.int32), jnp.ones((harness.FEW, 7))
    keys = [suite.tie_key(operation, (ids, rows), n) for n in (3, 4, 1)]
    assert keys[0] == keys[1] == suite.TieKey(1, suite.TIE_SIZES[0], 4)
    suite.measure_ties(a_run, keys)
    assert a_run.record["failures"] == []
    assert set(a_run.tie_us) == set(keys)
    assert all(us > 0 for us in a_run.tie_us.values())
    plan = suite.Plan(workload.draw(SETTING, harness.FEW))
    variant = suite.Variant(plan, "ours", harness.group_of(harness.FEW), None, [])
    timed = suite.Timed(operation, None, keys[0])
    row = suite.make_row(a_run, variant, timed, timing.Timing(1e6, 1e6, 1e6), 4)
    assert row["tie_us"] == pytest.approx(a_run.tie_us[keys[0]] * 3 / 4, abs=1e-3)
    assert row["measured_us"] == 1e6
    assert row["us"] == pytest.approx(1e6 - row["tie_us"], abs=1e-2)


def test_a_sample_in_which_more_calls_took_no_longer_is_taken_again(monkeypatch):
    now, num_calls = 0.0, 0

    def program():
        nonlocal now, num_calls
        num_calls += 1
        now += 10.0 if num_calls == odd_call else 1.0
        return ()

    clock = types.SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr(timing, "time", clock)
    # Three calls tell how long one takes, five warm up; a sample is of five calls and of one.
    odd_call = 3 + 5 + 6
    sample_us = timing.sampler(program, (), reps=2, sample_seconds=4)
    assert sample_us() == 5e5
    assert num_calls == 3 + 5 + 2 * 6


def test_the_link_limit_of_other_sizes_is_at_the_rate_of_the_nearest():
    measured = dict(results=[dict(bytes=10, median_us=1.0), dict(bytes=1000, median_us=20.0)])
    assert wire.microseconds(measured, 10) == 1.0
    assert wire.microseconds(measured, 20) == 2.0
    assert wire.microseconds(measured, 500) == 10.0
    assert wire.microseconds(measured, 0) is None
    assert wire.microseconds(None, 10) is None


@pytest.mark.parametrize("routing", ["uniform", "skewed"])
def test_wire_bytes_and_capacity_are_what_a_loop_counts(routing):
    skew = workload.SKEW if routing == "skewed" else 1
    setting = workload.Setting(50, hidden=8, top_k=3, experts=32, skew=skew)
    ranks = 4
    work = workload.draw(setting, ranks)
    local_experts = setting.experts // ranks
    assert setting.routing == routing
    leaving, entering, rows, own = np.zeros((4, ranks), int)
    for source in range(ranks):
        for token in range(setting.tokens):
            ids = work.ids[source, token]
            assert len(set(ids)) == setting.top_k
            for expert in ids:
                rows[expert // local_experts] += 1
            for rank in {expert // local_experts for expert in ids}:
                leaving[source] += rank != source
                entering[rank] += rank != source
                own[rank] += rank == source
    assert work.leaving_bytes == leaving.max() * setting.hidden * 2
    assert work.entering_bytes == entering.max() * setting.hidden * 2
    assert rows.max() <= work.capacity < rows.max() + 128
    assert work.capacity % 128 == 0
    dispatch = setting.tokens + 2 * entering + work.capacity
    combine = rows + 2 * own + 2 * leaving + setting.tokens
    for op, moved in dict(dispatch=dispatch, combine=combine).items():
        assert work.memory_bytes[op] == moved.max() * setting.hidden * 2


@pytest.mark.parametrize(("path", "name"), report.sections(), ids=str)
def test_the_documents_say_what_the_records_have(path, name):
    text = path.read_text()
    assert all(text.count(mark.format(name)) == 1 for mark in (report.BEGIN, report.END))
    assert report.with_section(text, name, report.sections()[path, name]) == text, (
        f"{path} differs from the records: run python -m benchmarks.report"
    )


@on_cpu
def test_whole_steps_are_measured_and_wrong_losses_are_refused(tmp_path, monkeypatch):
    wrong = slice_layers.LAYERS["none"].make
    monkeypatch.setitem(slice_layers.LAYERS, "fsdp", slice_layers.Layer(wrong))
    methods = ("moe_mlp", "none", "fsdp")
    out = tmp_path / "1-model.json"
    assert model.main(
        ["--ranks", "4", "--methods", *methods, "--geometries", "qwen3", "--out", str(out)]
    )
    found = record.read(out)
    (failure,) = found["failures"]
    assert "fsdp: AssertionError: losses must be within 0.005 of those of moe_mlp" in failure
    assert {row["method"] for row in found["rows"]} == {*methods} - {"fsdp"}
    for row in found["rows"]:
        assert (row["rows"], row["routing"], row["micro_batches"]) == (4096, "uniform", 1)
        assert row["us"] > 0 and row["tokens_per_s"] > 0 and row["load"] >= 1
        assert row["is_bound"] == (row["method"] == "none")
    assert out.with_suffix(".png").stat().st_size > 0
    head = dict(found, gpus="4 x NVIDIA H100", versions=dict(jax="0", platform="cuda 13000"))
    record.write(head, out)
    all_of = record.all_of
    monkeypatch.setattr(record, "all_of", lambda sweep, _=None: all_of(sweep, tmp_path))
    assert "| **this package** |" in report.steps_in_short(tmp_path)
    assert "16 experts, 4,096 rows per expert" in report.steps_in_full(tmp_path)


def test_kernels_of_a_trace_are_summed_by_name():
    launches = [("nccl", 1e3, "a"), ("moe_a2a::gemm", 5e3, ""), ("nccl", 2e3, "b")]
    found = kernels.summed(launches)
    assert [(k.kind, k.calls, k.us) for k in found] == [("our products", 1, 5), ("NCCL", 2, 3)]
    assert "8.0 us in all" in kernels.in_words(found)


@pytest.mark.parametrize("formatted", ["rows", "decoded"])
def test_a_format_is_checked_with_a_tolerance_of_its_own(formatted):
    setting = dataclasses.replace(SETTING, hidden=128, format="MxFp8", formatted=formatted)
    work = workload.draw(setting, harness.FEW)
    ours = prepared_by(methods.ours, work, (operations.EXCHANGE,))
    operations.check(ours, None, operations.FORMAT_TOLERANCE["MxFp8"])
    with pytest.raises(AssertionError, match="^out is wrong"):  # it has been quantized
        operations.check(ours, None)


def test_the_errors_of_formats_in_the_documents_are_those_of_the_record():
    found = json.loads((record.FOLDER / "formats" / "errors.json").read_text())
    text = (ROOT / "docs" / "formats.md").read_text()
    for row in found["rows"]:
        name, *errors = row.values()
        assert " | ".join([name, *(f"{100 * error:.2f} %" for error in errors)]) in text


def test_experts_that_are_wrong_are_refused():
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = jnp.array([7, 0, 12, 9])
    is_row = jnp.arange(40)[:, None] < 28
    rows = jnp.where(is_row, jax.random.normal(keys[0], (40, 16)), 0)
    w_in = jax.random.normal(keys[1], (4, 16, 2, 8))
    w_out = jax.random.normal(keys[2], (4, 8, 16))

    def found(of_rank):
        y, vjp = jax.vjp(lambda *args: of_rank(*args, sizes), rows, w_in, w_out)
        names = ("y", "d_rows", "d_w_in", "d_w_out")
        results = dict(zip(names, (y, *vjp(rows)), strict=True))
        errors = experts.errors(results, rows, w_in, w_out, sizes, fullest=16)
        operations.check_errors(
            {f"{name} of the experts": squares for name, squares in errors.items()}
        )

    for name in ("grouped_dot", "ragged_dot"):
        right = experts.CANDIDATES[name]()
        found(right)
        with pytest.raises(AssertionError, match="experts is wrong"):
            found(lambda *args, right=right: right(*args).at[-13:].multiply(2))


@on_cpu
def test_the_stages_of_a_layer_are_measured(tmp_path):
    options = "--stages --shapes qwen3-30b --tokens 128"
    rows = run_on_cpu(layer, options, tmp_path / "stages.json")["rows"]
    stages = [row["op"] for row in rows]
    assert len(set(stages)) == len(stages) == 11
    assert {stage.rsplit(", ")[-1] for stage in stages[-3:]} >= {"bfloat16", "weights in FP8"}
    assert (tmp_path / "stages.png").stat().st_size > 0


@on_cpu
def test_a_layer_is_measured_with_every_result_checked(tmp_path):
    rows = run_on_cpu(layer, "--only training", tmp_path / "layer.json")["rows"]
    measured = {(row["method"], row["op"]) for row in rows}
    methods = *layer.OURS, "all_gather", "dense"
    expected = {(m, op) for m in methods for op in ("forward", "forward_and_gradients")}
    assert measured == expected - {(layer.OF_FP8, "forward_and_gradients")}
    assert (tmp_path / "layer.png").stat().st_size > 0


@on_cpu
def test_grouped_products_are_measured_and_checked(tmp_path):
    rows = run_on_cpu(products, "", tmp_path / "products.json")["rows"]
    ours = [row["op"] for row in rows if row["method"] == "ours"]
    assert ours == ["experts", "experts_and_gradients", "forward", "d_rows", "d_weights"]


@on_cpu
def test_experts_of_a_model_are_measured_with_each_form_of_sizes(tmp_path):
    options = "--models A --rows 512 --sizes drawn --no-plot"
    rows = run_on_cpu(products, options, tmp_path / "products.json")["rows"]
    assert [row["op"] for row in rows] == [*products.OF_EXPERTS, *products.OPS, *products.OPS]
    for sizes, mean in {"equal": 64, "+ 8": 72, "+ 136": 200, "drawn": 64, "sigma 1.1": 64}.items():
        for setting in products.of_model("Kimi-K2", 64, sizes):
            found = products.sizes_of(setting)
            assert found.sum() == setting.rows == 48 * mean
            assert (np.ptp(found) == 0) == (sizes in products.MORE_ROWS)


@pytest.mark.parametrize("name", sweeps.SWEEPS)
def test_a_sweep_asks_for_its_sizes_and_says_what_bounds_them(name):
    plans = sweeps.plans(name, 4, on_gpu=name != "tokens")  # whose largest takes long to draw
    assert len(plans) >= 2
    wires = dict(results=[dict(bytes=1000, median_us=2.0)], local_gb_per_s=4000)
    a_run = run_of(harness.mesh_of(1), wires)
    for plan in plans:
        assert plan.sweep == name and plan.ops
        found = suite.bounds(a_run, "dispatch", plan.workload)
        assert found["wire_us"] == pytest.approx(plan.workload.busiest_bytes / 500, abs=1e-3)
        assert found["bound_us"] == max(found["wire_us"], found["memory_us"])


@pytest.mark.skipif(wire.find_nvcc() is None, reason="needs nvcc")
def test_the_program_of_the_link_limit_compiles(tmp_path):
    assert os.access(wire.build(str(tmp_path)), os.X_OK)


def test_the_documents_have_the_calculated_layers_with_replicas():
    """The break-even of a replica follows from the times of a layer."""
    page = (ROOT / "docs/placement.md").read_text()
    rows = json.loads((record.FOLDER / "2026-11-26-placement-layers.json").read_text())["rows"]
    assert "\n".join(placement.table(rows)) in page
    of_row = 2 * placement.WEIGHTS_OF_EXPERT / placement.PRODUCTS_FLOPS * 1e6
    of_token = 2 * placement.HIDDEN * placement.ITEM_BYTES / placement.LINK_BYTES * 1e6
    assert f"{placement.fetch_us(1) / (of_row + of_token):,.0f} rows" in page
    assert f"from {placement.fetch_us(1) / of_row:,.0f} if" in page
