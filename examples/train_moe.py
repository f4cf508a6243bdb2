"""Train a mixture-of-experts language model on the source text of Python's standard library.

    python examples/train_moe.py                               # trains, plots, generates text
    python examples/train_moe.py --mesh 2,4 --checkpoint DIR   # data: 2, ep: 4; saves checkpoints
    python examples/train_moe.py --mesh 4,2 --checkpoint DIR   # continues with another mesh
    python examples/train_moe.py --experts fp8                 # products of experts in FP8
    python examples/train_moe.py --geometry qwen3-30b --layers 8 --sequences 32 --micro-batches 4

The model is a decoder-only transformer that reads bytes; its feed-forward layers are mixtures of
experts (`ma.moe`). All arrays are global. The mesh has the axes "data" and "ep". Tokens are divided
over both axes, and experts over "ep". Stored weights are also divided over "data", and are gathered
before use (FSDP).

Parameters (*masters*) and the optimizer's state are float32. Layers compute with a bfloat16 copy of
the parameters, except in the router. Gradients of micro-batches are added in float32. One
`lax.scan` runs all layers. The backward pass computes each layer again, except for the arrays that
`--remat` selects (by default, the routing and the rows). A loss balances the experts; with
`--balance bias`, biases of the router balance them. The text of a step depends only on the seed and
the step, so an interrupted run continues with the losses of an uninterrupted run.

The program uses all GPUs of a host, or 8 virtual CPU devices if there are no GPUs. Several
processes can train one model together:

    srun python examples/train_moe.py --distributed    # SLURM, Open MPI: JAX finds the processes
    python examples/train_moe.py --coordinator localhost:1234 --num-processes 2 --process-id 0 &
    python examples/train_moe.py --coordinator localhost:1234 --num-processes 2 --process-id 1

If you start the processes yourself, JAX_LOCAL_DEVICE_IDS=0,1 selects the GPUs of a process, and
XLA_FLAGS=--xla_force_host_platform_device_count=4 sets its number of CPU devices. Only process 0
prints.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, NamedTuple

# JAX reads XLA_FLAGS when it starts, so set it before the import. This flag affects only the CPU.
# If XLA_FLAGS already has this flag, that value comes later and overrides the 8.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma

VOCABULARY = 256  # bytes
BATCH = P(("data", "ep"))  # divides the first axis over all devices
BALANCE_LOSS, Z_LOSS, BIAS_RATE = 0.05, 1e-4, 1e-2

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The sizes of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    experts: int
    top_k: int
    expert_hidden: int
    length: int  # number of tokens in a sequence


GEOMETRIES = {
    "demo": Geometry(2, 128, 4, 4, 32, 8, 2, 256, 128),
    "qwen3-30b": Geometry(48, 2048, 32, 4, 128, 128, 8, 768, 4096),
    "mixtral-8x7b": Geometry(32, 4096, 32, 8, 128, 8, 2, 14336, 4096),
}


# ------------------------------------------------------------------------------------- the model


def init(key: jax.Array, g: Geometry) -> Params:
    """Return random parameters in float32. Parameters of layers have a leading axis of layers."""

    def matrix(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) / shape[-2] ** 0.5

    config = ma.MoEConfig(g.hidden, g.expert_hidden, g.experts, ma.TopK(g.top_k))

    def layer(key: jax.Array) -> Params:
        q, kv, out, moe = jax.random.split(key, 4)
        return {
            "attention_norm": jnp.ones(g.hidden),
            "q": matrix(q, g.hidden, g.heads * g.head),
            "kv": matrix(kv, g.hidden, 2 * g.kv_heads * g.head),
            "out": matrix(out, g.heads * g.head, g.hidden),
            "moe_norm": jnp.ones(g.hidden),
            "moe": ma.init_moe(moe, config),
        }

    embed, layers, unembed = jax.random.split(key, 3)
    return {
        "embed": matrix(embed, VOCABULARY, g.hidden),
        "layers": jax.vmap(layer)(jax.random.split(layers, g.layers)),
        "norm": jnp.ones(g.hidden),
        "unembed": matrix(unembed, g.hidden, VOCABULARY) / 10,  # small logits: no byte is preferred
    }


def specs_of(params: Params) -> Params:
    """Return a `PartitionSpec` for each parameter: "ep" divides the experts, and "data" divides one
    axis of each matrix."""
    moe = jax.eval_shape(lambda moe: jax.tree.map(lambda w: w[0], moe), params["layers"]["moe"])
    of_layer = ma.moe_partition_specs(moe, ma.Axes("ep", fsdp="data"))
    specs = jax.tree.map(lambda array: P(None, "data") if array.ndim == 3 else P(), params)
    specs["layers"]["moe"] = jax.tree.map(lambda spec: P(None, *spec), of_layer)
    return specs


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + 1e-6)
    return normed.astype(x.dtype) * scale


def rotate(x: jax.Array) -> jax.Array:
    """Apply the rotary position embedding to queries or keys [sequences, length, heads, size]."""
    half = x.shape[-1] // 2
    places = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None]
    angle = places * 1000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def attention(x: jax.Array, layer: Params, g: Geometry) -> jax.Array:
    q = (x @ layer["q"]).reshape(*x.shape[:2], g.heads, g.head)
    k, v = jnp.split((x @ layer["kv"]).reshape(*x.shape[:2], 2 * g.kv_heads, g.head), 2, axis=2)
    on_gpu = jax.default_backend() == "gpu" and x.dtype == jnp.bfloat16
    y = jax.nn.dot_product_attention(
        rotate(q), rotate(k), v, is_causal=True, implementation="cudnn" if on_gpu else None
    )
    return y.reshape(*x.shape[:2], -1) @ layer["out"]


def dense_moe(x: jax.Array, params: Params) -> tuple:
    """Apply every expert to every token, without an exchange, to compare with `ma.moe`."""
    tokens = x.reshape(-1, x.shape[-1])
    router = params["router"]
    logits = tokens.astype(jnp.float32) @ router.kernel
    choices = router.choose(logits, select_bias=router.select_bias)
    num_experts = logits.shape[-1]
    chosen = jax.nn.one_hot(choices.ids, num_experts, dtype=choices.weights.dtype)
    weights = jnp.einsum("tke,tk->te", chosen, choices.weights)
    experts = params["experts"]
    pair = jnp.einsum("th,ehgi->tegi", tokens, experts.w_in)
    h = jax.nn.silu(pair[:, :, 0]) * pair[:, :, 1]
    y = jnp.einsum("tei,eih,te->th", h, experts.w_out, weights.astype(x.dtype))
    wanted = chosen.sum(axis=(0, 1)).astype(jnp.int32)
    balance = ma.load_balancing_loss(choices.scores, choices.ids)
    z = ma.router_z_loss(logits)
    return y.reshape(x.shape), (balance, z, wanted, jnp.float32(1), jnp.int32(0))


class Options(NamedTuple):
    """The static options of a program, except its geometry."""

    group: ma.Group
    experts: str  # "bf16", "fp8", or "dense" (`dense_moe`)
    dtype: str  # of the computation
    capacity_factor: float | None
    balance: str
    remat: str  # a key of REMAT


def block(x: jax.Array, layer: Params, select_bias: jax.Array, g: Geometry, o: Options) -> tuple:
    """Return the output of a layer, and a report: (balance loss, z-loss, load of each expert
    [experts], largest load of a rank / mean load, number of dropped rows)."""
    x = x + attention(rms_norm(x, layer["attention_norm"]), layer, g)
    tokens = rms_norm(x, layer["moe_norm"])
    # With a bias, use sigmoid scores like DeepSeek-V3: the score of an expert then depends only on
    # its own logit.
    moe = layer["moe"]
    if o.balance == "bias":
        choose = ma.TopK(g.top_k, score="sigmoid")
        moe = moe | {"router": moe["router"].replace(choose=choose, select_bias=select_bias)}
    if o.experts == "dense":
        y, report = dense_moe(tokens, moe)
        return x + y, report
    if o.experts == "fp8":
        moe = moe | {"experts": moe["experts"].in_fp8()}
    y, stats = ma.moe(
        tokens,
        **moe,
        axes=ma.Axes(o.group, data="data"),
        exchange=ma.Exchange(capacity_factor=o.capacity_factor),
    )
    load = stats.load
    report = (load.wanted_per_expert, load.max_over_mean, stats.num_dropped)
    return x + y, (stats.balance_loss, stats.z_loss, *report)


REMAT = {
    "nothing": None,  # repeats all of the layer and its exchanges
    "routing": (ma.ROUTING_CHECKPOINT_NAME,),
    "rows": (ma.ROUTING_CHECKPOINT_NAME, ma.ROWS_CHECKPOINT_NAME),  # repeats no dispatch
}


def model(params: Params, select_bias: Any, text: jax.Array, g: Geometry, o: Options) -> tuple:
    """Return logits [sequences, length, 256] for the next byte after each byte of text, and the
    reports of `block`, with a leading axis of layers."""

    def low(path: tuple, master: jax.Array) -> jax.Array:
        # Rounded logits could choose other experts, so the router stays in float32.
        is_router = any(getattr(entry, "key", None) == "router" for entry in path)
        return master if is_router else master.astype(o.dtype)

    params = jax.tree.map_with_path(low, params)
    layer = functools.partial(block, g=g, o=o)
    names = REMAT[o.remat] or ()
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    @functools.partial(jax.checkpoint, policy=policy)
    def step(x: jax.Array, layer_and_bias: tuple) -> tuple:
        return layer(lax.with_sharding_constraint(x, BATCH), *layer_and_bias)

    x = lax.with_sharding_constraint(params["embed"][text], BATCH)
    x, reports = lax.scan(step, x, (params["layers"], select_bias))
    return rms_norm(x, params["norm"]) @ params["unembed"], reports


# ---------------------------------------------------------------------------------- a training step


class Report(NamedTuple):
    """Numbers that a training step reports, for all ranks and micro-batches."""

    loss: Any  # [] mean cross-entropy per byte, in nats
    wanted: Any  # [layers, experts] number of choices
    fullest: Any  # [layers] largest number of rows of a rank / mean
    dropped: Any  # [] number of dropped rows


def loss_fn(params: Params, select_bias: Any, text: jax.Array, g: Geometry, o: Options) -> tuple:
    """Return the training loss of text [sequences, length + 1], and a Report."""
    logits, reports = model(params, select_bias, text[:, :-1], g, o)
    balance, z, wanted, fullest, dropped = reports
    nats = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), text[:, 1:]
    ).mean()
    total = nats + Z_LOSS * z.mean()
    if o.balance == "loss":
        total += BALANCE_LOSS * balance.mean()
    return total, Report(nats, wanted, fullest, dropped.sum())


def optimizer_of(steps: int) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(0.0, 5e-3, min(50, steps), max(steps, 51), 2e-4)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98))


def train_step(state: dict, text: jax.Array, g: Geometry, o: Options, steps: int) -> tuple:
    """Return the state after a step with text [micro-batches, sequences, length + 1], and a
    Report."""
    params, select_bias = state["params"], state["select_bias"]
    differentiated = jax.value_and_grad(loss_fn, has_aux=True)

    def add(total: tuple, micro_batch: jax.Array) -> tuple:
        (_, report), gradients = differentiated(params, select_bias, micro_batch, g, o)
        return jax.tree.map(jnp.add, total, (gradients, report)), None

    zeros = (
        jax.tree.map(jnp.zeros_like, params),
        Report(jnp.float32(0), jnp.zeros((g.layers, g.experts), jnp.int32), jnp.zeros(g.layers), 0),
    )
    if len(text) == 1:
        (_, report), gradients = differentiated(params, select_bias, text[0], g, o)
    else:
        (gradients, report), _ = lax.scan(add, zeros, text)
    gradients = jax.tree.map(lambda total: total / len(text), gradients)
    updates, opt = optimizer_of(steps).update(gradients, state["opt"], params)
    if o.balance == "bias":
        select_bias = ma.update_select_bias(select_bias, report.wanted, rate=BIAS_RATE)
    report = report._replace(loss=report.loss / len(text), fullest=report.fullest / len(text))
    state = {
        "params": optax.apply_updates(params, updates),
        "opt": opt,
        "select_bias": select_bias,
        "step": state["step"] + 1,
    }
    return state, report


def state_of(key: jax.Array, g: Geometry, steps: int) -> dict:
    """Return the state before the first step."""
    params = init(key, g)
    return {
        "params": params,
        "opt": optimizer_of(steps).init(params),
        "select_bias": jnp.zeros((g.layers, g.experts)),
        "step": jnp.int32(0),
    }


def shardings_of(state: dict, mesh: jax.sharding.Mesh) -> dict:
    """Return the shardings of the state. The moments of a parameter have its sharding."""
    specs = specs_of(state["params"])
    moments = optax.tree_map_params(
        optimizer_of(1),
        lambda _, spec: spec,
        state["opt"],
        specs,
        transform_non_params=lambda _: P(),
    )
    placed = {"params": specs, "opt": moments, "select_bias": P(), "step": P()}
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), placed, is_leaf=lambda leaf: isinstance(leaf, P)
    )


# ------------------------------------------------------------------------------------- data, output


def read_text(path: Path | None) -> np.ndarray:
    """Read a file, or the source text of Python's standard library, as bytes."""
    if path is not None:
        text = path.read_bytes()
    else:
        root = Path(sysconfig.get_paths()["stdlib"])
        skip = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages"}
        files = [f for f in sorted(root.rglob("*.py")) if not skip & set(f.relative_to(root).parts)]
        text = b"\n".join(f.read_bytes() for f in files)
    print(f"text: {len(text) / 1e6:.1f} MB of {path or 'the standard library'}")
    return np.frombuffer(text, np.uint8)


def batch(text: np.ndarray, shape: tuple, seed: tuple, mesh: jax.sharding.Mesh) -> jax.Array:
    """Return random sequences of the text, int32 [micro-batches, sequences, length + 1].

    Each process generates only the sequences of its devices.
    """
    first = np.random.default_rng(seed).integers(0, len(text) - shape[-1], shape[:-1])

    def of_device(index: tuple) -> np.ndarray:
        return text[first[index[:2]][..., None] + np.arange(shape[-1])].astype(np.int32)

    return jax.make_array_from_callback(shape, NamedSharding(mesh, P(None, *BATCH)), of_device)


def generate(params: Params, bias: Any, text: jax.Array, key: jax.Array, count: int, g, o) -> Any:
    """Return bytes [count, sequences]: the model's continuation of text [sequences, length]."""

    def next_byte(text: jax.Array, key: jax.Array) -> tuple:
        logits = model(params, bias, text, g, o)[0][:, -1].astype(jnp.float32)
        byte = jax.random.categorical(key, logits / 0.8).astype(jnp.int32)
        return jnp.concatenate([text[:, 1:], byte[:, None]], axis=1), byte

    return lax.scan(next_byte, text, jax.random.split(key, count))[1]


def draw(history: Report, first: int, path: Path) -> None:
    """Plot the loss and, for at most four layers, each expert's share of the choices."""
    try:
        import matplotlib
    except ImportError:
        print("nothing is drawn: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers = min(history.wanted.shape[1], 4)
    figure, (left, *right) = plt.subplots(
        1, 1 + layers, figsize=(5 * (1 + layers), 4), layout="constrained"
    )
    steps = first + np.arange(len(history.loss))
    left.plot(steps, history.loss)
    left.set(xlabel="step", ylabel="nats per byte", title="training loss")
    for layer, axes in enumerate(right):
        wanted = history.wanted[:, layer]
        axes.plot(steps, wanted / wanted.mean(axis=1, keepdims=True), linewidth=0.8)
        axes.axhline(1, color="black", linestyle=":")
        axes.set(xlabel="step", ylabel="load / mean load", title=f"experts of layer {layer}")
        axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
    print(f"drawn: {path}")


class Log:
    """A log of the reports of training steps. A read of a report waits until its step has run, so
    reports are read in groups."""

    def __init__(self, first: int, tokens: int):
        self.first, self.tokens, self.reports, self.read = first, tokens, [], []
        self.start = time.perf_counter()

    def add(self, report: Report) -> None:
        self.reports.append(report)

    def line(self, step: int, note: str = "") -> None:
        new = jax.device_get(self.reports)
        now = time.perf_counter()
        rate = len(new) * self.tokens / (now - self.start) / jax.device_count()
        self.read += new
        last = new[-1]
        busiest = (last.wanted.max(axis=1) / last.wanted.mean(axis=1)).max()
        memory = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
        print(
            f"step {step:5d}  loss {last.loss:.5f}  {rate:,.0f} tokens/s/device  "
            f"busiest expert {busiest:.2f}, rank {last.fullest.max():.2f} x mean  "
            f"dropped {sum(int(report.dropped) for report in new)} rows  "
            + (f"{memory / 2**30:.1f} GiB  " if memory else "")
            + note,
            flush=True,
        )
        self.reports, self.start = [], now

    def history(self) -> Report:
        return jax.tree.map(lambda *values: np.stack(values), *self.read)


# -------------------------------------------------------------------------------------- the program


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--geometry", choices=GEOMETRIES, default="demo")
    parser.add_argument("--layers", type=int, help="default: those of the geometry")
    parser.add_argument("--mesh", help="sizes of the axes data,ep; default: 1,all devices")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--stop", type=int, help="end after this step, as if interrupted")
    parser.add_argument("--sequences", type=int, default=16, help="of a step, over all ranks")
    parser.add_argument("--micro-batches", type=int, default=1, help="divide the sequences")
    parser.add_argument("--experts", choices=["bf16", "fp8", "dense"], default="bf16")
    parser.add_argument("--dtype", help="default: bfloat16 on GPUs, float32 on CPUs")
    parser.add_argument("--balance", choices=["loss", "bias"], default="loss")
    parser.add_argument("--remat", choices=REMAT, default="rows")
    parser.add_argument(
        "--capacity-factor",
        type=float,
        default=2.0,
        help="rows of a rank as a multiple of the balanced load; 0: room for the worst case",
    )
    parser.add_argument("--implementation", choices=["cuda", "portable"])
    parser.add_argument("--text", type=Path, help="default: Python's standard library")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="folder: continue from it, and save there")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--evaluate-every", type=int, default=0, help="0: never")
    parser.add_argument("--log-every", type=int, help="default: a twentieth of the steps")
    parser.add_argument("--losses", type=Path, help="write the loss of each step, as JSON")
    parser.add_argument("--sample", type=int, default=200, help="bytes to write at the end")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    parser.add_argument("--coordinator", help="host:port of process 0, for several processes")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    parser.add_argument(
        "--distributed", action="store_true", help="several processes, found by JAX itself"
    )
    return parser.parse_args()


def mesh_of(args: argparse.Namespace, g: Geometry) -> jax.sharding.Mesh:
    if args.mesh:
        sizes = tuple(int(size) for size in args.mesh.split(","))
    else:
        sizes = (1, max(n for n in range(1, jax.device_count() + 1) if g.experts % n == 0))
    total = int(np.prod(sizes))
    if args.sequences % (total * args.micro_batches):
        sys.exit(
            f"--sequences must be divisible by {total} ranks x {args.micro_batches} micro-batches; "
            f"got {args.sequences}"
        )
    if jax.process_count() > 1:
        return jax.make_mesh(sizes, ("data", "ep"), axis_types=(AxisType.Auto,) * 2)
    return jax.make_mesh(
        sizes, ("data", "ep"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:total]
    )


def checkpoints_of(folder: Path) -> Any:
    import orbax.checkpoint as ocp

    keep = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    return ocp.CheckpointManager(folder.resolve(), options=keep)


def restored(checkpoints: Any, state: dict) -> dict:
    """Return the newest saved state, with the placement of `state`, or `state` if none was
    saved."""
    import orbax.checkpoint as ocp

    if checkpoints.latest_step() is None:
        return state
    wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    return checkpoints.restore(checkpoints.latest_step(), args=ocp.args.StandardRestore(wanted))


def save(checkpoints: Any, state: dict, step: int) -> None:
    if checkpoints is None or checkpoints.latest_step() == step:
        return
    import orbax.checkpoint as ocp

    checkpoints.save(step, args=ocp.args.StandardSave(state))


def main() -> int:
    args = parse_args()
    if args.coordinator or args.distributed:
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w")
    g = GEOMETRIES[args.geometry]
    g = dataclasses.replace(g, layers=args.layers or g.layers)
    mesh = mesh_of(args, g)
    on_gpu = jax.default_backend() == "gpu"
    o = Options(
        ma.Group(mesh, "ep", implementation=args.implementation),
        args.experts,
        args.dtype or ("bfloat16" if on_gpu else "float32"),
        args.capacity_factor or None,
        args.balance,
        args.remat,
    )
    print(
        f"exchange: {'CUDA kernels' if o.group.path == 'cuda' else 'portable path'} on "
        f"{mesh.shape['data']} x {mesh.shape['ep']} {'GPUs' if on_gpu else 'virtual CPU devices'}"
        + (f" of {jax.process_count()} processes" if jax.process_count() > 1 else "")
    )
    text = read_text(args.text)
    start = functools.partial(state_of, jax.random.key(args.seed), g, args.steps)
    shapes = jax.eval_shape(start)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes["params"])) / 1e6
    print(
        f"model: {parameters:.2f} M parameters, {g.layers} layers, top-{g.top_k} of {g.experts} "
        f"experts, {args.sequences} x {g.length} tokens a step"
    )

    with jax.set_mesh(mesh):
        shardings = shardings_of(shapes, mesh)
        state = jax.jit(start, out_shardings=shardings)()
        checkpoints = checkpoints_of(args.checkpoint) if args.checkpoint else None
        if checkpoints is not None:
            state = restored(checkpoints, state)
        first = int(state["step"])
        last = min(args.stop or args.steps, args.steps)
        if first >= last:
            sys.exit(f"the checkpoint is after step {first}, and the run ends after step {last}")
        step = jax.jit(
            functools.partial(train_step, g=g, o=o, steps=args.steps),
            donate_argnums=0,
            out_shardings=(shardings, None),
        )
        # Evaluation must not drop rows, so it uses another program, with the default capacity.
        exact = o._replace(capacity_factor=None)
        evaluate = jax.jit(lambda *a: loss_fn(*a, g, exact)[1].loss)

        each = args.sequences // args.micro_batches
        shape = (args.micro_batches, each, g.length + 1)
        log_every = args.log_every or max(args.steps // 20, 1)
        log = Log(first, args.sequences * g.length)
        for at in range(first, last):
            state, report = step(state, batch(text, shape, (args.seed, at), mesh))
            log.add(report)
            note = ""
            if args.evaluate_every and (at + 1) % args.evaluate_every == 0:
                held_out = batch(text, (1, each, shape[-1]), (args.seed, at, 1), mesh)[0]
                value = float(evaluate(state["params"], state["select_bias"], held_out))
                note = f"evaluation {value:.5f}"
            if at % log_every == 0 or at + 1 == last or note:
                log.line(at, note)
            if (at + 1) % args.save_every == 0 or at + 1 == last:
                save(checkpoints, state, at + 1)
        if checkpoints is not None:
            checkpoints.wait_until_finished()

        history = log.history()
        end = history.loss[-20:].mean()
        print(f"loss {history.loss[0]:.3f} -> {end:.3f} nats (mean of the last 20)")
        choices = g.layers * g.top_k * args.sequences * g.length * len(history.loss)
        print(f"dropped {history.dropped.sum()} of {choices} rows")
        if jax.process_index() == 0:
            draw(history, first, args.out)
            if args.losses:
                args.losses.write_text(json.dumps([round(float(x), 5) for x in history.loss]))
        if args.sample:
            devices = mesh.size
            prompt = batch(text, (1, devices, g.length), (args.seed + 1,), mesh)[0]
            write = jax.jit(
                functools.partial(generate, count=args.sample, g=g, o=exact),
                out_shardings=NamedSharding(mesh, P()),
            )
            params, bias = state["params"], state["select_bias"]
            written = jax.device_get(write(params, bias, prompt, jax.random.key(args.seed)))
            whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(prompt)
            for title, values in (("prompt", whole[0]), ("the model", written[:, 0])):
                print(
                    f"--- {title}:\n{bytes(np.asarray(values, np.uint8)).decode(errors='replace')}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
