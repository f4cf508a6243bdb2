"""Write a mixture-of-experts layer as a Flax NNX module, and train it on a toy regression.

    python examples/flax_nnx_moe.py

Use it as a pattern for a module of your own; `jax_moe_a2a.integrations.nnx.MoE` is ready to use.
Runs on all GPUs of a host, or on 8 virtual CPU devices without GPUs.
"""

import os

# Read when JAX starts; it concerns the CPU only.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma

# %% The module. Its experts are split over the mesh axis of its group, and so are the tokens.


class MoE(nnx.Module):
    def __init__(self, hidden, expert_hidden, num_experts, top_k, group, *, rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(hidden, num_experts, use_bias=False, rngs=rngs)
        self.w_in = nnx.Param(init(rngs.params(), (num_experts, hidden, expert_hidden)))
        self.w_out = nnx.Param(init(rngs.params(), (num_experts, expert_hidden, hidden)))
        self.num_experts, self.top_k, self.group = num_experts, top_k, group

    def __call__(self, x):
        """Apply the layer to x [tokens, hidden] of all ranks; returns the same shape."""
        axis = self.group.axis_name

        def on_rank(x, logits, w_in, w_out):
            top_logits, topk_ids = jax.lax.top_k(logits, self.top_k)
            topk_weights = jax.nn.softmax(top_logits)
            numbers = dict(group=self.group, num_experts=self.num_experts)
            experts = dict(w_in=w_in, w_out=w_out, activation=jax.nn.gelu)
            return ma.moe_mlp(x, topk_ids, topk_weights, **experts, **numbers)

        layer = jax.shard_map(on_rank, mesh=self.group.mesh, in_specs=P(axis), out_specs=P(axis))
        return layer(x, self.router(x), self.w_in[...], self.w_out[...])


# %% A mesh of all devices. Flax leaves shardings to the compiler, hence the Auto axis.

mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(AxisType.Auto,))
group = ma.Group(mesh, "ep")
model = MoE(hidden=32, expert_hidden=64, num_experts=8, top_k=2, group=group, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

# %% A function that needs several experts: a different rotation of x in each quadrant.

x = jax.random.normal(jax.random.key(1), (1024, 32))
rotations = jax.random.orthogonal(jax.random.key(2), 32, shape=(4,))
quadrant = 2 * (x[:, 0] > 0) + (x[:, 1] > 0)
target = jnp.einsum("th,thg->tg", x, rotations[quadrant])
x, target = jax.device_put((x, target), NamedSharding(mesh, P("ep")))

# %% Train.


@nnx.jit
def train_step(model, optimizer, x, target):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - target) ** 2))(model)
    optimizer.update(model, grads)
    return loss


losses = []
for step in range(101):
    losses.append(float(train_step(model, optimizer, x, target)))
    if step % 20 == 0:
        print(f"step {step:3d}  loss {losses[-1]:.4f}", flush=True)
assert losses[-1] < losses[0] / 2
