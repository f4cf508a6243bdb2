"""Add the gradients of a loss to float32 totals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ..ad import accumulation_dtype
from ..checks import short
from ..grouped.totals import total_of, with_total
from .weights import Experts, Totals

Value = TypeVar("Value")


def accumulate_grads(loss: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that adds the gradients of a loss to totals, in float32.

    ``add(totals, params, *args)`` computes ``loss(params, *args)``, and returns new totals and what
    the loss returned. Call it for each micro-batch of a step, for example in ``lax.scan``, with the
    totals as the carry. All transformations inside and around the call work.

    The kernels of ``moe`` add the gradients of expert weights in the memory of their totals, without
    rounding, if the loss returns the layer's statistics, or what ``moe_mlp`` returns with
    ``return_totals``, as a part of its auxiliary result. If experts are used twice, give the second
    use ``experts.replace(totals=...)`` with the totals that the first returned. All other gradients
    are computed, and then added to their totals, with equal results but for rounding.

    Args:
      loss: maps parameters, a pytree of float arrays, and other arguments to a scalar; or to a pair
        of a scalar and an auxiliary result.
      has_aux: True if ``loss`` returns a pair.

    Returns:
      A function of ``totals``, ``params`` and the other arguments. ``totals`` is like ``params``, in
      float32, such as ``optax.tree.zeros_like(params, dtype=jnp.float32)``. The function returns the
      new totals, and the result of ``loss``, whose auxiliary result has None in place of totals.

    Example:
      ```python
      import jax
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      add = ma.accumulate_grads(lambda w, x: (w * x).sum())
      w, zero = jnp.ones(2, jnp.bfloat16), jnp.zeros(2, jnp.float32)
      batches = jnp.arange(6, dtype=jnp.bfloat16).reshape(3, 2)
      totals, losses = jax.lax.scan(lambda totals, x: add(totals, w, x), zero, batches)
      print(totals, totals.dtype, losses)
      ```

      ```text
      [6. 9.] float32 [1 5 9]
      ```
    """

    def add(totals: Any, params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        _check_totals(totals, params)
        leaves, tree = jax.tree.flatten(params, is_leaf=_is_experts)
        given = tree.flatten_up_to(totals)
        own: dict[str, Totals] = {}  # the totals of experts
        for i, experts in enumerate(leaves):
            if _has_totals(experts):
                own[str(i)] = Totals(name=str(i)).of(given[i])
        others = [_without_weights(x) if str(i) in own else x for i, x in enumerate(leaves)]

        def of(zeros: dict[str, Totals], others: list[Any]) -> Any:
            inputs = list(others)
            for i, experts in enumerate(leaves):
                if str(i) not in zeros:
                    continue
                # The gradients of weights take the way of the totals.
                zero = zeros[str(i)]
                totals = jax.tree.map(total_of, zero.of(experts), zero)
                fixed = jax.tree.map(lax.stop_gradient, zero.of(experts))
                tied = jax.tree.map(with_total, fixed, totals)
                inputs[i] = others[i].replace(w_in=tied.w_in, w_out=tied.w_out, totals=totals)
            value, aux = loss(tree.unflatten(inputs), *args, **kwargs), None
            value, aux = value if has_aux else (value, aux)
            returned = {
                x.name: x
                for x in jax.tree.leaves(aux, is_leaf=_is_totals)
                if _is_totals(x) and x.name in own and _types(x) == _types(own[x.name])
            }
            aux = jax.tree.map(lambda x: None if _is_totals(x) else x, aux, is_leaf=_is_totals)
            return (value, returned), aux

        zeros = jax.tree.map(jnp.zeros_like, own)
        (value, returned), transpose, aux = jax.vjp(of, zeros, others, has_aux=True)
        # A product adds to the total that the next product with these weights returned. So the
        # totals go where the last product returned them, and come out as the gradient of the zeros.
        found, gradients = transpose((jnp.ones_like(value), {name: own[name] for name in returned}))
        sum_of = lambda total, gradient: total + gradient.astype(total.dtype)
        for name, total in own.items():
            if name not in returned:
                found[name] = jax.tree.map(sum_of, total, found[name])
        sums = []
        for i, (total, gradient) in enumerate(zip(given, gradients, strict=True)):
            if str(i) not in own:
                sums.append(jax.tree.map(sum_of, total, gradient))
                continue
            new, rest = found[str(i)], _without_weights(total)
            rest = jax.tree.map(sum_of, rest, gradient)
            sums.append(rest.replace(w_in=new.w_in, w_out=new.w_out))
        return tree.unflatten(sums), (value, aux) if has_aux else value

    return add


def _is_experts(x: object) -> bool:
    return isinstance(x, Experts)


def _is_totals(x: object) -> bool:
    return isinstance(x, Totals)


def _has_totals(x: object) -> bool:
    """Return True for experts whose weights are arrays."""
    return isinstance(x, Experts) and all(hasattr(w, "dtype") for w in (x.w_in, x.w_out))


def _without_weights(experts: Experts) -> Experts:
    return experts.replace(w_in=None, w_out=None)


def _types(totals: Totals) -> list[Any]:
    return [(x.shape, x.dtype) for x in jax.tree.leaves(totals)]


def _check_totals(totals: Any, params: Any) -> None:
    """Raise an error if totals are not like parameters."""
    of_params, of_totals = jax.tree.structure(params), jax.tree.structure(totals)
    if of_params != of_totals:
        raise ValueError(f"totals must have the structure of params, {of_params}; got {of_totals}")

    def check(path: Any, param: Any, total: Any) -> None:
        name = jax.tree_util.keystr(path)
        if not jnp.issubdtype(param.dtype, jnp.floating):
            raise TypeError(f"params{name} must be floats; got {short(param)}")
        dtype = accumulation_dtype(param.dtype)
        if (total.shape, total.dtype) != (param.shape, dtype):
            raise ValueError(
                f"totals{name} must be {dtype}{list(param.shape)}, because params{name} is "
                f"{short(param)}; got {short(total)}. Start with "
                "optax.tree.zeros_like(params, dtype=jnp.float32)"
            )

    jax.tree_util.tree_map_with_path(check, params, totals)
