"""Train a Flax NNX transformer whose feed-forward layers are mixtures of experts.

    python examples/flax_nnx_moe.py

Sequences are divided over the mesh axes "data" and "ep", and experts over "ep". The program uses
all GPUs of a host, or 8 virtual CPU devices if there are no GPUs.
"""

import os

# JAX reads XLA_FLAGS when it starts. This flag affects only the CPU.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma
from jax_moe_a2a.integrations.nnx import MoE

VOCAB, HIDDEN, HEADS, LENGTH, BATCH = 64, 32, 4, 16, 16
CONFIG = ma.MoEConfig(HIDDEN, expert_hidden=48, num_experts=8, choose=ma.TopK(2))
EXCHANGE = ma.Exchange(capacity_factor=2.0)
AXES = ma.Axes("ep", data="data")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = (nnx.RMSNorm(HIDDEN, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(HEADS, HIDDEN, decode=False, rngs=rngs)
        self.moe = MoE(CONFIG, AXES, exchange=EXCHANGE, rngs=rngs)

    def __call__(self, x):
        x += self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        y, stats = self.moe(self.norm2(x))
        return x + y, stats


# %% Make a mesh (nnx.Embed needs Auto axes), and create parameters on the devices that store them.

shape = (2, jax.device_count() // 2) if jax.device_count() % 2 == 0 else (1, jax.device_count())
jax.set_mesh(jax.make_mesh(shape, ("data", "ep"), axis_types=(AxisType.Auto,) * 2))
rngs = nnx.Rngs(0)
embed, out = nnx.Embed(VOCAB, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, VOCAB, rngs=rngs)
model = nnx.List([embed, Block(rngs), Block(rngs), out])
optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, ids):
    def loss(model):
        embed, *blocks, out = model
        x, statistics = embed(ids[:, :-1]), []
        for block in blocks:
            x, stats = block(x)
            statistics.append(stats)
        nats = optax.softmax_cross_entropy_with_integer_labels(out(x), ids[:, 1:]).mean()
        balance = sum(stats.balance_loss for stats in statistics)
        return nats + 0.01 * balance, (nats, [stats.load for stats in statistics])

    grads, results = nnx.grad(loss, has_aux=True)(model)
    optimizer.update(model, grads)
    return results


# %% Train on sequences in which each number is the previous number plus 3.

first = jax.random.randint(jax.random.key(1), (BATCH, 1), 0, VOCAB)
ids = jax.device_put((first + 3 * jnp.arange(LENGTH + 1)) % VOCAB, P(("data", "ep")))
losses = []
for step in range(26):
    loss, loads = train_step(model, optimizer, ids)
    losses.append(float(loss))
    if step % 5 == 0:
        busiest = max(float(load.max_over_mean) for load in loads)
        dropped = sum(int(load.dropped_per_rank.sum()) for load in loads)
        print(f"step {step:3d}  loss {loss:.4f}  busiest rank {busiest:.2f} x, dropped {dropped}")
assert losses[-1] < losses[0] / 2
