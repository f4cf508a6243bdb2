"""The benchmark runs on CPU, its plain methods equal ours, and its checks can fail."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
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
    overlap,
    placement,
    processes,
    products,
    record,
    report,
    run,
    slice_layers,
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


def rows_of_plans(a_run, plans, methods=None):
    """Return rows of plans whose numbers mean nothing."""
    rows = []
    for plan in plans:
        for method in filter(None, methods or plan.methods):
            variant = suite.Variant(plan, method, a_run.group(), None, [])
            for op in plan.ops:
                timed = suite.Timed(operations.Operation(*op, None, None, 2), None, None)
                result = timing.Timing(30.0, 20.0, 40.0)
                rows.append(suite.make_row(a_run, variant, timed, result, 4))
    return rows


def run_module(*command, **environment):
    """Return what a module prints when it runs by itself, on the CPU."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT), **environment),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_on_cpu_the_record_is_complete_and_the_output_denies_that_it_is_of_gpus(tmp_path):
    out = tmp_path / "record.json"
    output = run_module(
        *("benchmarks", "--tokens", "3", "--samples", "1", "--methods", "ours", "--out", str(out)),
        MOE_A2A_COMMIT="abc",
    )
    assert "NOT GPU figures" in output
    found = json.loads(out.read_text())
    assert {"date", "commit", "gpus", "ranks", "versions", "rows"} <= found.keys()
    assert found["commit"] == "abc"
    assert "not GPU figures" in found["gpus"]
    assert found["failures"] == []
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


def test_rows_without_anything_to_check_them_by_are_refused():
    with pytest.raises(AssertionError, match="nothing to check"):
        operations.check(dict(errors={}), None)


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


@pytest.mark.parametrize(("tied_axes", "barriers"), [(2, 5), (None, 5 + 4)])
def test_a_chain_asks_for_every_repetition_with_a_barrier_after_each(tied_axes, barriers):
    def step(state, fixed):
        return jnp.sin(state) + fixed

    chain = timing.chain(step, 5, tied_axes)
    text = jax.jit(chain).lower(jnp.ones(3), jnp.ones(3)).as_text()
    assert text.count("optimization_barrier") == barriers
    assert text.count("call @") == 5


def test_a_chain_that_carries_passes_the_first_result_to_the_next_repetition():
    def step(state, factor):
        x, weights = state
        return x * factor, weights + x[0]

    chain = timing.chain(step, 3, carries=True)
    x, weights, _ = chain((jnp.full(2, 1.0), jnp.full(1, 5.0)), 2.0)
    assert (x, weights) == (8.0, 9.0)


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


def test_a_tie_is_on_the_smallest_matrix_of_integers_or_on_all_integers():
    leaves = [np.ones((1, 1)), np.ones(3, int), np.ones((5, 2), int), np.ones((2, 2), int)]
    assert timing.pick_tied(leaves) == [3]
    assert timing.pick_tied(leaves, None) == [1, 3, 2]
    assert timing.pick_tied(leaves[:2]) == [1]
    assert timing.pick_tied(leaves[:1]) == [0]


def test_a_chain_of_ties_holds_every_tie():
    state = ([jnp.ones((4, 4), jnp.int32)], [jnp.ones(1)])
    text = jax.jit(timing.chain_of_ties(5)).lower(state).as_text()
    assert text.count("call @") == text.count("optimization_barrier") == 5


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


def measure_by_own_clock(monkeypatch, seconds_of_call, **options):
    """Return what `timing.measure` returns if its n-th call takes so long, and how many calls it
    has made."""
    now, num_calls = 0.0, 0

    def program():
        nonlocal now, num_calls
        num_calls += 1
        now += seconds_of_call(num_calls)
        return ()

    clock = types.SimpleNamespace(perf_counter=lambda: now, sleep=lambda seconds: None)
    monkeypatch.setattr(timing, "time", clock)
    timed = timing.measure(program, (), sample_seconds=4, **options)
    return timed, num_calls


def test_a_sample_in_which_more_calls_took_no_longer_is_taken_again(monkeypatch):
    measured = functools.partial(measure_by_own_clock, monkeypatch, reps=2, samples=2)
    # Three calls tell how long one takes, five warm up; samples are of five calls and of one.
    half_a_second = timing.Timing(5e5, 5e5, 5e5)
    assert measured(lambda n: 1.0) == (half_a_second, 3 + 5 + 2 * 6)
    odd_first_sample = measured(lambda n: 10.0 if n == 3 + 5 + 6 else 1.0)
    assert odd_first_sample == (half_a_second, 3 + 5 + 3 * 6)
    with pytest.raises(RuntimeError, match="5 calls must take longer than 1"):
        measured(lambda n: 1.0 if n <= 3 else 0.0)


def test_pauses_are_not_timed(monkeypatch):
    now = 0.0

    def take(seconds):
        nonlocal now
        now += seconds
        return ()

    clock = types.SimpleNamespace(perf_counter=lambda: now, sleep=take)
    monkeypatch.setattr(timing, "time", clock)
    sample = timing.sampler(lambda: take(1.0), (), reps=2, sample_seconds=4, pause=10.0)
    assert sample() == 5e5


def test_several_processes_make_the_calls_and_take_the_times_that_they_agree_on(monkeypatch):
    half_as_long, num_calls = measure_by_own_clock(
        monkeypatch, lambda n: 1.0, reps=1, samples=1, agreed=lambda seconds: seconds / 2
    )
    assert half_as_long.median_us == 5e5
    # As a call of half a second: samples are of eight calls after two.
    assert num_calls == 3 + 10 + 12


def test_round_trips_in_two_processes_have_a_record(tmp_path):
    out = tmp_path / "record.json"
    options = ("--layouts", "2", "--tokens", "3", "--samples", "1", "--out", str(out))
    assert "NOT GPU figures" in run_module("benchmarks.processes", *options)
    found = json.loads(out.read_text())
    assert found["failures"] == []
    (row,) = found["rows"]
    assert (row["op"], row["tokens"], row["processes"], row["hosts"]) == ("round_trip", 3, 2, 1)
    assert 0 < row["min_us"] <= row["us"] <= row["max_us"]
    assert out.with_name("record-processes.png").stat().st_size > 0


def test_layouts_of_processes_share_the_devices_in_every_way():
    layouts = list(map(str, processes.all_layouts(4)))
    assert layouts == ["1:1", "2:1", "4:1", "1:2"]
    with pytest.raises(RuntimeError, match="4 devices are not to be shared by 3"):
        processes.run_layout(processes.parse([]), processes.layout_of("3"), 4, True)


@pytest.mark.parametrize("name", sweeps.SWEEPS)
def test_a_sweep_asks_for_its_sizes_and_says_what_bounds_them(name):
    on_gpu = name not in ("tokens", "ladder")  # whose largest size takes long to draw
    plans = sweeps.plans(name, 4, on_gpu)
    assert len(plans) >= (2 if on_gpu else 1)
    wires = dict(results=[dict(bytes=1000, median_us=2.0)], local_gb_per_s=4000)
    a_run = run_of(harness.mesh_of(1), wires)
    for plan in plans:
        assert plan.sweep == name
        assert plan.ops
        setting = plan.workload.setting
        assert plan.reference or (setting.dtype != "uint8" and setting.formatted in ("", "sums"))
        found = suite.bounds(a_run, "dispatch", plan.workload)
        if setting.mode == "replicated":  # nothing is exchanged
            assert found["bound_us"] is None
            continue
        assert found["wire_us"] == pytest.approx(plan.workload.busiest_bytes / 500, abs=1e-3)
        assert found["bound_us"] == max(found["wire_us"], found["memory_us"])


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


def test_in_a_skewed_routing_rank_0_gets_four_times_its_share():
    setting = workload.Setting(2000, hidden=8, top_k=4, experts=64, skew=4)
    ids = workload.draw(setting, 8).ids
    share = (ids < 8).mean() * 8
    assert abs(share - 4) < 0.1


@pytest.mark.parametrize("change", [dict(idle=1), dict(sigma=1.7)], ids=str)
def test_popular_experts_and_idle_ranks_are_drawn_and_exchanged(change):
    setting, ranks = dataclasses.replace(SETTING, tokens=200, **change), 4
    work = workload.draw(setting, ranks)
    rows = np.bincount(work.ids.ravel() // (setting.experts // ranks), minlength=ranks)
    assert work.load == pytest.approx(rows.max() / rows.mean())
    goes_to = [{e // (setting.experts // ranks) for e in ids} for ids in work.ids.reshape(-1, 3)]
    assert work.fan_out == pytest.approx(sum(map(len, goes_to)) / len(goes_to))
    assert all(len(set(ids)) == setting.top_k for ids in work.ids.reshape(-1, setting.top_k))
    assert rows[-1] == 0 if "idle" in change else work.load > 1.2
    work = workload.draw(dataclasses.replace(SETTING, **change), harness.SEVERAL)
    ours = prepared_by(methods.ours, work, ())
    operations.check(ours, None)
    operations.check(prepared_by(methods.all_gather, work, ()), ours)


@pytest.mark.parametrize(("path", "name"), report.sections(), ids=str)
def test_the_documents_say_what_the_records_have(path, name):
    text = path.read_text()
    assert all(text.count(mark.format(name)) == 1 for mark in (report.BEGIN, report.END))
    assert report.with_section(text, name, report.sections()[path, name]) == text, (
        f"{path} differs from the records: run python -m benchmarks.report"
    )


def test_a_record_is_shown_with_every_sweep(tmp_path):
    """The records are of tiny sweeps, and their numbers mean nothing."""
    mesh = harness.mesh_of(harness.FEW)
    wires = dict(local_gb_per_s=4000.0, results=[dict(bytes=1000, median_us=3.0)])
    rows = []
    for name in sweeps.SWEEPS:
        rows += rows_of_plans(run_of(mesh, wires), sweeps.plans(name, harness.FEW, False))
    crossing = [r for r in rows if r["op"] != "route" and r["mode"] != "replicated"]
    assert all(row["wire_us"] for row in crossing)
    next_to = dict(products="default", pairs=4, columns=128, exchange_us=20.0, products_us=25.0)
    next_to.update(num_sms=24, ratio_to_longer=1.2, cost_us=7.0)
    rows += [dict(rows[0], sweep="overlap", op=op, **next_to) for op in overlap.OPS]
    layouts = processes.Layout(1), processes.Layout(2, 2)
    rows += [dict(rows[0], sweep="processes", **layout._asdict()) for layout in layouts]
    path = tmp_path / "2000-01-01-2xnone.json"
    record.write(dict(run.describe_run(mesh, 0, wire=wires), rows=rows), path)
    found = record.read(path)
    text = "\n".join(report.tables(found["rows"]))
    for part in (
        *(f"{name}\n\n|" for name in sweeps.SWEEPS),
        "| op | µs | GB/s | exchange alone | products alone | ratio | cost |",
        "| MxFp8 | decoded | dispatch without route | 30.0 |",
        "| replicated | combine | local | 30.0 |",
        "| 2 | 2 | 30.0 |",  # processes
    ):
        assert part in text
    drawn = ("tokens", "formats", "overlap", "processes")  # lines and bars
    found["rows"] = [row for row in found["rows"] if row["sweep"] in (*drawn, "sms")]
    made = report.plot(found, path)  # nothing of "sms", because it has no SMs here
    assert [image.name for image in made] == [f"{path.stem}-{name}.png" for name in drawn]
    assert all(image.stat().st_size > 0 for image in made)


def test_an_older_record_is_read_with_the_entries_of_newer_ones(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(dict(ranks=4, rows=[dict(op="combine", method="ours", skew=4)])))
    (row,) = record.read(path)["rows"]
    assert (row["op"], row["skew"], row["sigma"], row["format"]) == ("combine", 4, 0, "")


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
    monkeypatch.setattr(record, "newest", functools.partial(record.newest, folder=tmp_path))
    assert "| **this package** |" in report.steps_in_short(tmp_path)
    assert "16 experts, 4,096 rows per expert" in report.steps_in_full(tmp_path)


def test_a_model_varies_one_setting_at_a_time():
    options = "--geometries qwen3 dsv3 --rows 4096 512 --micro-batches 1 8"
    found = [tuple(step) for step in model.steps(model.parse(options.split()))]
    first = [(name, 4096, "uniform", 1) for name in ("qwen3", "dsv3")]
    assert found[:2] == first
    assert found[2:4] == [("qwen3", 512, "uniform", 1), ("qwen3", 4096, "uniform", 8)]
    assert len(found) == 6


def test_kernels_of_a_trace_are_summed_by_name():
    launches = [("nccl", 1e3, "a"), ("moe_a2a::gemm", 5e3, ""), ("nccl", 2e3, "b")]
    found = kernels.summed(launches)
    assert [(k.kind, k.calls, k.us) for k in found] == [("our products", 1, 5), ("NCCL", 2, 3)]
    assert "8.0 us in all" in kernels.in_words(found)


def test_a_layer_is_measured_with_every_result_checked(tmp_path):
    out = tmp_path / "layer.json"
    options = "--only training --ranks 2 --out"
    run_module("benchmarks.layer", *options.split(), str(out), XLA_FLAGS="")
    found = json.loads(out.read_text())
    rows = found["rows"]
    assert found["failures"] == []
    assert {row["op"] for row in rows if row["sweep"] == "grouped"} == {
        "experts",
        "experts_and_gradients",
    }
    measured = {(row["method"], row["op"]) for row in rows if row["sweep"] == "layer"}
    ops = ("forward", "forward_and_gradients")
    methods = *layer.OURS, "all_gather", "dense"
    expected = {(m, op) for m in methods for op in ops}
    assert measured == expected - {(layer.OF_FP8, "forward_and_gradients")}
    assert (tmp_path / "layer.png").stat().st_size > 0


def test_layers_have_the_asked_tokens_popularity_and_capacities():
    options = "--shapes deepseek-v3 --tokens 8 1024 --sigma 1.1 --capacities worst 1.25"
    args = layer.parse(options.split())
    found = layer.shapes(args, ranks=4, on_gpu=True)
    work = [shape.workload for shape in found]
    assert [w.capacity for w in work] == [4 * 64, 80, 4 * 8192, 10240]
    assert [shape.is_training for shape in found] == [False, False, True, True]
    assert {w.setting.sigma for w in work} == {1.1}
    for shape in found:
        drops = shape.workload.load > 1.25 and shape.workload.setting.capacity == "1.25"
        assert drops == (shape.workload.dropped > 0)
        assert drops == (shape.reference == "ours")
        assert drops != ("all_gather" in layer.methods(args, shape, "grouped_dot", on_gpu=True))
    assert found[-1].workload.dropped > 0
    with pytest.raises(SystemExit):
        layer.parse(["--capacities", "loose"])


def test_a_layer_that_drops_rows_is_checked_with_ours(tmp_path):
    out = tmp_path / "layer.json"
    options = "--ranks 2 --tokens 8 --capacities 0.5 --no-experts --methods all_gather moe_mlp"
    run_module("benchmarks.layer", *options.split(), "--no-plot", "--out", str(out))
    found = json.loads(out.read_text())
    assert found["failures"] == []
    (row,) = found["rows"]
    assert (row["method"], row["sweep"], row["capacity"]) == ("moe_mlp", "decode", 8)
    assert row["dropped"] == 0.5


def test_named_layers_are_measured_one_by_one():
    args = layer.parse(["--shapes", "B", "qwen3-30b"])
    found = layer.shapes(args, ranks=4, on_gpu=True)
    assert [(shape.name, shape.workload.setting.tokens) for shape in found] == [
        *(("B", tokens) for tokens in (4096, 64, 8)),
        *(("qwen3-30b", tokens) for tokens in (8192, 64, 8)),
    ]
    assert {shape.intermediate for shape in found} == {2048, 768}
    rows = [
        dict(
            sweep="layer", shape=shape.name, tokens=8, grouped="", method="ours", op="forward", us=1
        )
        for shape in found[::3]
    ]
    (text,) = report.tables(rows)
    assert "| B | 1 |" in text and "| qwen3-30b | 1 |" in text


def test_the_performance_page_says_of_how_many_gpus_each_of_its_figures_is(tmp_path, monkeypatch):
    """The standard settings ran on four GPUs and token formats on two. The page also says which
    figure is of kernels with test hooks."""
    found = records_of_sweep("", ranks=4)
    formats = dict(records_of_sweep("formats", ranks=2), test_hooks=True)
    for name, one in (("a-4xH200", found), ("b-2xH200-formats", formats)):
        record.write(one, tmp_path / f"{name}.json")
    monkeypatch.setattr(record, "newest", functools.partial(record.newest, folder=tmp_path))
    text = report.sections()[report.PERFORMANCE, "results"]
    title = "Token formats, 2 × H200, jax 0, CUDA 13.0, built with test hooks, 2000-01-01:"
    assert text.index("4 × H200, jax 0, CUDA 13.0, 2000-01-01 ([record](") < text.index(title)
    assert text.count("test hooks") == 1
    assert "a-4xH200.png)" in text and "b-2xH200-formats.png)" in text


def records_of_sweep(sweep, ranks):
    """Return a record whose numbers mean nothing."""
    a_run = run_of(harness.mesh_of(1))
    setting = workload.Setting(16, **workload.TINY)
    made = [suite.Plan(workload.draw(setting, ranks))]
    plans = sweeps.plans(sweep, ranks, False) if sweep else made
    a_run.record["rows"] += rows_of_plans(a_run, plans, ["ours"])
    head = dict(date="2000-01-01", commit="abc", gpus=f"{ranks} x NVIDIA H200", ranks=ranks)
    return dict(head, versions=dict(jax="0", platform="cuda 13000"), **a_run.record)


@pytest.mark.parametrize("mode", ["shared", "replicated", "map"])
def test_a_mode_returns_the_sums_and_gradients_of_the_same_program_without_it(mode):
    work = workload.draw(dataclasses.replace(SETTING, mode=mode), harness.FEW)
    ours = prepared_by(methods.ours, work)
    operations.check(ours, None)
    if mode in sweeps.WITHOUT_MODE:
        other = methods.METHODS[sweeps.WITHOUT_MODE[mode]]
        operations.check(prepared_by(other, work), ours)


def test_a_shared_expert_whose_output_is_lost_is_refused():
    work = workload.draw(dataclasses.replace(SETTING, mode="shared"), harness.FEW)

    def without(work, group):
        right = methods.ours(work, group)

        def combine(rows, state):
            return right.combine(rows.at[: SETTING.tokens].set(0), state)

        return right._replace(combine=combine)

    with pytest.raises(AssertionError, match="^(out|dx) is wrong"):
        operations.check(prepared_by(without, work), None)


@pytest.mark.parametrize("formatted", ["rows", "decoded"])
def test_rows_in_a_format_are_those_of_tokens_that_were_quantized_before(formatted):
    setting = dataclasses.replace(SETTING, hidden=128, format="MxFp8", formatted=formatted)
    work = workload.draw(setting, harness.FEW)
    reference = prepared_by(methods.encoded, work, (operations.EXCHANGE,))
    ours = prepared_by(methods.ours, work, (operations.EXCHANGE,))
    operations.check(ours, reference, operations.FORMAT_TOLERANCE["MxFp8"])
    if formatted == "decoded":
        with pytest.raises(AssertionError, match="^out is wrong"):  # it has been quantized
            operations.check(ours, reference)
        return
    rows = ours["rows"]
    wrong_scales = rows._replace(scales=jnp.roll(rows.scales, 1, axis=1))
    with pytest.raises(AssertionError, match="rows or group sizes differ"):
        operations.check(dict(ours, rows=wrong_scales), reference)


def test_a_quick_sweep_of_formats_is_recorded_row_by_row(tmp_path):
    out = tmp_path / "formats.json"
    options = ("--sweep", "formats", "--quick", "--ranks", "2", "--samples", "1", "--no-plot")
    run_module("benchmarks", *options, "--out", str(out), XLA_FLAGS="")
    rows = json.loads(out.read_text())["rows"]
    measured = [(row["format"], row["formatted"], row["op"], row["includes_route"]) for row in rows]
    one_way = [("dispatch", False), ("dispatch", True)]
    assert measured == [
        *(("", "", *op) for op in (*one_way, ("combine", False))),
        *(("BlockwiseFp8", formatted, *op) for formatted in ("rows", "decoded") for op in one_way),
        ("BlockwiseFp8", "sums", "combine", False),
    ]
    hidden, wire_bytes = 128, 132
    bare, *formatted = (row["busiest_bytes"] for row in rows if row["op"] == "dispatch")
    assert all(row * 2 * hidden == bare * wire_bytes for row in formatted[1:])


def test_a_run_that_ends_early_leaves_the_rows_that_it_has(tmp_path):
    a_run = run_of(harness.mesh_of(1))
    a_run = dataclasses.replace(a_run, path=tmp_path / "record.json", deadline=time.perf_counter())
    a_run.add(dict(op="combine"))
    assert json.loads(a_run.path.read_text())["rows"] == [dict(op="combine")]
    with pytest.raises(TimeoutError, match="budget is spent"):
        a_run.check_time()


@pytest.mark.parametrize("fails", (False, True))
def test_turns_of_a_group_that_failed_leave_no_row(fails):
    def check():
        if fails:
            raise RuntimeError("a peer is late")

    a_run = run_of(harness.mesh_of(1))
    program = a_run.start(lambda x: (x + 1,), jnp.zeros((1, 8)), exchanges=0)
    job = run.Job("forward", program, lambda args: args, lambda timed, reps: dict(reps=reps))
    case = run.Case(
        "layer", lambda: (jnp.zeros((1, 8)),), [job], types.SimpleNamespace(check=check)
    )
    with pytest.raises(RuntimeError, match="late") if fails else contextlib.nullcontext():
        a_run.measure_in_turns([case])
    assert a_run.record["rows"] == ([] if fails else [dict(reps=1)])
    assert a_run.record["failures"] == []


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
    w_in = jax.random.normal(keys[1], (4, 16, 16))
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


def test_grouped_products_are_measured_and_checked(tmp_path):
    out = tmp_path / "products.json"
    run_module("benchmarks.products", "--out", str(out), XLA_FLAGS="")
    found = json.loads(out.read_text())
    assert found["failures"] == []
    ours = [row["op"] for row in found["rows"] if row["method"] == "ours"]
    assert ours == ["experts", "experts_and_gradients", "forward", "d_rows", "d_weights"]
    assert (tmp_path / "products.png").stat().st_size > 0


def test_a_wrong_grouped_product_is_a_failure(monkeypatch):
    wrong = {products.RAGGED: lambda rows, w, sizes: jax.lax.ragged_dot(rows, w, sizes) * 1.1}
    monkeypatch.setattr(products, "products", lambda: wrong)
    a_run = run_of(harness.mesh_of(1))
    for setting in products.FIRST_OF_EACH:
        products.measure(a_run, products.tiny(setting))
    assert a_run.record["rows"] == []
    of_experts, of_one_product = a_run.record["failures"]
    assert "experts by lax.ragged_dot: AssertionError: the result is wrong" in of_experts
    assert "lax.ragged_dot: AssertionError: the result is wrong by 1.0e-01" in of_one_product


def test_work_during_an_exchange_is_measured_and_checked(tmp_path):
    out = tmp_path / "overlap.json"
    options = ("--only", "dispatch", "--ranks", "2", "--num-sms", "8", "--no-long", "--quick")
    printed = run_module("benchmarks.overlap", *options, "--out", str(out), XLA_FLAGS="")
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["op"], row["sweep"], row["num_sms"], row["pairs"]) == ("dispatch", "overlap", 8, 4)
    longer = max(row["exchange_us"], row["products_us"])
    if longer > 10:  # below, rounding shows
        assert row["ratio_to_longer"] == pytest.approx(row["us"] / longer, abs=2e-3)
    assert "goal: at most 1.3 x" in printed


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
