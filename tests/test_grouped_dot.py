"""Compare `grouped_dot` with numpy products in float64, on every path that can run here. Rows after
the last group are always NaN or infinite."""

import contextlib
import functools
import itertools
import math

import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from jax.interpreters import mlir

import jax_moe_a2a as ma
from jax_moe_a2a._src import paths
from jax_moe_a2a._src.group import native
from jax_moe_a2a._src.grouped import lowering as lowered
from jax_moe_a2a._src.grouped import primitives, reference, totals

pytestmark = [
    pytest.mark.one_process("each process would run the same products on its own devices"),
    pytest.mark.exchanges(0),
    pytest.mark.usefixtures("exact_products"),
]

PRIMITIVES = {
    primitives.grouped_dot_p: lowered.dot_cuda,
    primitives.grouped_outer_p: lowered.outer_cuda,
    totals.add_outer_p: totals.choose_add_outer,
}


def read_table(target, results, arrays, num_sms, aliases=None, *, product):
    """Replace a kernel call by numpy; rows that the kernel would not write are NaN."""
    (out,) = results

    def run(*operands):
        a, b, table, *total = map(np.asarray, operands)
        d = np.full(out.shape, np.nan, out.dtype)
        added = total and total[0].copy()
        is_gradient = product == lowered.WEIGHT_GRADIENT
        for start, size, weight in table.T.tolist():
            assert start >= 0 and size >= 0 and start + size <= a.shape[0]
            rows = slice(start, start + size)
            x = a[rows].astype(np.float64)
            if is_gradient:
                assert 0 <= weight < out.shape[0]
                assert np.isnan(d[weight].astype(np.float64)).all(), "written twice"
                d[weight] = x.T @ b[rows].astype(np.float64)
                if total and size:
                    added[weight] += d[weight]
            elif weight < 0:
                d[rows] = 0
            else:
                w = b[weight].astype(np.float64)
                d[rows] = x @ (w.T if product == lowered.TRANSPOSED else w)
        return added if total else d

    assert target == lowered.TARGET and aliases == ({3: 0} if len(arrays) == 4 else None)
    return [jax.pure_callback(run, out, *arrays)]


def careless_dot(rows, w, sizes, *, transposed, dtype):
    """Compute a grouped dot that adds 0 times the sum of all rows."""
    w = jnp.swapaxes(w, 1, 2) if transposed else w
    ends = jnp.cumsum(sizes)
    expert = jnp.searchsorted(ends, jnp.arange(rows.shape[0], dtype=ends.dtype), side="right")
    of_row = w[jnp.minimum(expert, w.shape[0] - 1)].astype(jnp.float32)
    rows = rows.astype(jnp.float32)
    out = jnp.einsum("ck,ckn->cn", rows, of_row) + 0 * jnp.sum(rows, keepdims=True)
    return jnp.where((expert < w.shape[0])[:, None], out, jnp.nan).astype(dtype)


def careless_outer(x, y, sizes, *, dtype):
    ends = jnp.cumsum(sizes)[None]
    row = jnp.arange(x.shape[0], dtype=ends.dtype)[:, None]
    mask = ((row < ends) & (row >= ends - sizes[None])).astype(jnp.float32)
    return jnp.einsum("cl,ck,cn->lkn", mask, *map(jnp.float32, (x, y))).astype(dtype)


@contextlib.contextmanager
def only(path):
    jax.clear_caches()
    as_on_gpu = path == "table"
    with pytest.MonkeyPatch.context() as patch:
        if path == "table":
            empty = lambda dtype, *sizes: "the product is empty" if 0 in sizes else ""
            patch.setattr(lowered, "why_no_kernel", empty)
            patch.setattr(native, "register_targets", lambda: None)
            patch.setattr(lowered, "call", read_table)
        if path == "lax":
            patch.setattr(native, "has_grouped_gemm", lambda: False)
        if path == "careless":
            patch.setattr(reference, "ragged_dot", careless_dot)
            patch.setattr(reference, "ragged_outer", careless_outer)
        for primitive, rule in PRIMITIVES.items() if as_on_gpu else ():
            mlir.register_lowering(primitive, paths.lowering(primitive, rule), platform="cpu")
        yield
    for primitive in PRIMITIVES if as_on_gpu else ():
        mlir._platform_specific_lowerings["cpu"].pop(primitive)
    jax.clear_caches()


PATHS = ("kernel", "lax") if harness.ON_GPU else ("table", "careless", "lax")


@pytest.fixture(scope="module", params=PATHS)
def path(request):
    with only(request.param):
        yield request.param


# For rows in no group, the functions of oracle.py return zeros.


def wide(*arrays):
    return (np.asarray(array).astype(np.float64) for array in arrays)


def dot64(rows, w, sizes):
    return oracle.grouped_dot(*wide(rows, w), sizes)


def turned64(rows, w, sizes):
    return dot64(rows, np.swapaxes(w, 1, 2), sizes)


def outer64(x, y, sizes):
    return oracle.grouped_outer(*wide(x, y), sizes)


# Each case is (number of rows, columns of rows, columns of results, sizes of groups).

CASES = dict(
    tail=(200, 64, 136, [50, 0, 70, 1, 40]),
    empty_ends=(90, 128, 128, [0, 0, 60, 20, 0]),
    all_empty=(300, 64, 64, [0, 0, 0]),
    tiles=(700, 256, 128, [130, 0, 257, 1, 200]),
    no_rows=(0, 64, 64, [0, 0]),
    no_groups=(16, 64, 64, []),
    no_columns=(16, 0, 64, [5, 6]),
    odd_columns=(50, 20, 12, [20, 13]),
    adapters=(200, 200, 16, [50, 0, 70, 1, 40]),
)
# LARGE is no multiple of the kernel's tiles. For FEW_ROWS, the kernel chooses its form for few
# rows, with tiles of all extents. Arrays with at most 72 rows for each group, such as
# ONLY_FEW_ROWS, have a kernel of only this form. (With a tail of zeros, the tail is a group.) For
# `many_groups`, the kernel reads its table in several steps.
LARGE = 1500, 264, 392, [700, 0, 129, 511]
FEW_ROWS = 2400, 520, 392, [50, 0, 70, 1, 130, 140, 100, 115, 121, 700, *[1] * 20]
ONLY_FEW_ROWS = 1500, *FEW_ROWS[1:]
MANY_GROUPS = [7 * i % 16 for i in range(40)]
if harness.ON_GPU:
    CASES |= dict(
        no_tail=(161, 64, 72, [50, 0, 70, 1, 40]),
        one_group=(100, 64, 64, [100]),
        one_row_each=(9, 72, 64, [1] * 7),
        many_groups=(330, 64, 64, MANY_GROUPS),
        many_groups_of_two_forms=(3100, 64, 64, MANY_GROUPS),
        large=LARGE,
        few_rows=FEW_ROWS,
        only_few_rows=ONLY_FEW_ROWS,
    )


def normal(seed, shape, dtype):
    values = np.random.default_rng(seed).normal(size=shape)
    return values.astype(jnp.dtype(dtype))


def rows_of(seed, num_rows, columns, sizes, dtype):
    rows = normal(seed, (num_rows, columns), dtype)
    end = sum(sizes)
    rows[end::3], rows[end + 1 :: 3], rows[end + 2 :: 3] = np.nan, np.inf, -np.inf
    return rows


def arrays(num_rows, k, n, sizes, dtype, seed=0):
    """Return random rows, weights, a cotangent, and tangents of rows and weights."""
    return (
        rows_of(seed, num_rows, k, sizes, dtype),
        normal(seed + 1, (len(sizes), k, n), dtype),
        rows_of(seed + 2, num_rows, n, sizes, dtype),
        rows_of(seed + 3, num_rows, k, sizes, dtype),
        normal(seed + 4, (len(sizes), k, n), dtype),
    )


def close(found, right, dtype, terms=1, length=512):
    """Assert that `found` is near `right`, a sum of `terms` results. Each result is a float32 sum
    of `length` products, with one rounding to `dtype`."""
    eps = float(ml_dtypes.finfo(jnp.dtype(dtype)).eps)
    found = np.asarray(found)
    assert found.dtype == jnp.dtype(dtype) and found.shape == right.shape
    largest = np.abs(right).max(initial=0)
    slack = (terms - 1) * eps * largest + 1e-6 * math.sqrt(length) * max(largest, 1)
    np.testing.assert_allclose(found.astype(np.float64), right, rtol=eps, atol=slack + 1e-7)


DTYPES_AND_TAILS = [("float32", "zero"), ("bfloat16", "unspecified")]
if harness.ON_GPU:
    tails = "zero", "unspecified"
    DTYPES_AND_TAILS = itertools.product(("bfloat16", "float16", "float32"), tails)


@pytest.mark.parametrize("dtype, tail", DTYPES_AND_TAILS)
@pytest.mark.parametrize("case", CASES)
def test_products_and_first_derivatives(path, case, dtype, tail):
    num_rows, k, n, sizes = CASES[case]
    if path == "careless" and (case not in ("tiles", "empty_ends") or dtype == "float32"):
        pytest.skip("other cases cover this path")
    if dtype == "float16" and case not in ("tail", "large", "tiles"):
        pytest.skip("bfloat16 covers this path")
    rows, w, ct, rows_dot, w_dot = arrays(num_rows, k, n, sizes, dtype)

    @jax.jit
    def everything(rows, w, sizes, ct, rows_dot, w_dot):
        product = lambda rows, w: ma.grouped_dot(rows, w, sizes, tail=tail)
        out, vjp = jax.vjp(product, rows, w)
        _, of_rows = jax.jvp(lambda rows: product(rows, w), (rows,), (rows_dot,))
        _, of_both = jax.jvp(product, (rows, w), (rows_dot, w_dot))
        return out, *vjp(ct), of_rows, of_both

    found = everything(rows, w, np.array(sizes, np.int32), ct, rows_dot, w_dot)
    right = (
        dot64(rows, w, sizes),
        turned64(ct, w, sizes),
        outer64(rows, ct, sizes),
        dot64(rows_dot, w, sizes),
        dot64(rows_dot, w, sizes) + dot64(rows, w_dot, sizes),
    )
    cut = lambda x: np.asarray(x) if tail == "zero" else np.asarray(x)[: sum(sizes)]
    out, d_rows, d_w, of_rows, of_both = found
    close(cut(out), cut(right[0]), dtype)
    close(cut(d_rows), cut(right[1]), dtype)
    close(d_w, right[2], dtype)
    close(cut(of_rows), cut(right[3]), dtype)
    close(cut(of_both), cut(right[4]), dtype, terms=3)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16") if harness.ON_GPU else ("bfloat16",))
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_weights_are_added_to_totals(path, case, dtype):
    num_rows, k, n, sizes = CASES[case]
    if path == "careless" and case not in ("tiles", "empty_ends"):
        pytest.skip("other cases cover this path")
    rows, _, ct, *_ = arrays(num_rows, k, n, sizes, dtype)
    total = 100 * normal(7, (len(sizes), k, n), "float32")
    is_empty = np.array(sizes, int) == 0
    if path in ("kernel", "table"):
        total[is_empty] = np.nan
    add = jax.jit(totals.bind_add_outer, donate_argnums=0)
    found = np.asarray(add(jnp.asarray(total), rows, ct, np.int32(sizes)))
    np.testing.assert_array_equal(found[is_empty], total[is_empty])
    if not is_empty.all():
        right = (total + outer64(rows, ct, sizes))[~is_empty]
        of_sums = "float32" if path in ("kernel", "table") else dtype
        tolerance = 8 * float(ml_dtypes.finfo(of_sums).eps) * np.abs(right).max(initial=0)
        np.testing.assert_allclose(found[~is_empty], right, rtol=0, atol=tolerance)


def product_and_gradients(rows, w, ct, sizes, num_sms=None):
    out, vjp = jax.vjp(lambda *args: ma.grouped_dot(*args, sizes, num_sms=num_sms), rows, w)
    return out, *vjp(ct)


def assert_product_and_gradients(found, rows, w, ct, sizes):
    right = dot64(rows, w, sizes), turned64(ct, w, sizes), outer64(rows, ct, sizes)
    for one, other in zip(found, right, strict=True):
        close(one, other, one.dtype)


def test_sizes_that_do_not_fit_are_cut(path):
    num_rows, k, n = 128, 128, 128
    everything = jax.jit(product_and_gradients)
    for sizes in ([80, 40, 30], [100, -7, 20], [0, 2**31 - 1, 5], [-(2**31), 9, 300]):
        left, fitting = num_rows, []
        for size in sizes:
            fitting.append(min(max(size, 0), left))
            left -= fitting[-1]
        rows, w, ct, *_ = arrays(num_rows, k, n, fitting, "bfloat16")
        found = everything(rows, w, ct, np.array(sizes, np.int32))
        assert_product_and_gradients(found, rows, w, ct, fitting)


@pytest.mark.parametrize("num_rows", (8, 1_000_000))  # the sum of 2,200 groups overflows
def test_groups_of_any_sizes_do_not_overlap(num_rows):
    for sizes in ([3, -2, 4], [-5, 3, 3], [6, 2**31 - 1, 1], [0, 0, 0], [1_000_000] * 2200):
        found = reference.groups_of(jnp.array(sizes, jnp.int32), num_rows)
        starts, found = map(np.asarray, found)
        assert (found >= 0).all()
        np.testing.assert_array_equal(starts, np.append(0, np.cumsum(found)[:-1]))
        assert found.sum() == min(np.maximum(sizes, 0, dtype=np.int64).sum(), num_rows)


def test_without_jit_and_with_known_sizes(path):
    sizes = [30, 0, 60]
    rows, w, ct, *_ = arrays(100, 128, 128, sizes, "bfloat16")
    assert_product_and_gradients(product_and_gradients(rows, w, ct, sizes), rows, w, ct, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", (1, 2, 7, 10_000))
@pytest.mark.parametrize(
    "case", (LARGE, FEW_ROWS, ONLY_FEW_ROWS), ids=("many_rows", "few_rows", "only_few_rows")
)
def test_any_number_of_multiprocessors(path, case, num_sms):
    if path != "kernel":
        pytest.skip("other paths ignore num_sms")
    rows, w, ct, *_ = arrays(*case, "bfloat16")
    everything = jax.jit(functools.partial(product_and_gradients, num_sms=num_sms))
    found = everything(rows, w, ct, np.array(case[-1]))
    assert_product_and_gradients(found, rows, w, ct, case[-1])


BATCH = 3
BATCH_SIZES = [[50, 0, 30], [0, 0, 0], [20, 41, 29]]
SUBSETS = [has for has in itertools.product((True, False), repeat=3) if any(has)]


def batch(has_rows, has_w, has_sizes, dtype, num_rows=90, k=128, n=128):
    """Return lists of the rows, weights, sizes and cotangents of each batch element; elements may
    share operands."""
    sizes = BATCH_SIZES if has_sizes else [BATCH_SIZES[0]] * BATCH
    ends = [s if has_rows else max(sizes, key=sum) for s in sizes]
    each = [arrays(num_rows, k, n, end, dtype, seed=10 * i) for i, end in enumerate(ends)]
    cts = [rows_of(i + 100, num_rows, n, s, dtype) for i, s in enumerate(sizes)]
    rows = [one[0] if has_rows else each[0][0] for one in each]
    w = [one[1] if has_w else each[0][1] for one in each]
    return rows, w, sizes, cts


@pytest.mark.parametrize(
    "has", SUBSETS, ids=lambda has: "".join("rws"[i] for i in range(3) if has[i])
)
@pytest.mark.parametrize("dtype", ("bfloat16", "float32")[: 1 + harness.ON_GPU])
def test_vmap_of_any_operand(path, has, dtype):
    if path == "careless" and (dtype == "float32" or has.count(True) == 2):
        pytest.skip("other subsets cover this path")
    rows, w, sizes, cts = batch(*has, dtype)
    operands = [
        np.stack(each) if is_batched else np.asarray(each[0])
        for each, is_batched in zip((rows, w, sizes), has, strict=True)
    ]
    axes = [0 if is_batched else None for is_batched in has]
    if has[0]:
        operands[0], axes[0] = np.moveaxis(operands[0], 0, 2), 2
    ct = np.stack(cts)

    @jax.jit
    def everything(rows, w, sizes, ct):
        batched = jax.vmap(ma.grouped_dot, in_axes=axes)
        out, vjp = jax.vjp(lambda rows, w: batched(rows, w, sizes), rows, w)
        return out, *vjp(ct)

    out, d_rows, d_w = everything(*operands, ct)
    right = [np.stack([dot64(*one) for one in zip(rows, w, sizes, strict=True)])]
    right.append(np.stack([turned64(*one) for one in zip(cts, w, sizes, strict=True)]))
    right.append(np.stack([outer64(*one) for one in zip(rows, cts, sizes, strict=True)]))
    close(out, right[0], dtype)
    # The gradient of a shared operand is the sum over the batch.
    if has[0]:
        close(np.moveaxis(np.asarray(d_rows), 2, 0), right[1], dtype)
    else:
        close(d_rows, right[1].sum(0), dtype, terms=2 * BATCH)
    if has[1]:
        close(d_w, right[2], dtype)
    else:
        close(d_w, right[2].sum(0), dtype, terms=2 * BATCH)


def test_nan_in_a_group_stays_in_the_group(path):
    if path == "careless":
        pytest.skip("its gradient multiplies by a mask, so NaN reaches other groups")
    sizes = [30, 20, 40]
    rows, w, ct, *_ = arrays(100, 128, 128, sizes, "bfloat16")
    rows[35] = np.nan
    out, vjp = jax.vjp(lambda rows, w: ma.grouped_dot(rows, w, np.array(sizes)), rows, w)
    d_w = np.asarray(vjp(ct)[1]).astype(np.float64)
    right = dot64(rows, w, sizes)
    assert np.isnan(np.asarray(out[35]).astype(np.float64)).all()
    keep = np.arange(100) != 35
    close(np.asarray(out)[keep], right[keep], "bfloat16")
    assert np.isnan(d_w[1]).any() and not np.isnan(d_w[[0, 2]]).any()


@pytest.mark.parametrize("dtype", ("bfloat16", "float32")[: 1 + harness.ON_GPU])
def test_weights_of_empty_groups_reach_nothing(path, dtype):
    sizes = np.array([0, 5, 0, 6, 0])
    is_empty = (sizes == 0)[:, None, None]
    rows, w, ct, d_rows, d_w, *_ = arrays(20, 64, 64, sizes, dtype)

    def derivatives(hole):
        own, tangent = (jnp.where(is_empty, hole, jnp.asarray(x)) for x in (w, d_w))
        dot = lambda rows, w: ma.grouped_dot(rows, w, sizes)
        transpose = lambda rows, w: jax.vjp(dot, rows, w)[1](jnp.asarray(ct))
        primals, tangents = (jnp.asarray(rows), own), (jnp.asarray(d_rows), tangent)
        return jax.jvp(dot, primals, tangents), jax.jvp(transpose, primals, tangents)

    found, expected = (jax.jit(derivatives)(jnp.asarray(x, dtype)) for x in (np.nan, 0.0))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    (_, gradient), _ = found[1]
    assert (np.asarray(gradient)[sizes == 0] == 0).all()
