"""Define ``accumulate_grads``, which adds the gradients of a loss to float32 arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..ad import accumulation_dtype
from ..checks import short
from ..grouped.totals import total_of, with_total
from ..grouped.weights import QuantizedExperts
from .weights import Experts, Totals


def accumulate_grads(loss: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that adds the gradients of a loss to float32 arrays, the totals.

    ``add(totals, params, *args)`` computes ``loss(params, *args)``, and returns the new totals and
    the result of the loss. Call ``add`` for each micro-batch of a step, for example in
    ``lax.scan``, with the totals as the carry. All JAX transformations work on ``add`` and inside
    ``loss``.

    ``moe`` returns a ``Totals`` in ``MoEStatistics``, and ``moe_mlp`` returns one as second result
    with ``return_totals``. If the loss returns this ``Totals`` in its auxiliary result, kernels add
    the gradients of expert weights directly to the totals, without rounding. If two calls use the
    same experts, give the second call the ``Totals`` of the first: ``experts.replace(totals=...)``.

    Args:
      loss: a function of parameters (a pytree of float arrays) and other arguments. It returns a
        scalar, or a pair of a scalar and an auxiliary result.
      has_aux: True if ``loss`` returns a pair.

    Returns:
      A function of ``totals``, ``params`` and the other arguments. ``totals`` has the structure and
      shapes of ``params``, in float32. In the auxiliary result, None replaces each ``Totals``.

    Example:
      ```python
      import jax
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      add = ma.accumulate_grads(lambda w, x: (w * x).sum())
      w, zeros = jnp.ones(2, jnp.bfloat16), jnp.zeros(2, jnp.float32)
      batches = jnp.arange(6, dtype=jnp.bfloat16).reshape(3, 2)
      totals, losses = jax.lax.scan(lambda totals, x: add(totals, w, x), zeros, batches)
      print(totals, losses)
      ```

      ```text
      [6. 9.] [1 5 9]
      ```
    """

    def add(totals: Any, params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        jax.tree_util.tree_map_with_path(_check, params, totals)
        tree: Any
        leaves, tree = jax.tree.flatten(params, is_leaf=lambda x: isinstance(x, Experts))
        given = tree.flatten_up_to(totals)

        def of(zeros: list[Any]) -> Any:
            tied = [_tied(*each, str(i)) for i, each in enumerate(zip(leaves, zeros, strict=True))]
            out = loss(tree.unflatten(tied), *args, **kwargs)
            value, aux = out if has_aux else (out, None)
            if not jax.tree_util.all_leaves([value]):
                remedy = ". Pass has_aux=True" if isinstance(out, tuple) and not has_aux else ""
                got = type(value).__name__
                raise TypeError(f"loss must return a scalar; got a {got}{remedy}")
            is_totals = lambda x: isinstance(x, Totals)
            found = [x for x in jax.tree.leaves(aux, is_leaf=is_totals) if is_totals(x)]
            aux = jax.tree.map(lambda x: None if is_totals(x) else x, aux, is_leaf=is_totals)
            # Skip ``Totals`` whose types differ from ``given``, for example if weights were cast.
            whole = (x for x in found if _types(x) == _types(x.of(given[int(x.name)])))
            return (value, {x.name: x for x in whole}), aux

        zeros = jax.tree.map(jnp.zeros_like, given)
        (value, returned), transpose, aux = jax.vjp(of, zeros, has_aux=True)
        # Products add gradients to the cotangents of ``Totals``. The first cotangent is ``given``.
        ends = {name: x.of(given[int(name)]) for name, x in returned.items()}
        (found,) = transpose((jnp.ones_like(value), ends))
        sums = jax.tree.map(jnp.add, given, found)
        for i in map(int, returned):
            sums[i] = dataclasses.replace(sums[i], w_in=found[i].w_in, w_out=found[i].w_out)
        return tree.unflatten(sums), (value, aux) if has_aux else value

    return add


def _tied(weights: Any, zeros: Any, name: str) -> Any:
    """Return the parameters, such that ``zeros`` receives the gradients of the parameters."""
    totals = jax.tree.map(total_of, weights, zeros)
    tied = jax.tree.map(lambda w, total: with_total(lax.stop_gradient(w), total), weights, totals)
    if not isinstance(tied, Experts) or isinstance(tied.w_in, QuantizedExperts):
        return tied
    return dataclasses.replace(tied, totals=Totals(totals.w_in, totals.w_out, name))


def _types(totals: Totals) -> list[Any]:
    return [(x.shape, x.dtype) for x in jax.tree.leaves(totals)]


def _check(path: Any, param: Any, total: Any) -> None:
    """Raise an error if a total does not have its parameter's shape and accumulation dtype."""
    name, dtype = jax.tree_util.keystr(path), accumulation_dtype(param.dtype)
    if not jnp.issubdtype(param.dtype, jnp.floating):
        raise TypeError(f"params{name} must be floats; got {short(param)}")
    if (total.shape, total.dtype) != (param.shape, dtype):
        is_swapped = (param.shape, param.dtype) == (total.shape, accumulation_dtype(total.dtype))
        start = "Start with jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)"
        remedy = "Call add(totals, params, *args)" if is_swapped else start
        raise ValueError(
            f"totals{name} must be {dtype}{list(param.shape)}, because params{name} is "
            f"{short(param)}; got {short(total)}. {remedy}"
        )
