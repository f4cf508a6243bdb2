"""Train a small mixture-of-experts language model, expert-parallel, on Python's own source text.

    python examples/train_moe.py            # train, draw the curves, let the model write Python
    python examples/train_moe.py --check    # train twice, expert-parallel and dense: same losses?
    python examples/train_moe.py --fp8      # products of experts in FP8; --check allows for it

The model is a decoder-only transformer that reads bytes; its feed-forward layers are mixtures of
experts. One mesh axis, "ep", carries both the data and the experts: each rank has its own sequences
and its own experts, and everything else is replicated. `ma.moe_mlp` sends each token to the ranks
of its experts, applies them, and returns their outputs to the token's rank; `jax.grad` works
through it.

The same command uses all GPUs of a host through the CUDA kernels, and 8 virtual CPU devices where
there is no GPU. A step sees the same sequences for any number of ranks, so you can compare the
loss curves of different machines.

Several processes train one model, each with the sequences and the experts of its own devices:

    srun python examples/train_moe.py --distributed    # SLURM, Open MPI: JAX finds the processes
    python examples/train_moe.py --coordinator localhost:1234 --num-processes 2 --process-id 0 &
    python examples/train_moe.py --coordinator localhost:1234 --num-processes 2 --process-id 1

Without a launcher, the environment variable JAX_LOCAL_DEVICE_IDS=0,1 selects the GPUs of a process,
and XLA_FLAGS=--xla_force_host_platform_device_count=4 sets its number of CPU devices. Process 0
prints and draws.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# Read when JAX starts, so it comes before the import. It concerns the CPU only, and a number that
# you set yourself comes later in the list and wins.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma

LENGTH = 128  # bytes of a sequence
LAYERS = 2
HIDDEN = 128
HEADS = 4
EXPERTS = 8
TOP_K = 2
EXPERT_HIDDEN = 256
BALANCE = 0.05  # weight of the load-balance loss

Params = dict[str, Any]


# ------------------------------------------------------------------------------------- the model
# Expert-parallel and dense training share this code and differ only in `experts` and `mean`.


def init(key: jax.Array) -> Params:
    keys = iter(jax.random.split(key, 2 + 5 * LAYERS))

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

    def layer() -> Params:
        return {
            "attention_norm": jnp.ones(HIDDEN),
            "qkv": matrix(HIDDEN, 3 * HIDDEN),
            "attention_out": matrix(HIDDEN, HIDDEN),
            "moe_norm": jnp.ones(HIDDEN),
            "router": matrix(HIDDEN, EXPERTS),
            "w_in": matrix(EXPERTS, HIDDEN, EXPERT_HIDDEN),
            "w_out": matrix(EXPERTS, EXPERT_HIDDEN, HIDDEN),
        }

    return {
        "embed": matrix(256, HIDDEN),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": jnp.ones(HIDDEN),
        "unembed": matrix(HIDDEN, 256) / 10,  # so that every byte is about as likely at first
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def rotate(x: jax.Array) -> jax.Array:
    """Apply the rotary position embedding to queries or keys [sequences, length, heads, size]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * 1000.0 ** (-jnp.arange(half) / half)
    a, b = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attention(x: jax.Array, layer: Params) -> jax.Array:
    qkv = (x @ layer["qkv"]).reshape(*x.shape[:2], 3, HEADS, HIDDEN // HEADS)
    q, k, v = rotate(qkv[:, :, 0]), rotate(qkv[:, :, 1]), qkv[:, :, 2]
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return y.reshape(x.shape) @ layer["attention_out"]


def moe(x: jax.Array, layer: Params, experts: Callable, mean: Callable) -> tuple:
    """Apply the mixture of experts to tokens x [tokens, hidden].

    `experts(x, topk_ids, topk_weights, w_in, w_out)` applies the chosen experts and returns their
    weighted sum and their load; `mean` averages an array over the ranks.
    Returns the output [tokens, hidden], the load-balance loss [], each expert's share of the
    choices [experts], and the load of experts and ranks.
    """
    probabilities = jax.nn.softmax(x @ layer["router"])
    topk_weights, topk_ids = lax.top_k(probabilities, TOP_K)
    topk_weights /= topk_weights.sum(axis=-1, keepdims=True)
    y, load = experts(x, topk_ids, topk_weights, layer["w_in"], layer["w_out"])

    # 1 if the experts are chosen equally often, more if the router prefers some of them. Both
    # factors are averages over all ranks, as a dense model of the same batch would compute them.
    share = mean(jax.nn.one_hot(topk_ids, EXPERTS).mean(axis=(0, 1)))
    balance = EXPERTS * jnp.sum(share * mean(probabilities.mean(axis=0)))
    return y, balance, share, load


def model(params: Params, text: jax.Array, experts: Callable, mean: Callable) -> tuple:
    """Return logits [sequences, length, 256] of the byte that follows each byte of text.

    The other results have a leading axis of MoE layers: the balance loss [layers], the share
    [layers, experts], and the arrays of the load.
    """
    x = params["embed"][text]
    reports = []
    for layer in params["layers"]:
        x = x + attention(rms_norm(x, layer["attention_norm"]), layer)
        tokens = rms_norm(x, layer["moe_norm"]).reshape(-1, HIDDEN)
        y, *report = moe(tokens, layer, experts, mean)
        x = x + y.reshape(x.shape)
        reports.append(report)
    logits = rms_norm(x, params["norm"]) @ params["unembed"]
    return logits, *jax.tree.map(lambda *values: jnp.stack(values), *reports)


class Stats(NamedTuple):
    """What a training step reports, over all ranks."""

    nats: Any  # [] cross-entropy of a byte
    share: Any  # [layers, experts] of the router's choices
    load: ma.ExpertLoad  # of each layer: rows of each expert and rank, and dropped rows


def loss(params: Params, text: jax.Array, experts: Callable, mean: Callable) -> tuple:
    """Return the training loss over text [sequences, length + 1] of all ranks, and its Stats."""
    logits, balance, share, load = model(params, text[:, :-1], experts, mean)
    nats = mean(optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean())
    return nats + BALANCE * balance.mean(), Stats(nats, share, load)


# --------------------------------------------------------------------- two ways to run the experts


def experts_parallel(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    *,
    group: ma.Group,
    capacity: float,
    fp8: bool,
) -> tuple:
    """Apply the experts of all ranks to this rank's tokens x, inside shard_map.

    w_in and w_out hold the weights of this rank's experts. The number of rows of a rank is static,
    and a matrix product takes as long as if all of them were used. Perfect balance would fill
    `topk_ids.size` of them. `capacity` is the number of rows as a multiple of that; rows that do
    not fit are dropped and counted, by the same rule on all ranks. 0 means room for the worst case,
    every token of every rank, so that nothing is dropped.
    """
    room = dict(capacity_factor=capacity or None)
    routing = ma.route(topk_ids, group=group, num_experts=EXPERTS, **room)
    fmt = ma.BlockwiseFp8() if fp8 else None
    y = ma.moe_mlp(
        x, routing, topk_weights, w_in, w_out, activation=jax.nn.gelu, experts_format=fmt
    )
    return y, ma.expert_load(routing)


def experts_dense(
    x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array, w_in: jax.Array, w_out: jax.Array
) -> tuple:
    """Apply every expert to every token on one device; the router's weights select."""
    weights = jnp.einsum("tke,tk->te", jax.nn.one_hot(topk_ids, EXPERTS), topk_weights)
    h = jax.nn.gelu(jnp.einsum("th,ehf->etf", x, w_in))
    y = jnp.einsum("etf,efh->eth", h, w_out)
    rows = jnp.zeros(EXPERTS, jnp.int32).at[topk_ids].add(1)
    none = jnp.zeros(1, jnp.int32)
    load = ma.ExpertLoad(rows, rows.sum(keepdims=True), none, rows, none)
    return jnp.einsum("te,eth->th", weights, y), load


def specs_of(params: Params) -> Params:
    """Split expert weights over the ranks by expert, and replicate everything else."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: P("ep") if path[-1].key in ("w_in", "w_out") else P(), params
    )


# ------------------------------------------------------------------------------ training, sampling


def read_text() -> np.ndarray:
    """Read the source text of Python's standard library as bytes, without its tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages"}
    files = [f for f in sorted(root.rglob("*.py")) if not skip & set(f.relative_to(root).parts)]
    text = b"\n".join(f.read_bytes() for f in files)
    print(f"text: {len(text) / 1e6:.1f} MB in {len(files)} files of {root}")
    return np.frombuffer(text, np.uint8).astype(np.int32)


def batches(text: np.ndarray, sequences: int, seed: int, place: Any = None) -> Iterator[Any]:
    """Yield random sequences of the text, [sequences, LENGTH + 1]; the seed determines them.

    `place` is the sharding of a batch, or None for one device. A process reads the sequences of its
    own devices.
    """
    rng = np.random.default_rng(seed)
    while True:
        first = rng.integers(0, len(text) - LENGTH, (sequences, 1))
        if place is None:
            yield text[first + np.arange(LENGTH + 1)]
        else:
            yield jax.make_array_from_callback(
                (sequences, LENGTH + 1),
                place,
                lambda index: text[first[index[0]] + np.arange(LENGTH + 1)],
            )


def train(
    name: str, loss_fn: Callable, params: Params, data: Iterator[Any], steps: int
) -> tuple[Params, Stats]:
    """Train with Adam; return the parameters, and Stats with a leading axis of steps."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 5e-3, min(50, steps), max(steps, 51), 2e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98))

    @jax.jit
    def update(params: Params, state: Any, text: jax.Array) -> tuple:
        grads, stats = jax.grad(loss_fn, has_aux=True)(params, text)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, stats

    state = jax.jit(optimizer.init)(params)
    history = []
    start = time.perf_counter()
    for step, text in zip(range(steps), data, strict=False):
        params, state, stats = update(params, state, text)
        now = jax.device_get(stats)
        history.append(now)
        if step % max(steps // 20, 1) == 0 or step == steps - 1:
            print(
                f"{name}  step {step:4d}  loss {now.nats:.5f} nats  "
                f"busiest expert {now.share.max() * EXPERTS:.2f} x fair, "
                f"rank {now.load.max_over_mean.max():.2f} x  "
                f"dropped {now.load.dropped_per_rank.sum()} rows  "
                f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )
    return params, jax.tree.map(lambda *values: np.stack(values), *history)


def generate(
    logits_fn: Callable, params: Params, text: jax.Array, count: int, key: jax.Array
) -> jax.Array:
    """Continue each of text [sequences, LENGTH] by count bytes: [count, sequences]."""

    def next_byte(text: jax.Array, key: jax.Array) -> tuple:
        logits = logits_fn(params, text)[:, -1]
        byte = jax.random.categorical(key, logits / 0.8)
        return jnp.concatenate([text[:, 1:], byte[:, None]], axis=1), byte

    return lax.scan(next_byte, text, jax.random.split(key, count))[1]


def draw(curves: dict[str, Stats], tokens: int, path: Path) -> None:
    """Plot the loss against steps, and for each MoE layer the tokens that chose each expert."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, *right) = plt.subplots(
        1, 1 + LAYERS, figsize=(5 * (1 + LAYERS), 4), layout="constrained"
    )
    for (name, stats), style in zip(curves.items(), ("-", "--"), strict=False):
        left.plot(stats.nats, style, label=name)
    left.set(xlabel="step", ylabel="nats per byte", title="loss")
    left.legend()
    share = next(iter(curves.values())).share
    for layer, axes in enumerate(right):
        for expert in range(EXPERTS):
            axes.plot(share[:, layer, expert] * tokens * TOP_K, linewidth=0.8, label=f"{expert}")
        axes.axhline(tokens * TOP_K / EXPERTS, color="black", linestyle=":", label="even")
        axes.set(xlabel="step", ylabel="tokens", title=f"tokens per expert, MoE layer {layer}")
        axes.set_ylim(bottom=0)
        axes.legend(title="expert", ncols=3, fontsize="small")
    figure.savefig(path, dpi=120)
    load = jax.tree.map(lambda x: x[-20:], next(iter(curves.values())).load)
    of_load = path.with_stem(f"{path.stem}_load")
    ma.plot_expert_load(load, title="the last 20 steps").savefig(of_load, dpi=120)
    print(f"drawn: {path}, {of_load}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with one device, dense")
    parser.add_argument("--fp8", action="store_true", help="multiply rows of experts in FP8")
    parser.add_argument("--steps", type=int, help="default: 400, or 60 with --check")
    parser.add_argument("--sequences", type=int, default=16, help="in a step, over all ranks")
    parser.add_argument(
        "--capacity",
        type=float,
        help="rows of a rank as a multiple of what perfect balance needs; "
        "0: the worst case (default: 2, or 0 with --check)",
    )
    parser.add_argument("--sample", type=int, default=250, help="bytes to write at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    parser.add_argument("--platform", choices=["cpu", "gpu"], help="default: GPUs if JAX has any")
    parser.add_argument("--coordinator", help="host:port of process 0, for several processes")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    parser.add_argument(
        "--distributed", action="store_true", help="several processes, found by JAX itself"
    )
    args = parser.parse_args()
    args.steps = args.steps or (60 if args.check else 400)
    if args.capacity is None:
        args.capacity = 0 if args.check else 2
    return args


def main() -> int:
    args = parse_args()
    if args.platform:
        jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda"}[args.platform])
    if args.coordinator or args.distributed:
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    processes = jax.process_count()
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w")

    # Each process has the same number of ranks, and together they share the experts.
    if EXPERTS % processes:
        sys.exit(f"{processes} processes cannot share {EXPERTS} experts")
    each = max(n for n in range(1, jax.local_device_count() + 1) if EXPERTS % (n * processes) == 0)
    ranks = each * processes
    devices = [d for process in range(processes) for d in jax.local_devices(process)[:each]]
    if args.sequences % ranks:
        sys.exit(f"--sequences must be divisible by the {ranks} ranks; got {args.sequences}")
    mesh = jax.make_mesh((ranks,), ("ep",), devices=devices)
    group = ma.Group(mesh, "ep")
    print(
        f"exchange: {'CUDA kernels' if group.path == 'cuda' else 'portable path'} on {ranks} "
        f"{'virtual CPU devices' if jax.default_backend() == 'cpu' else 'GPUs'}"
        f"{f' of {processes} processes' if processes > 1 else ''}"
    )

    # Rounding errors grow in training until they change a token's choice between two experts. From
    # then on the curves of --check are close but no longer the same. In float64 this takes too long
    # to matter. The kernels sum float32; with TF32 products it would happen at once.
    float64 = args.check and group.path == "portable" and not args.fp8
    jax.config.update("jax_enable_x64", float64)
    if args.check:
        jax.config.update("jax_default_matmul_precision", "highest")

    text = read_text()
    new_params = partial(init, jax.random.key(args.seed))
    shapes = jax.eval_shape(new_params)
    count = sum(p.size for p in jax.tree.leaves(shapes)) / 1e6
    print(
        f"model: {count:.2f} M parameters, {LAYERS} layers, top-{TOP_K} of {EXPERTS} experts, "
        f"{args.sequences} x {LENGTH} bytes a step"
    )

    # Outside shard_map a replicated parameter is one array, so jax.grad sums its gradient over the
    # ranks by itself; the gradient of an expert's weights stays with the expert.
    specs = specs_of(shapes)
    experts = partial(experts_parallel, group=group, capacity=args.capacity, fp8=args.fp8)
    average = partial(lax.pmean, axis_name="ep")
    parallel_loss = jax.shard_map(
        partial(loss, experts=experts, mean=average),
        mesh=mesh,
        in_specs=(specs, P("ep")),
        out_specs=P(),
    )
    shardings = jax.tree.map(partial(NamedSharding, mesh), specs)
    split = NamedSharding(mesh, P("ep"))
    with jax.set_mesh(mesh):
        trained, stats = train(
            "expert-parallel",
            parallel_loss,
            jax.jit(new_params, out_shardings=shardings)(),
            batches(text, args.sequences, args.seed, split),
            args.steps,
        )
    curves = {f"expert-parallel, {ranks} ranks": stats}
    print(f"loss {stats.nats[0]:.3f} -> {stats.nats[-20:].mean():.3f} nats (mean of the last 20)")
    rows = args.steps * LAYERS * args.sequences * LENGTH * TOP_K
    print(f"dropped {stats.load.dropped_per_rank.sum()} of {rows} rows")

    if args.check:
        _, dense = train(
            "dense, 1 device",
            partial(loss, experts=experts_dense, mean=lambda value: value),
            jax.jit(new_params)(),
            batches(text, args.sequences, args.seed),
            args.steps,
        )
        curves["dense, 1 device"] = dense
    if jax.process_index() == 0:
        draw(curves, args.sequences * LENGTH, args.out)
    if args.check and args.fp8:
        ends = [curve.nats[-max(args.steps // 4, 1) :].mean() for curve in (stats, dense)]
        apart = abs(ends[0] / ends[1] - 1)
        agree = apart <= 0.01
        print(
            f"check: {'ok' if agree else 'FAILED'}: with experts in FP8, the mean loss of the last "
            f"quarter differs by {apart:.2%} from that of float32 (tolerance 1%)"
        )
        return 0 if agree else 1
    if args.check:
        apart = np.abs(stats.nats - dense.nats)
        early, late = (1e-7, 1e-4) if float64 else (5e-3, 0.1)
        agree = apart[:10].max() <= early and apart.max() <= late
        print(
            f"check: {'ok' if agree else 'FAILED'}: in {stats.nats.dtype} the losses differ by at "
            f"most {apart[:10].max():.1e} nats in the first 10 steps (tolerance {early}), "
            f"{apart.max():.1e} in all (tolerance {late})"
        )
        return 0 if agree else 1

    # One sequence for each rank; nothing may be dropped here, and the first one is shown.
    experts = partial(experts_parallel, group=group, capacity=0, fp8=args.fp8)
    logits_fn = jax.shard_map(
        lambda params, text: model(params, text, experts, average)[0],
        mesh=mesh,
        in_specs=(specs, P("ep")),
        out_specs=P("ep"),
    )
    prompt = next(batches(text, ranks, args.seed + 1))[:, 1:]
    written = jax.jit(generate, static_argnums=(0, 3), out_shardings=NamedSharding(mesh, P()))(
        logits_fn,
        trained,
        jax.make_array_from_callback(prompt.shape, split, lambda index: prompt[index]),
        args.sample,
        jax.random.key(args.seed),
    )
    for title, values in (("prompt", prompt[0]), ("the model", jax.device_get(written)[:, 0])):
        print(f"--- {title}:\n{bytes(values.tolist()).decode(errors='replace')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
