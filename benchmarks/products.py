"""Time the experts of a rank, and their grouped matrix products, with each implementation.

    python -m benchmarks.products                  on this machine's first GPU, in under 3 minutes
    python -m benchmarks.products --models Qwen3-30B-A3B DeepSeek-V3 --rows 256 512 --budget 1000
                                                   experts of models, each with this many rows

Experts are two products with SwiGLU between them, timed forward and with all gradients. One rank
has 32 experts and 32,768 rows, as with 4,096 tokens on each of 4 ranks and top-8 of 128 experts.
Some settings have few rows, as in decoding. In the first and the last group, the results must equal
plain products within a tolerance. With --models, the experts are the fused experts of `ma.moe_mlp`
without biases, and the six products of experts are also timed separately. FP8 experts quantize rows
and weights. Times of FP8 products do not include quantization. cuBLASLt is timed if JAX's library,
or the library at --cublas-lt, has grouped products. Samples of all methods are taken in turns,
with --models also those of all products, experts and sizes of groups.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_moe_a2a as ma

from . import experts as of_rank
from . import run as runs
from . import timing
from .operations import relative_error, squares

GROUPS = 32
ROWS = 32_768
FP8_BLOCK = ma.BlockwiseFp8.group_size
SIGMA = 1.1  # of the logarithm of popularity
SAMPLES = 5
BUDGET_SECONDS = 180.0
TOLERANCE, FP8_TOLERANCE = 1e-2, 0.15  # bfloat16 has 8 bits, and float8_e4m3fn has 4 bits
OPS = ("forward", "d_rows", "d_weights")
FORWARD = OPS[:1]
OF_EXPERTS = ("experts", "experts_and_gradients")
OURS, MOSAIC, CUBLAS, RAGGED = "ours", "Mosaic GPU", "cuBLAS batched", "lax.ragged_dot"
FUSED, FP8, LIBRARY = "ours, fused", "ours, FP8", "cuBLASLt grouped"
TINY = 64  # divisor of sizes without a GPU


class Setting(NamedTuple):
    """A product [rows, k] by [groups, k, n], or experts (hidden size k, intermediate n / 2)."""

    name: str
    k: int
    n: int
    methods: Mapping[str, tuple[str, ...]]
    rows: int = ROWS
    sizes: str = "equal"
    groups: int = GROUPS


SKEWED = f"sigma {SIGMA}"
ALL = {OURS: OPS, MOSAIC: OPS, CUBLAS: OPS}
EXPERTS = dict.fromkeys((OURS, MOSAIC), OF_EXPERTS)
FEW = {OURS: FORWARD, MOSAIC: FORWARD, CUBLAS: FORWARD}
SETTINGS = (
    Setting("A experts", 4096, 3072, EXPERTS | {CUBLAS: OF_EXPERTS, RAGGED: OF_EXPERTS[:1]}),
    Setting("B experts", 7168, 4096, EXPERTS | {CUBLAS: OF_EXPERTS}),
    Setting("A experts", 4096, 3072, EXPERTS, sizes=SKEWED),
    Setting("A GEMM 1", 4096, 3072, ALL | {RAGGED: FORWARD}),
    Setting("A GEMM 1", 4096, 3072, {OURS: OPS, MOSAIC: FORWARD}, sizes=SKEWED),
    *(Setting("A GEMM 1", 4096, 3072, FEW, rows) for rows in (32, 128, 512, 1024, 4096)),
    Setting("A GEMM 2", 1536, 4096, ALL),
    *(Setting("A GEMM 2", 1536, 4096, FEW, rows) for rows in (32, 128, 512)),
)
# (hidden size, intermediate size, experts of a rank), with 8 ranks for the two largest models and 4
# for others.
MODELS = {
    "Qwen3-30B-A3B": (2048, 768, 32),
    "DeepSeek-V3": (7168, 2048, 32),
    "GPT-OSS-120B": (2880, 2880, 32),
    "Kimi-K2": (7168, 2048, 48),
    "A": (4096, 1536, 16),
    "B": (7168, 2048, 16),
}
ROWS_OF_EXPERTS = (16, 32, 64, 128, 256, 512, 1024, 2048)
# With 8 or 136 rows more than a multiple of 128, an expert's last tile is nearly empty.
MORE_ROWS = {"equal": 0, "+ 8": 8, "+ 136": 136}
SIZES = (*MORE_ROWS, "drawn", SKEWED)


def of_model(name: str, rows: int, sizes: str) -> list[Setting]:
    hidden, width, groups = MODELS[name]
    rows = groups * (rows + MORE_ROWS.get(sizes, 0))
    products = {OURS: OPS, LIBRARY: OPS} | ({CUBLAS: OPS} if sizes in MORE_ROWS else {})
    experts = {FUSED: OF_EXPERTS}
    if hidden % FP8_BLOCK == width % FP8_BLOCK == 0:
        products[FP8], experts[FP8] = OPS[:2], OF_EXPERTS
    return [
        Setting(f"{name} experts", hidden, 2 * width, experts, rows, sizes, groups),
        Setting(f"{name} GEMM 1", hidden, 2 * width, products, rows, sizes, groups),
        Setting(f"{name} GEMM 2", width, hidden, products, rows, sizes, groups),
    ]


def is_of_experts(setting: Setting) -> bool:
    return set(OF_EXPERTS) >= {op for ops in setting.methods.values() for op in ops}


FIRST_OF_EACH = [next(s for s in SETTINGS if is_of_experts(s) is kind) for kind in (True, False)]


def sizes_of(setting: Setting) -> Any:
    """Return int32 [groups]."""
    groups, rows = setting.groups, setting.rows
    if setting.sizes in MORE_ROWS:
        return np.full(groups, rows // groups, np.int32)
    if setting.sizes == "drawn":
        draw = np.random.default_rng(rows)
        return draw.multinomial(rows, np.full(groups, 1 / groups)).astype(np.int32)
    popularity = np.exp(SIGMA * np.random.default_rng(1).normal(size=groups))
    ends = np.rint(np.cumsum(popularity) / popularity.sum() * setting.rows).astype(np.int32)
    return np.diff(ends, prepend=0).astype(np.int32)


@functools.cache
def products() -> dict[str, Callable[..., Any]]:
    """Return products (rows, w, sizes) by implementation. FUSED instead computes whole experts."""

    def batched(rows: Any, w: Any, sizes: Any) -> Any:
        buckets = rows.reshape(w.shape[0], -1, rows.shape[1])
        return jnp.einsum("lck,lkn->lcn", buckets, w).reshape(rows.shape[0], -1)

    made: dict[str, Callable[..., Any]] = {
        OURS: ma.grouped_dot,
        FUSED: of_rank.fused,
        FP8: of_rank.fp8_product,
        CUBLAS: batched,
        RAGGED: jax.lax.ragged_dot,
    }
    for name, make in ((MOSAIC, of_rank.mosaic_product), (LIBRARY, of_rank.library_product)):
        try:
            made[name] = make()
        except ImportError as error:
            print(f"no {name}: {error}")
    return made


class Work(NamedTuple):
    args: tuple[Any, ...]
    operation: Callable[[Callable[..., Any], str], Callable[..., Any]]
    """(implementation, operation's name) -> a function of ``args``."""
    error: Callable[[str, Any], float]
    """(operation's name, result) -> relative error in the first and the last group."""
    flops: dict[str, int]
    weights: tuple[Any, ...]
    in_fp8: Callable[[str], tuple[Any, ...]] | None = None
    """operation's name -> operands in FP8."""


@functools.cache
def normal(seed: int, *shape: int, scale: float = 1) -> Any:
    key = jax.random.key(seed, impl="unsafe_rbg")
    return jax.random.normal(key, shape, jnp.bfloat16) * scale


def one_product(setting: Setting) -> Work:
    sizes = sizes_of(setting)
    rows, ct = normal(0, setting.rows, setting.k), normal(1, setting.rows, setting.n)
    w = normal(2, setting.groups, setting.k, setting.n)

    def operation(product: Callable[..., Any], op: str) -> Callable[..., Any]:
        def run(rows: Any, w: Any, sizes: Any, ct: Any) -> Any:
            if op == "forward":
                return product(rows, w, sizes)
            if op == "d_rows":
                return jax.vjp(lambda rows: product(rows, w, sizes), rows)[1](ct)[0]
            return jax.vjp(lambda w: product(rows, w, sizes), w)[1](ct)[0]

        return run

    def error(op: str, found: Any) -> float:
        totals = jnp.zeros(2)
        for group, part in ((0, slice(0, sizes[0])), (-1, slice(rows.shape[0] - sizes[-1], None))):
            if op == "forward":
                totals += squares(found[part], rows[part] @ w[group])
            elif op == "d_rows":
                totals += squares(found[part], ct[part] @ w[group].T)
            else:
                totals += squares(found[group], rows[part].T @ ct[part])
        return relative_error([totals])

    def in_fp8(op: str) -> tuple[Any, ...]:
        x, matrices = (rows, w) if op == "forward" else (ct, w.swapaxes(1, 2))
        encoded = jax.jit(ma.BlockwiseFp8().encode)(x)
        return encoded, jax.jit(ma.quantize_experts)(matrices), jnp.asarray(sizes)

    flops = dict.fromkeys(OPS, 2 * setting.rows * setting.k * setting.n)
    return Work((rows, w, jnp.asarray(sizes), ct), operation, error, flops, (w,), in_fp8)


def experts(setting: Setting) -> Work:
    sizes = sizes_of(setting)
    rows = normal(0, setting.rows, setting.k)
    # Pre-activations are near 1, where SwiGLU is not linear.
    w_in = normal(2, setting.groups, setting.k, 2, setting.n // 2, scale=setting.k**-0.5)
    w_out = normal(3, setting.groups, setting.n // 2, setting.k, scale=setting.n**-0.5)
    known = jnp.asarray(sizes)
    compare = jax.jit(functools.partial(of_rank.errors, fullest=int(sizes.max())))

    def operation(product: Callable[..., Any], op: str) -> Callable[..., Any]:
        forward = product if product is of_rank.fused else of_rank.by_product(product)
        if op == "experts":
            return lambda *args: (forward(*args),)
        return of_rank.with_gradients(forward)

    def error(op: str, found: Any) -> float:
        named = dict(zip(of_rank.RESULTS, found, strict=False))
        errors = compare(named, rows, w_in, w_out, known)
        return max(relative_error([totals]) for totals in errors.values())

    flops = 3 * setting.rows * setting.k * setting.n
    of_op = dict(zip(OF_EXPERTS, (flops, 3 * flops), strict=True))
    return Work((rows, w_in, w_out, known), operation, error, of_op, (w_in, w_out))


class Program(NamedTuple):
    row: dict[str, Any]
    """The record's row without times."""
    flops: int
    weight_bytes: int
    compiling: concurrent.futures.Future
    args: tuple[Any, ...]
    error: Callable[[Any], float]


def start(run: runs.Run, setting: Setting) -> list[Program]:
    """Start to compile the programs of a setting."""
    runs.say(f"{setting.name}, {setting.sizes}, {setting.rows} rows")
    work = (experts if is_of_experts(setting) else one_product)(setting)
    weight_bytes = sum(w.nbytes for w in work.weights)
    started, made = [], products()
    for op, flops in work.flops.items():
        for method in (name for name, ops in setting.methods.items() if op in ops and name in made):
            call, args = work.operation(made[method], op), work.args
            if method == FP8 and work.in_fp8:
                call, args = ma.grouped_dot, work.in_fp8(op)
            row = dict(
                sweep=run.record["sweeps"][0],
                method=method,
                op=op,
                shape=setting.name,
                sizes=setting.sizes,
                rows=setting.rows,
                groups=setting.groups,
                k=setting.k,
                n=setting.n,
            )
            compiling = run.compile(jax.jit(call).lower(*args))
            error = functools.partial(work.error, op)
            started.append(Program(row, flops, weight_bytes, compiling, args, error))
    return started


def measure(run: runs.Run, settings: Iterable[Setting]) -> None:
    """Time the programs of all these settings in turns."""
    programs: list[Program] = []
    for setting in settings:
        with run.attempt(f"{setting.name}, {setting.sizes}, {setting.rows} rows"):
            programs += start(run, setting)
    run.wait()
    samplers = {}
    for i, (row, _, _, compiling, args, error) in enumerate(programs):
        with run.attempt("{shape}, {sizes}, {rows} rows, {op} by {method}".format(**row)):
            call = compiling.result()
            found = error(call(*args))
            if not found < (FP8_TOLERANCE if row["method"] == FP8 else TOLERANCE):
                raise AssertionError(f"the result is wrong by {found:.1e} of it")
            samplers[i] = timing.sampler(call, args, 1, run.sample_seconds)
    for i, us in timing.take_turns(samplers, run.samples).items():
        median = statistics.median(us)
        times = {name: round(value, 1) for name, value in timing.Timing.of(us).row().items()}
        tflops = round(programs[i].flops / median * 1e-6, 1)
        of_weights = round(programs[i].weight_bytes / median * 1e-3, 1)
        run.add(programs[i].row | times | dict(tflops=tflops, weight_gb_per_s=of_weights))


def main(argv: list[str] | None = None) -> int:
    parser = runs.make_parser("benchmarks.products", __doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=(), help="of these models")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS_OF_EXPERTS, help="per expert")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES, help="of the groups")
    parser.add_argument("--cublas-lt", help="path of libcublasLt.so.13, which JAX then uses, too")
    parser.set_defaults(ranks=1, budget=BUDGET_SECONDS)
    args = parser.parse_args(argv)
    if args.cublas_lt:
        ctypes.CDLL(args.cublas_lt)
    num_gpus = runs.set_platform(args.ranks)
    sweep = "models" if args.models else "products"
    run = runs.open_run(args, num_gpus, [sweep], "products", SAMPLES)
    batches = [[setting] for setting in (SETTINGS if num_gpus else FIRST_OF_EACH)]
    if args.models:
        batches = [
            [one for sizes in args.sizes for one in of_model(name, rows, sizes)]
            for rows, name in itertools.product(args.rows, args.models)
        ]
    if not num_gpus:
        batches = [[tiny(setting) for setting in batch] for batch in batches]
    likely = batches[0][0]
    (product,) = ma.explain(
        ma.grouped_dot,
        jax.ShapeDtypeStruct((likely.rows, likely.k), jnp.bfloat16),
        jax.ShapeDtypeStruct((likely.groups, likely.k, likely.n), jnp.bfloat16),
        jax.ShapeDtypeStruct((likely.groups,), jnp.int32),
    )
    why = run.record["why_no_kernel"] = product.why
    runs.say(f"no kernel: {why}" if why else "the kernel runs")
    for batch in batches:
        with run.attempt(f"{batch[0].name}, {batch[0].rows} rows"):
            run.check_time()
            measure(run, batch)
        normal.cache_clear()  # frees memory
    return runs.finish(run.record, run.path, not args.no_plot)


def tiny(setting: Setting) -> Setting:
    of_gpus = (MOSAIC, LIBRARY, FP8)
    methods = {name: ops for name, ops in setting.methods.items() if name not in of_gpus}
    rows = setting.rows // TINY // setting.groups * setting.groups
    return setting._replace(k=setting.k // TINY, n=setting.n // TINY, rows=rows, methods=methods)


if __name__ == "__main__":
    raise SystemExit(main())
