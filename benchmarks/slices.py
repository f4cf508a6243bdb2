"""Define slices of real MoE models, and their training step with any MoE layer. A slice has the
widths of its model, fewer layers, and a vocabulary reduced in proportion. Attention does not have
the windows, sinks and biases of GPT-OSS. Router weights are a softmax over the chosen experts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_moe_a2a as ma

from .experts import swiglu
from .workload import round_up

BF16, F32 = jnp.bfloat16, jnp.float32
EP, EVERYWHERE = PartitionSpec("ep"), PartitionSpec()
BALANCE, Z_LOSS = 0.01, 0.001  # of the router's losses
ADAMW = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
    optax.add_decayed_weights(0.1),
)
NOISE = 0.1  # share of the tokens that do not depend on the previous token
IN_F32 = ("norm", "router")  # words in names of parameters that stay in float32

MoE = Callable[..., tuple[jax.Array, jax.Array]]
"""(x [T, H], ids and weights [T, K], ``Experts``) -> (sums [T, H], number of dropped choices)."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    title: str
    of_layers: int
    """The number of layers of the whole model."""
    of_vocabulary: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    experts: int
    top_k: int
    intermediate: int
    layers: int
    shared: int = 0
    """The intermediate size of the shared expert, or 0."""
    qk_norm: bool = False
    q_rank: int = 0
    """The rank of the queries of MLA, or 0."""
    kv_rank: int = 0
    """The rank of the keys and values of MLA, or 0."""
    clamped: bool = False
    """True: biases and the clamped SwiGLU of GPT-OSS."""
    length: int = 4096

    @property
    def vocabulary(self) -> int:
        return round_up(self.of_vocabulary * self.layers // self.of_layers, 256)

    def tokens(self, rows: int, ranks: int) -> int:
        """Return the tokens of a rank for a mean of ``rows`` per expert."""
        return max(1, rows * self.experts // (self.top_k * ranks))


GEOMETRIES = {
    "qwen3": Geometry(
        *("Qwen3-30B-A3B", 48, 151936, 2048, 32, 4, 128, 128, 8, 768), layers=8, qk_norm=True
    ),
    # The slice has 64 of 256 experts, so each of 4 ranks has 16, as if 16 ranks had all. A
    # head has 64 elements with RoPE and 64 without; in the model, it has 64 and 128.
    "dsv3": Geometry(
        *("DeepSeek-V3", 61, 129280, 7168, 128, 128, 128, 64, 8, 2048),
        **dict(layers=3, shared=2048, q_rank=1536, kv_rank=512),
    ),
    "mixtral": Geometry(*("Mixtral 8x7B", 32, 32000, 4096, 32, 8, 128, 8, 2, 14336), layers=4),
    "gpt_oss": Geometry(
        *("GPT-OSS-120B", 36, 201088, 2880, 64, 8, 64, 128, 4, 2880), layers=2, clamped=True
    ),
}


def tiny(g: Geometry) -> Geometry:
    return dataclasses.replace(
        g,
        **dict(hidden=128, heads=4, kv_heads=max(1, 4 * g.kv_heads // g.heads), head=32),
        **dict(experts=min(g.experts, 16), intermediate=128, layers=2, of_vocabulary=256),
        **dict(of_layers=2, shared=min(g.shared, 128), length=32),
        **dict(q_rank=min(g.q_rank, 64), kv_rank=min(g.kv_rank, 64)),
    )


def shapes(g: Geometry) -> dict[str, tuple[int, ...]]:
    q, kv, h = g.heads * g.head, g.kv_heads * g.head, g.hidden
    rope = g.head // 2
    found: dict[str, tuple[int, ...]] = dict(norm_attention=(h,), norm_moe=(h,), o=(q, h))
    if g.q_rank:
        found |= dict(q_down=(h, g.q_rank), norm_q=(g.q_rank,), q_up=(g.q_rank, q))
    else:
        found |= dict(q=(h, q))
    if g.kv_rank:
        found |= dict(kv_down=(h, g.kv_rank + rope), norm_kv=(g.kv_rank,))
        found |= dict(kv_up=(g.kv_rank, g.heads * (2 * g.head - rope)))
    else:
        found |= dict(k=(h, kv), v=(h, kv))
    if g.qk_norm:
        found |= dict(norm_q=(g.head,), norm_k=(g.head,))
    found |= dict(router=(h, g.experts), w_in=(g.experts, h, 2, g.intermediate))
    found |= dict(w_out=(g.experts, g.intermediate, h))
    if g.clamped:
        found |= dict(b_in=(g.experts, 2, g.intermediate), b_out=(g.experts, h))
    if g.shared:
        found |= dict(shared_in=(h, 2 * g.shared), shared_out=(g.shared, h))
    return found


def specs(g: Geometry) -> dict[str, Any]:
    divided = PartitionSpec(None, "ep")  # the first axis is the layer
    kept = lambda name: len(shapes(g)[name]) == 1 or name == "router"
    layers = {name: EVERYWHERE if kept(name) else divided for name in shapes(g)}
    return dict(embed=divided, layers=layers, norm=EVERYWHERE, unembed=EP)


def init(g: Geometry) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 64))
    normal = lambda shape, scale: jax.random.normal(next(keys), shape, F32) * scale
    layers: dict[str, jax.Array] = {}
    for name, shape in shapes(g).items():
        if "norm" in name:
            layers[name] = jnp.ones((g.layers, *shape), F32)
            continue
        scale = 0.1 if name.startswith("b_") else shape[-3 if name == "w_in" else -2] ** -0.5
        if name in ("o", "w_out", "shared_out"):
            scale *= (2 * g.layers) ** -0.5
        layers[name] = normal((g.layers, *shape), scale)
    params = dict(embed=normal((g.vocabulary, g.hidden), 1), layers=layers)
    params |= dict(norm=jnp.ones(g.hidden, F32))
    params |= dict(unembed=normal((g.hidden, g.vocabulary), 0.3 * g.hidden**-0.5))
    return dict(params=params, moments=ADAMW.init(params))


def shardings(g: Geometry, mesh: Mesh) -> dict[str, Any]:
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)
    put = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(g), is_leaf=is_spec)
    adam = optax.ScaleByAdamState(NamedSharding(mesh, EVERYWHERE), put, put)
    return dict(params=put, moments=(optax.EmptyState(), adam, optax.EmptyState()))


def flops(g: Geometry, length: int) -> tuple[int, int]:
    """Return (FLOP of all products, FLOP of routed experts) of a token, forward and backward,
    without rematerialization."""
    dense = sum(
        int(np.prod(shape))
        for name, shape in shapes(g).items()
        if len(shape) == 2 and "b_" not in name
    )
    routed = 3 * g.top_k * g.hidden * g.intermediate
    attention = length * g.heads * g.head  # half of the pairs, two products
    all_layers = g.layers * (dense + routed + attention)
    return 6 * (all_layers + g.hidden * g.vocabulary), 6 * g.layers * routed


def batches(g: Geometry, shape: tuple[int, ...], number: int) -> np.ndarray:
    """Return token ids [number, *shape]. Most ids depend on the previous id."""
    rng = np.random.default_rng(0)
    follows = rng.permutation(g.vocabulary)
    tokens = rng.integers(0, g.vocabulary, (number, *shape), np.int32)
    is_noise = rng.random(tokens.shape) < NOISE
    for t in range(1, shape[-1]):
        before = follows[tokens[..., t - 1]]
        tokens[..., t] = np.where(is_noise[..., t], tokens[..., t], before)
    return tokens


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(F32)
    y *= lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return (y * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


def rotate(x: jax.Array) -> jax.Array:
    """Apply RoPE to x [B, S, N, D]."""
    half = x.shape[-1] // 2
    frequency = 1e6 ** (-np.arange(half, dtype=np.float32) / half)
    angle = (np.arange(x.shape[1], dtype=np.float32)[:, None] * frequency)[None, :, None]
    a, b = jnp.split(x.astype(F32), 2, -1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Model:
    g: Geometry
    mesh: Mesh
    moe: MoE
    attention: str
    """For ``jax.nn.dot_product_attention``."""
    quantize: Callable[[Any], Any] | None = None
    """Quantizes w_in or w_out of all layers."""

    def everywhere(self, w: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(w, NamedSharding(self.mesh, EVERYWHERE))

    def divided(self, x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, EP))

    def on_ranks(self, fn: Callable[..., Any], *args: Any) -> Any:
        mapped = jax.shard_map(fn, mesh=self.mesh, in_specs=EP, out_specs=EP, check_vma=False)
        return mapped(*args)

    def attend(self, x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
        """x: [B, S, H]."""
        g, times = self.g, lambda x, name: x @ self.everywhere(p[name])
        heads = lambda y: y.reshape(*x.shape[:2], -1, g.head)
        if g.q_rank:
            q = heads(times(rms_norm(times(x, "q_down"), p["norm_q"]), "q_up"))
        else:
            q = heads(times(x, "q"))
        if g.kv_rank:
            rope = g.head // 2
            latent, common = jnp.split(times(x, "kv_down"), [g.kv_rank], -1)
            kv = times(rms_norm(latent, p["norm_kv"]), "kv_up")
            k, v = jnp.split(kv.reshape(*x.shape[:2], g.heads, -1), [g.head - rope], -1)
            common = jnp.broadcast_to(rotate(common[:, :, None]), (*k.shape[:3], rope))
            k = jnp.concatenate([k, common], -1)
            alone, rotated = jnp.split(q, [g.head - rope], -1)
            q = jnp.concatenate([alone, rotate(rotated)], -1)
        else:
            k, v = heads(times(x, "k")), heads(times(x, "v"))
            if g.qk_norm:
                q, k = rms_norm(q, p["norm_q"]), rms_norm(k, p["norm_k"])
            q, k = rotate(q), rotate(k)
        attention = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation=self.attention
        )
        return times(self.on_ranks(attention, q, k, v).reshape(*x.shape[:2], -1), "o")

    def route(self, x: jax.Array, router: jax.Array, given: jax.Array | None) -> Any:
        """Return (ids and weights [B, S, K], the router's loss, choices per expert [experts])."""
        experts = self.g.experts
        logits = x.astype(F32) @ router
        scores = jax.nn.softmax(logits, -1)
        if given is None:
            weights, ids = lax.top_k(scores, self.g.top_k)
        else:
            weights, ids = jnp.take_along_axis(scores, given, -1), given
        weights /= weights.sum(-1, keepdims=True)
        counts = (ids[..., None] == jnp.arange(experts)[None, None, None]).sum((0, 1, 2))
        loss = BALANCE * experts * jnp.sum(counts / ids.size * scores.mean((0, 1)))
        loss += Z_LOSS * jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
        return ids, weights, loss, counts

    def experts(self, p: dict[str, Any]) -> ma.Experts:
        w_in, w_out = p["w_in"], p["w_out"]
        if "quantized" in p:
            w_in, w_out = (
                ma.QuantizedExperts(q.values, q.scales, q.transposed, source=w)
                for q, w in zip(p["quantized"], (w_in, w_out), strict=True)
            )
        activation = ma.clamped_swiglu() if self.g.clamped else ma.gated(jax.nn.silu)
        return ma.Experts(w_in, w_out, p.get("b_in"), p.get("b_out"), activation=activation)

    def layer(self, given: jax.Array | None, x: jax.Array, scanned: Any) -> Any:
        """Return x [B, S, H], the router's loss, dropped choices, and choices per expert."""
        number, p = scanned
        x += self.attend(rms_norm(x, p["norm_attention"]), p)
        h = rms_norm(x, p["norm_moe"])
        if given is not None:  # layers must choose different experts
            given = (given + number * (self.g.experts // self.g.layers)) % self.g.experts
        ids, weights, loss, counts = self.route(h, p["router"], given)

        def on_rank(h: Any, ids: Any, weights: Any, experts: Any) -> Any:
            flat = [a.reshape(-1, a.shape[-1]) for a in (h, ids, weights)]
            y, dropped = self.moe(*flat, experts)
            return y.reshape(h.shape), jnp.full(1, dropped, jnp.int32)

        y, dropped = self.on_ranks(on_rank, h, ids, weights, self.experts(p))
        if self.g.shared:
            w_in, w_out = (self.everywhere(p[name]) for name in ("shared_in", "shared_out"))
            y += swiglu(h @ w_in) @ w_out
        return self.divided(x + y), (loss, dropped.sum(), counts)

    def loss(self, params: Any, quantized: Any, tokens: jax.Array, given: Any) -> Any:
        """Return the loss of tokens [B, S + 1], and (cross-entropy, dropped choices, choices per
        expert)."""
        g, layers = self.g, params["layers"]
        layers = layers if quantized is None else layers | dict(quantized=quantized)
        x = self.divided(self.everywhere(params["embed"])[tokens[:, :-1]])
        body = jax.checkpoint(functools.partial(self.layer, given), prevent_cse=False)
        x, (router, dropped, counts) = lax.scan(body, x, (jnp.arange(g.layers), layers))
        logits = rms_norm(x, params["norm"]) @ self.everywhere(params["unembed"])
        logits = logits.astype(F32)
        is_right = tokens[:, 1:, None] == jnp.arange(g.vocabulary)[None, None]
        right = jnp.where(is_right, logits, 0).sum(-1)  # needs no scatter
        nats = jnp.mean(jax.nn.logsumexp(logits, -1) - right)
        return nats + router.sum(), (nats, dropped.sum(), counts)

    def gradients(self, params: Any, tokens: jax.Array, given: Any) -> Any:
        """Return the mean gradients over M micro-batches [M, B, S + 1], and the tuple of
        ``loss``."""
        cast = lambda path, p: p if any(w in str(path[-1]) for w in IN_F32) else p.astype(BF16)
        compute = jax.tree.map_with_path(cast, params)
        layers, quantized = compute["layers"], None
        if self.quantize:
            quantized = self.quantize(layers["w_in"]), self.quantize(layers["w_out"])
        gradient = jax.grad(self.loss, has_aux=True)
        if len(tokens) == 1:
            return gradient(compute, quantized, tokens[0], given)

        def add(total: Any, micro_batch: Any) -> Any:
            found, more = gradient(compute, quantized, micro_batch, given)
            return jax.tree.map(lambda t, g: t + g.astype(F32) / len(tokens), total, found), more

        placed = shardings(self.g, self.mesh)["params"]
        zeros = lax.with_sharding_constraint(jax.tree.map(jnp.zeros_like, params), placed)
        total, (nats, dropped, counts) = lax.scan(add, zeros, tokens)
        return total, (nats.mean(), dropped.sum(), counts.sum(0))

    def step(self, state: Any, tokens: jax.Array, given: Any, rate: jax.Array) -> Any:
        """Return the next state, and the tuple of ``loss``. ``tokens`` are [M, B, S + 1]; ``given``
        ids [B, S, K] replace the router's choices."""
        gradients, results = self.gradients(state["params"], tokens, given)
        gradients = jax.tree.map(lambda g: g.astype(F32), gradients)
        changes, moments = ADAMW.update(gradients, state["moments"], state["params"])
        params = jax.tree.map(lambda p, change: p - rate * change, state["params"], changes)
        return dict(params=params, moments=moments), results
