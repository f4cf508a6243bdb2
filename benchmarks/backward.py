"""Make a MoE layer whose backward pass hides an exchange next to both weight gradients.

Under plain ``jax.grad`` the last exchange of the backward pass, the combine of the token gradients,
has nothing next to it, although both weight gradients wait for nothing but their operands. Here the
backward pass is written by hand: the combine starts when the gradients of rows are known, and the
weight gradients are tied between its start and its done.

The tie is ``ma.overlap`` around two grouped products that are linear in the weights. Their
transposes are the weight gradients, and the transposes of ``dispatch_start`` and ``dispatch_done``
are the two halves of the combine. So transposing one linear function orders everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

import jax_moe_a2a as ma

Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def overlapped_layer(
    activation: Callable[[jax.Array], jax.Array], product: Product = ma.grouped_dot, **options: Any
) -> Callable[..., jax.Array]:
    """Return a layer: dispatch, product, activation, product and weighted combine.

    It has reverse-mode derivatives of the first order only.

    Args:
      activation: of rows, elementwise in them: [C, I'] -> [C, I].
      product: a grouped product of rows, weights and group sizes.
      **options: of ``ma.dispatch``.

    Returns:
      ``layer(x [T, H], topk_ids [T, K], topk_weights [T, K], w_in [L, H, I'], w_out [L, I, H])``,
      which returns [T, H].
    """

    def run(x: Any, topk_ids: Any, topk_weights: Any, w_in: Any, w_out: Any) -> Any:
        recv = ma.dispatch(x, topk_ids, topk_weights, **options)
        pre, sizes = product(recv.rows, w_in, recv.group_sizes), recv.group_sizes
        act, activation_vjp = jax.vjp(activation, pre)
        y = product(act, w_out, sizes)
        combine = lambda y, weights: ma.combine(y, recv.routing, weights=weights)
        out, combine_vjp = jax.vjp(combine, y, recv.weights)
        saved = recv.routing, recv.rows, pre, act, (x, topk_weights, w_in, w_out)
        return out, (*saved, activation_vjp, combine_vjp)

    @jax.custom_vjp
    def layer(*args: Any) -> Any:
        return run(*args)[0]

    def backward(saved: Any, ct: Any) -> Any:
        routing, rows, pre, act, primals, activation_vjp, combine_vjp = saved
        sizes, (_, _, w_in, w_out) = routing.group_sizes, primals
        d_y, d_row_weights = combine_vjp(ct)
        (d_act,) = jax.linear_transpose(lambda act: product(act, w_out, sizes), act)(d_y)
        (d_pre,) = activation_vjp(d_act)
        (d_rows,) = jax.linear_transpose(lambda rows: product(rows, w_in, sizes), rows)(d_pre)

        def transposed(x: Any, topk_weights: Any, w_in: Any, w_out: Any) -> Any:
            inflight = ma.dispatch_start(x, routing, topk_weights)
            products = lambda w_in, w_out: (product(rows, w_in, sizes), product(act, w_out, sizes))
            inflight, made = ma.overlap(inflight, products, w_in, w_out)
            recv = ma.dispatch_done(inflight)
            return recv.rows, recv.weights, *made

        cotangents = d_rows, d_row_weights, d_pre, d_y
        d_x, d_weights, d_in, d_out = jax.linear_transpose(transposed, *primals)(cotangents)
        return d_x, None, d_weights, d_in, d_out

    layer.defvjp(run, backward)
    return layer
