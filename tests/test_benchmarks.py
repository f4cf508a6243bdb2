"""Test that benchmarks run on CPU, that all compared methods have equal results, and that wrong
results are detected."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import types

import harness
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
    tune,
    wire,
    workload,
)
from jax_moe_a2a._src.group import native  # noqa: E402

SETTING = workload.Setting(12, hidden=16, top_k=3, experts=16)
ROW_KEYS = {
    *("op", "method", "sweep", "tokens", "hidden", "top_k", "experts", "dtype", "routing", "sigma"),
    *("num_sms", "cuda_graphs", "includes_route", "capacity", "us", "min_us", "max_us"),
    *("measured_us", "tie_us", "wire_bytes", "wire_us", "gb_per_s"),
}


def run_of(mesh):
    head = dict(wire=None, rows=[], failures=[])
    return run.Run(mesh, head, None, 1, 0.001, time.perf_counter() + 600)


def run_on_cpu(module, options, out):
    few = "--ranks 2 --samples 1 --budget 1e9"  # the budget in seconds begins with the process
    assert module.main([*options.split(), *few.split(), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["failures"] == []
    return found


on_cpu = pytest.mark.skipif(harness.ON_GPU, reason="GPUs run the benchmarks themselves")


@on_cpu
def test_a_record_of_a_cpu_is_complete_and_says_that_it_has_no_gpu_figures(tmp_path, monkeypatch):
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


def prepared_by(make, work, ops=operations.STANDARD):
    mesh = harness.mesh_of(work.ranks)
    method = make(work, harness.group_of(work.ranks))
    run_once, _ = operations.prepare(method, ops)
    return timing.per_rank(run_once, mesh)(*suite.make_inputs(mesh, work))


def test_plain_methods_return_the_rows_sums_and_gradients_of_ours():
    work = workload.draw(SETTING, harness.SEVERAL)
    ours = prepared_by(methods.ours, work)
    operations.check(ours, None)
    for make in (methods.all_gather, methods.dense):  # XLA:CPU does not have ragged_all_to_all
        operations.check(prepared_by(make, work), ours)


def test_a_method_with_wrong_rows_or_sums_is_refused():
    work = workload.draw(SETTING, harness.SEVERAL)
    prepared = prepared_by(methods.ours, work, ())
    operations.check(prepared, prepared)
    wrong_rows = dict(prepared, rows=jnp.roll(prepared["rows"], 1, axis=1))
    with pytest.raises(AssertionError, match="rows"):
        operations.check(wrong_rows, prepared)

    def wrong(name, work, group):
        right = methods.ours(work, group)
        stopped = lambda of, array: lax.stop_gradient(array) if of == name else array

        def dispatch(x, ids, weights):
            return right.dispatch(stopped("dx", x), ids, stopped("d_weights", weights))

        def combine(rows, state):
            out = right.combine(rows, state)
            return out + lax.stop_gradient(out) if name == "out" else out

        return right._replace(dispatch=dispatch, combine=combine)

    for name in ("out", "dx", "d_weights"):
        with pytest.raises(AssertionError, match=f"^{name} is wrong"):
            operations.check(prepared_by(functools.partial(wrong, name), work), None)


@pytest.mark.parametrize("sigma", [0, 1.1])
def test_wire_bytes_and_capacity_are_what_a_loop_counts(sigma):
    setting = workload.Setting(50, hidden=8, top_k=3, experts=32, sigma=sigma)
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
            for rank in {expert // local_experts for expert in ids}:
                leaving[source] += rank != source
                entering[rank] += rank != source
    assert work.leaving_bytes == leaving.max() * setting.hidden * 2
    assert work.entering_bytes == entering.max() * setting.hidden * 2
    assert rows.max() <= work.capacity < rows.max() + 128
    assert work.capacity % 128 == 0


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


@pytest.mark.parametrize("formatted", ["rows", "decoded"])
def test_a_format_is_checked_with_a_tolerance_of_its_own(formatted):
    setting = dataclasses.replace(SETTING, hidden=128, format="MxFp8", formatted=formatted)
    work = workload.draw(setting, harness.FEW)
    ours = prepared_by(methods.ours, work, (operations.EXCHANGE,))
    operations.check(ours, None, operations.FORMAT_TOLERANCE["MxFp8"])
    with pytest.raises(AssertionError, match="^out is wrong"):  # tokens are quantized
        operations.check(ours, None)


def test_the_errors_of_formats_in_the_documents_are_those_of_the_record():
    found = json.loads((record.FOLDER / "formats" / "errors.json").read_text())
    text = (ROOT / "docs" / "formats.md").read_text()
    for row in found["rows"]:
        name, *errors = row.values()
        assert " | ".join([name, *(f"{100 * error:.2f} %" for error in errors)]) in text


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
    methods = *layer.OURS, "all_gather", "dense"
    options = f"--only training --methods {' '.join(methods)}"
    rows = run_on_cpu(layer, options, tmp_path / "layer.json")["rows"]
    measured = {(row["method"], row["op"]) for row in rows}
    assert measured == {(m, op) for m in methods for op in ("forward", "forward_and_gradients")}
    assert (tmp_path / "layer.png").stat().st_size > 0


@on_cpu
def test_experts_of_a_model_are_measured_and_checked_with_each_form_of_sizes(tmp_path):
    options = "--models A --rows 512 --sizes drawn --no-plot"
    rows = run_on_cpu(products, options, tmp_path / "products.json")["rows"]
    assert [row["op"] for row in rows] == [*products.OF_EXPERTS, *products.OPS, *products.OPS]
    for sizes, mean in {"equal": 64, "+ 8": 72, "+ 136": 200, "drawn": 64, "sigma 1.1": 64}.items():
        for setting in products.of_model("Kimi-K2", 64, sizes):
            found = products.sizes_of(setting)
            assert found.sum() == setting.rows == 48 * mean
            assert (np.ptp(found) == 0) == (sizes in products.MORE_ROWS)


@pytest.mark.parametrize("name", sweeps.SWEEPS)
def test_every_sweep_has_several_plans(name):
    plans = sweeps.plans(name, 4, on_gpu=name != "tokens")  # the largest size takes long to draw
    assert len(plans) >= 2
    assert all(plan.sweep == name and plan.ops for plan in plans)


def test_the_link_limit_is_that_of_the_nearest_size():
    sizes = (1000, 2.0), (100_000, 100.0)
    measured = dict(results=[dict(bytes=n, median_us=us) for n, us in sizes])
    assert wire.microseconds(measured, 2000) == 4.0
    assert wire.microseconds(measured, 50_000) == 50.0
    assert wire.microseconds(None, 1000) is None


@pytest.mark.parametrize("num_sms", (78, 148))
def test_the_sweep_of_sms_ends_with_all_sms_of_the_gpu(monkeypatch, num_sms):
    gpu = types.SimpleNamespace(core_count=num_sms)
    monkeypatch.setattr(sweeps.native, "default_gpu", lambda: gpu)
    setting = workload.Setting(16, **workload.TINY)
    budgets = [each["num_sms"] for each in sweeps.of_budgets(setting)["options"]]
    assert budgets == sorted(set(budgets)) and budgets[-1] == num_sms


@on_cpu
def test_candidates_of_the_tuning_are_measured_in_turns(tmp_path):
    found = run_on_cpu(tune, "--only FEW_NUM_SMS ROUTE_CHUNKS", tmp_path / "tune.json")
    assert [each["number"] for each in found["numbers"]] == ["FEW_NUM_SMS", "ROUTE_CHUNKS"]
    assert all(each["keep"] for each in found["numbers"])  # on CPUs, no candidate is better
    values = [row["value"] for row in found["rows"] if row["number"] == "FEW_NUM_SMS"]
    assert values[0] == native.tuning("FEW_NUM_SMS") and {16, 66, 132} <= {*values}


@pytest.mark.parametrize("wrong", ("rows", "out"))
def test_a_candidate_with_wrong_results_is_left_out(monkeypatch, wrong):
    def ours(work, group):
        right = methods.ours(work, group)
        if native.tuning("ROUTE_CHUNKS") != 16:
            return right
        if wrong == "out":
            return right._replace(combine=lambda rows, state: 2 * right.combine(rows, state))

        def dispatch(*args):
            made = right.dispatch(*args)
            return made._replace(rows=made.rows.at[0, 0].multiply(1.01))

        return right._replace(dispatch=dispatch)

    monkeypatch.setitem(methods.METHODS, "ours", ours)
    a_run, today = run_of(harness.mesh_of(harness.FEW)), native.tuning("ROUTE_CHUNKS")
    cases = ((operations.EXCHANGE, SETTING),)
    taken = tune.measure(a_run, "ROUTE_CHUNKS", cases, (today, 16, 64), {})
    assert list(taken) == [today, 64]
    (failure,) = a_run.record["failures"]
    assert failure.startswith("ROUTE_CHUNKS = 16, ") and f": {wrong} " in failure


@pytest.mark.parametrize(
    ("turns", "keep"),
    (((97, 96, 97), False), ((99, 99, 99), True), ((97, 100.5, 96), True), ((103,) * 3, True)),
)
def test_a_number_changes_only_if_another_value_is_faster_in_every_turn(turns, keep):
    today = [100.0, 100.0, 100.0]
    found = tune.judge("FEW_NUM_SMS", {128: [today, today], 66: [list(turns), list(turns)]})
    assert found["keep"] == keep
    assert found["best"] == (66 if sum(turns) < 300 else 128)
    text = tune.in_words([found], "100", "4 x B200")
    struct = "struct Sm100 : Sm90 {  // 4 x B200\n  static constexpr int kFewSms = 66;\n};"
    assert (struct in text) != keep


def test_all_tuned_numbers_are_numbers_that_python_reads():
    names = set(re.findall(r'\{"(\w+)", Tuning::k', tune.TUNING_H.read_text()))
    assert {*tune.NUMBERS} <= names


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("architecture", "few"), ((90, 128), (100, 148), (103, 148)))
def test_a_struct_in_one_line_is_the_tuning_of_newer_architectures(tmp_path, architecture, few):
    """If an architecture is added as tuning.h describes, a candidate number compiles."""
    text = tune.TUNING_H.read_text()
    (line,) = re.findall(r"^//   (using Measured = .*;)$", text, re.MULTILINE)
    struct = "struct Sm100 : Sm90 { static constexpr int kFewSms = 148; };\n"
    assert text.count("using Measured = Sm90;") == 1
    (tmp_path / "tuning.h").write_text(text.replace("using Measured = Sm90;", struct + line))
    program = tmp_path / "program.cc"
    program.write_text(
        '#include "tuning.h"\nusing moe_a2a::Tuning;\n'
        f"static_assert(Tuning::kFewSms == {few});\n"
        "static_assert(Tuning::kStages == 4 && Tuning::kSegmentBytes == 2560);\n"
    )
    numbers = f"ARCHITECTURE={architecture}", "CANDIDATE=kStages = 4, kSegmentBytes = 2560"
    defines = [f"-DMOE_A2A_{number}" for number in numbers]
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", *defines, program], check=True)


def test_only_gpus_of_a_known_peak_have_an_mfu():
    assert report.percent(model.mfu_of(989 / 4, "NVIDIA H200")) == "25.0 %"
    assert report.percent(model.mfu_of(989 / 4, "NVIDIA B200")) == "-"


@pytest.mark.skipif(wire.find_nvcc() is None, reason="needs nvcc")
def test_the_program_of_the_link_limit_compiles(tmp_path):
    assert os.access(wire.build(str(tmp_path)), os.X_OK)


def test_the_documents_have_the_calculated_layers_with_replicas():
    """The table in docs/placement.md and its break-even numbers follow from the record."""
    page = (ROOT / "docs/placement.md").read_text()
    rows = json.loads((record.FOLDER / "2026-11-26-placement-layers.json").read_text())["rows"]
    assert "\n".join(placement.table(rows)) in page
    of_row = 2 * placement.WEIGHTS_OF_EXPERT / placement.PRODUCTS_FLOPS * 1e6
    of_token = 2 * placement.HIDDEN * placement.ITEM_BYTES / placement.LINK_BYTES * 1e6
    assert f"{placement.fetch_us(1) / (of_row + of_token):,.0f} rows" in page
    assert f"from {placement.fetch_us(1) / of_row:,.0f} if" in page
