"""Define the expert layer: dispatch, two grouped products around an activation, and combine.

Router weights w multiply the activations a before the second product, because w (a W) = (w a) W.
The combine then sums rows without weights. So the backward pass does not need the result of the
second product, which is neither kept nor computed again. Let D be the dispatched gradient of the
output, and P = D W^T. The gradient of a is w P, the gradient of w is <a, P>, and the gradient of W
is (w a)^T D.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir
from jax.typing import ArrayLike

from .. import compat, paths, scopes
from ..ad import accumulation_dtype, register_fixed
from ..checks import as_array, check_static, merge_axes, short
from ..exchange.arguments import check_combine, check_dispatch
from ..exchange.bind import bind
from ..exchange.dispatch_combine import COMBINE
from ..exchange.recv import Recv
from ..experts.activations import FusedActivation, recognize
from ..experts.primitives import Experts, bias_of_rows, bind_experts
from ..formats.formats import TokenFormat
from ..grouped.api import grouped_dot
from ..grouped.primitives import unspecified_dot
from ..grouped.straight_through import dot_in_fp8
from ..grouped.totals import summing_dot
from ..grouped.weights import BLOCK, QuantizedExperts, encode_experts
from ..paths import Choice
from ..placement.types import Placement
from ..plan.capacity import shared_tokens
from ..plan.options import Exchange, check_exchange
from ..routing.checks import GroupOrAxes, RouteArguments, check_scope
from ..routing.choices import RouterChoices
from ..routing.two_level import AnyRouting
from ..routing.types import RouteOptions
from .chunks import check_one_global_scale, in_chunks
from .dispatch_rows import dispatch_rows
from .fp8 import (
    check_experts_format,
    check_quantized,
    check_training,
    check_weights,
    dispatch_in_fp8,
    format_of_fp8,
    steps_in_fp8,
)
from .placed import Rows, Weights, apply_to_both, fetch_all, num_fetched, to_slots

Activation = Callable[[jax.Array], jax.Array]
Totals = dict[str, jax.Array]
"""The totals of weights by their names (``grouped/totals.py``)."""
FETCHED = "fetched_"  # starts the names of weights of spare slots
QUANTIZED = "quantized_"  # starts the names of weights that are quantized for all chunks
SUMMED = ("w_in", "w_out")
"""The weights whose totals a layer passes to its products."""


class LayerOptions(NamedTuple):
    """The arguments of ``moe_mlp`` that are neither arrays of tokens, nor weights, nor arguments of
    the exchange."""

    activation: Activation
    experts_format: TokenFormat | None
    placement: Placement | None


def moe_mlp(
    x: ArrayLike,
    choices: RouterChoices,
    w_in: ArrayLike | QuantizedExperts,
    w_out: ArrayLike | QuantizedExperts,
    *,
    activation: Activation,
    group: GroupOrAxes | None = None,
    num_experts: int | None = None,
    b_in: ArrayLike | None = None,
    b_out: ArrayLike | None = None,
    exchange: Exchange | None = None,
    shared_weights: ArrayLike | None = None,
    experts_format: TokenFormat | None = None,
    quantized: tuple[QuantizedExperts, QuantizedExperts] | None = None,
    placement: Placement | None = None,
) -> jax.Array:
    """Send tokens to their experts, apply the experts, and return the weighted sums.

    Expert e maps a token to ``activation(x @ w_in[e] + b_in[e]) @ w_out[e] + b_out[e]``. The call
    is equivalent to ``dispatch``, ``grouped_dot``, ``activation``, ``grouped_dot`` and ``combine``
    in this order. It makes two exchanges in the forward pass and two in the backward pass. All JAX
    transformations work as for ``dispatch``, with derivatives of any order.

    For the backward pass, the call keeps the rows [C, H] and the first products [C, I'], and the
    weighted activations [C, I] if the activation is not recognized (``explain`` says why). The
    backward pass computes the activation again, and never needs the second products. Under
    ``jax.checkpoint``, a policy that saves the names ``ROWS_CHECKPOINT_NAME`` and
    ``ROUTING_CHECKPOINT_NAME`` avoids a third exchange in the backward pass, and a second routing.

    With weights of ``quantize_experts``, the layer computes in FP8: tokens travel in
    ``BlockwiseFp8``, their rows are multiplied as they arrive, and weighted activations are
    quantized before the second product. Tokens, router weights and biases have gradients, the
    weights of the experts have none. docs/fp8.md has the details.

    To read how many rows were dropped, pass a ``Routing`` in place of the ids: a ``Routing`` has
    ``num_dropped``, and ``expert_load`` accepts it.

    Args:
      x: tokens, floats [T, H] of 16 bits or more.
      choices: ``RouterChoices``, which ``TopK`` returns. Its ids are integers [T, K], the
        ``topk_ids`` of ``route``; or a ``Routing``. With a ``Routing``, omit the arguments of
        ``route``, or pass equal values. Its weights are floats [T, K], the ``topk_weights`` of
        ``dispatch``; or None for an unweighted sum. They multiply the activations in float32, and
        the result is rounded to the dtype of ``x``. Scores are not read.
      w_in: [L, H, I'] with the dtype of ``x``: the first weights of this rank's L experts. L is
        ``num_experts // group.size``, plus one with a shared expert, which comes first. Or both
        weights are ``QuantizedExperts``; ``x`` is then bfloat16 or float32.
      w_out: [L, I, H] with the dtype of ``x``: the second weights; or ``QuantizedExperts``.
      activation: a function that maps floats [C, I'] to floats [C, I], each row independently; C is
        the capacity. If I' = I, it is an elementwise function such as ``jax.nn.gelu``. If it is
        gated, like ``gated(jax.nn.silu)``, w_in holds gate and up side by side (I' = 2I). The
        function may read arrays of the enclosing function, which have gradients too. Rows without a
        token receive the values of a row with a token, or 0.5 if no row has a token.
      group: the ranks, as in ``route``.
      num_experts: number of experts of all ranks together, as in ``route``.
      b_in: [L, I'] with the dtype of ``x``: biases of the first product, or None.
      b_out: [L, H] with the dtype of ``x``: biases of the second product, or None. Router weights
        multiply them.
      exchange: how tokens travel, an ``Exchange``. With ``replicated``, the result is this rank's
        partial sum; add the partial sums of all ranks with ``lax.psum``.
      shared_weights: weights of the shared expert's outputs: floats [T], a number, or None for 1.
        Needs weights of the choices.
      experts_format: ``BlockwiseFp8()`` to quantize rows and weights for the products, which is for
        training; or None. The products of gradients and weights are then in FP8, too. Quantization
        counts as the identity for all derivatives, and gradients of weights are computed from
        numbers in the dtype of ``x``. docs/fp8.md has the details.
      quantized: ``w_in`` and ``w_out`` by ``quantize_experts(..., transposed=True)``, or None. With
        ``experts_format``, products then read them instead of quantizing ``w_in`` and ``w_out``,
        which have the gradients. Make them once for all micro-batches of a training step.
      placement: a ``Placement`` of replicas of experts, without leading axes and equal on all
        ranks, or None. Each choice then goes to one of the replicas of its expert
        (``choose_slots``). If weights and biases are those of the E / R home experts, the placement
        must have the home form. The weights of spare slots are fetched in one exchange
        (``fetch_experts``), and by default fetched again in the backward pass; with ``num_chunks``
        they are fetched once for all chunks, and kept. If the weights are those of all P / R slots
        of this rank, nothing is fetched. A ``Routing`` must be one of slots. Arrays that
        ``activation`` reads are those of a replica's rank: keep them equal on all ranks.

    Returns:
      [T, H] with the dtype of ``x``. Dropped choices add nothing.

    Raises:
      TypeError: if an argument has the wrong type or dtype.
      ValueError: if an argument has the wrong shape or range, or the group's axes are not in scope.

    Example:
      Two ranks have one expert each. Expert e multiplies by e + 1, and the activation is the
      identity:

      ```python
      import jax
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      group = ma.Group(axis_name="ep", size=2)
      x = jnp.array([[[10.0], [20.0]], [[30.0], [40.0]]])  # [ranks, tokens, hidden]
      ids = jnp.array([[[0, 1], [1, -1]], [[0, -1], [1, 0]]])  # [ranks, tokens, choices]
      weights = jnp.full((2, 2, 2), 0.5)
      w_in = jnp.array([[[[1.0]]], [[[2.0]]]])  # [ranks, local experts, hidden, intermediate]
      w_out = jnp.ones((2, 1, 1, 1))

      choices = ma.RouterChoices(ids, weights)

      def on_rank(*args):
          return ma.moe_mlp(*args, activation=lambda rows: rows, group=group, num_experts=2)

      print(jax.vmap(on_rank, axis_name="ep")(x, choices, w_in, w_out)[..., 0].tolist())
      ```

      ```text
      [[15.0, 20.0], [15.0, 60.0]]
      ```
    """
    if not isinstance(choices, RouterChoices):
        raise TypeError(
            f"choices must be RouterChoices; got {type(choices).__name__}. Pass "
            "ma.RouterChoices(ids, weights)"
        )
    exchange = check_exchange(exchange, has_chunks=True)
    route_arguments = RouteArguments(group, num_experts, exchange)
    options = LayerOptions(activation, experts_format, placement)
    per_token: dict[str, Any] = dict(
        x=x, topk_ids=choices.ids, topk_weights=choices.weights, shared_weights=shared_weights
    )
    weights: dict[str, Any] = dict(w_in=w_in, w_out=w_out, b_in=b_in, b_out=b_out)
    shapes = {name: np.shape(weights[name]) for name in SUMMED}
    given = check_quantized(quantized, experts_format, placement, shapes)
    weights |= {QUANTIZED + name: q for name, q in zip(SUMMED, given)}

    def apply(**arrays: Any) -> tuple[jax.Array, Totals]:
        y, _, totals = mlp_and_routing(route_arguments, options, **of_chunk(arrays))
        return y, totals

    num_chunks = exchange.num_chunks or 1
    if num_chunks > 1:
        reason, remedy = "num_chunks divides the tokens", "Omit num_chunks"
        check_one_global_scale(exchange.token_format, reason, remedy)
        weights = with_fetched(weights, route_arguments, placement)
        chunks = partial(in_chunks, apply, num_chunks, per_token, summed=SUMMED)
        y = quantized_once(chunks, weights, experts_format)
        return lax.collapse(y, 0, -1)
    return apply(**per_token, **weights)[0]


def with_fetched(
    weights: dict[str, Any], route_arguments: RouteArguments, placement: Placement | None
) -> dict[str, Any]:
    """Return the weights of a layer in chunks. They include the weights of spare slots, as
    ``fetched_w_in`` and so on, if the layer would otherwise fetch them for each chunk.

    Args:
      weights: those of ``moe_mlp`` and others, by name.
    """
    if not isinstance(placement, Placement) or route_arguments.group is None:
        return weights  # whose checks raise errors
    group, shared = check_scope(route_arguments.group), bool(route_arguments.exchange.shared_expert)
    given = Weights(*(weights[name] for name in Weights._fields))
    given = jax.tree.map(as_array, given)
    home = placement.num_experts // group.size + shared
    leaves = jax.tree.leaves(given)
    if placement.num_slots == placement.num_experts or any(x.shape[:1] != (home,) for x in leaves):
        return weights
    fetched = fetch_all(given, placement, group, int(shared))
    return weights | {FETCHED + name: w for name, w in fetched._asdict().items()}


def quantized_once(
    in_chunks: Callable[[dict[str, Any]], Any],
    weights: dict[str, Any],
    experts_format: TokenFormat | None,
) -> Any:
    """Return ``in_chunks(weights)``. With ``experts_format``, the weights include those that both
    passes of all chunks read, as ``quantized_w_in`` and ``quantized_w_out``."""
    names = [name for name in SUMMED if name in weights]
    is_done = any(name.startswith((FETCHED, QUANTIZED)) for name in weights)
    if experts_format is None or is_done or not all(map(_is_trained, map(weights.get, names))):
        return in_chunks(weights)  # whose checks raise errors

    # The backward pass quantizes again, because quantized weights would need memory until then.
    @jax.checkpoint
    def quantized(arrays: dict[str, jax.Array]) -> Any:
        found = {QUANTIZED + name: encode_experts(arrays[name]) for name in names}
        return in_chunks(weights | arrays | found)

    return quantized({name: jnp.asarray(as_array(weights[name])) for name in names})


def of_chunk(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of ``mlp_and_routing``, from arrays and weights of ``with_fetched`` and
    ``quantized_once``."""
    kinds: dict[str, dict[str, Any]] = {FETCHED: {}, QUANTIZED: {}, "": {}}
    for name, x in arrays.items():
        prefix = next(prefix for prefix in kinds if name.startswith(prefix))
        kinds[prefix][name.removeprefix(prefix)] = x
    fetched = Weights(**kinds[FETCHED]) if kinds[FETCHED] else None
    return kinds[""] | {"fetched": fetched, "quantized": kinds[QUANTIZED]}


def mlp_and_routing(
    route_arguments: RouteArguments,
    layer_options: LayerOptions,
    *,
    x: ArrayLike,
    topk_ids: ArrayLike | AnyRouting,
    topk_weights: ArrayLike | None,
    w_in: ArrayLike | QuantizedExperts,
    w_out: ArrayLike | QuantizedExperts,
    b_in: ArrayLike | None,
    b_out: ArrayLike | None,
    shared_weights: ArrayLike | None = None,
    totals: Totals | None = None,
    fetched: Weights | None = None,
    quantized: dict[str, QuantizedExperts] | None = None,
) -> tuple[jax.Array, AnyRouting, Totals]:
    """Return what ``moe_mlp`` returns, the routing of its tokens, and totals.

    With a placement, the routing is one of slots.

    Args:
      totals: of the weights that the call has in common with other calls, or None.
      fetched: the weights of spare slots, or None to fetch them.
      quantized: ``w_in`` and ``w_out`` for ``experts_format``, or None to quantize them.
    """
    activation, experts_format, placement = layer_options
    exchange = route_arguments.exchange
    fmt = exchange.token_format
    totals = totals or {}
    in_fp8 = isinstance(w_in, QuantizedExperts) or isinstance(w_out, QuantizedExperts)
    if in_fp8:
        fmt = format_of_fp8(fmt)
    check_experts_format(experts_format, in_fp8)
    if experts_format is not None and fmt is None:
        fmt = experts_format.travelling
    exchange = dataclasses.replace(exchange, token_format=fmt)
    route_arguments = route_arguments._replace(exchange=exchange)
    if placement is not None:
        topk_ids, route_arguments = to_slots(topk_ids, route_arguments, placement)
    arrays = x, topk_ids, topk_weights, shared_weights
    decode = fmt is not None and not in_fp8
    arguments = check_dispatch(*arrays, route_arguments, decode=decode, tail="unspecified")
    tokens = _check_tokens(arguments.leaves, arguments.treedef)
    options = arguments.route_options
    _warn_of_few_rows(exchange, options, tokens.shape[0])
    hidden, experts = tokens.shape[1], options.num_local_experts
    spare = 0  # slots whose weights are not given
    if placement is not None:
        given = w_in.values if isinstance(w_in, QuantizedExperts) else as_array(w_in)
        spare = num_fetched(given.shape, options, placement)
    weights_in: Any
    weights_out: Any
    if in_fp8:
        weights_in, weights_out = check_weights(w_in, w_out, tokens, experts - spare)
    else:
        sizes_of = options, experts - spare
        weights_in = _check_weights("w_in", w_in, tokens, *sizes_of, "H={}, I'", hidden)
        weights_out = _check_weights("w_out", w_out, tokens, *sizes_of, "I, H={}", hidden)
        if experts_format is not None:
            check_training(tokens, weights_in, weights_out)
    width, intermediate = weights_in.shape[2], weights_out.shape[1]
    biases = [
        None if bias is None else _check_bias(name, bias, tokens, (experts - spare, size))
        for name, bias, size in (("b_in", b_in, width), ("b_out", b_out, hidden))
    ]
    if not callable(activation):
        raise TypeError(f"activation must be a function; got {activation!r}")

    bias_in, bias_out = biases
    # A listed activation replaces the user's function on all paths, because its derivatives exist
    # in every supported JAX.
    products = jax.ShapeDtypeStruct((options.capacity, width), tokens.dtype)
    known = recognize(activation, products)
    if known is not None and known.width(intermediate) != width:
        known = None
    # The kernels that apply an activation leave rows unwritten, which jax.debug_nans must not see.
    is_fused = experts_format is None and arguments.options.tail == "unspecified"
    fused = known if is_fused else None
    if known is None:
        why = (
            "the activation is not one of those that the kernel computes (SiLU, GELU, GELU by "
            "tanh, ReLU, each also in ma.gated; squared ReLU; ma.clamped_swiglu), or it reads "
            f"arrays of the enclosing function; got {getattr(activation, '__name__', activation)!r}"
        )
    elif experts_format is not None:
        why = "no activation is fused with experts_format"
    elif in_fp8 and fused is not None:
        why = "no kernel computes the derivative of an activation that is quantized"
    else:
        why = "jax_debug_nans must not see the rows that the kernels leave unwritten"
    weights = Weights(weights_in, bias_in, weights_out, bias_out)
    multiply = _product
    if experts_format is not None:
        multiply = partial(_product, quantized=quantized or {})
    # Keep only the operands of the activation. The backward pass computes it again.
    activate = jax.checkpoint(partial(_activate, known or activation, intermediate, why))
    apply: Callable[..., tuple[jax.Array, Totals]]
    if in_fp8:
        steps = steps_in_fp8(activate, fused, tail=arguments.options.tail)
        apply = partial(experts_of, **steps)
    elif fused is not None:
        apply = partial(_fused_experts, activation=fused)
    else:
        of_rows = lambda product, rows, _: activate(product, rows.weights, rows.has_token)
        apply = partial(experts_of, multiply=multiply, activate=of_rows)
    recv = dispatch_in_fp8(arguments) if in_fp8 else dispatch_rows(arguments)
    if not in_fp8 and (spare or fused is not None):
        rows = _weighted_rows(recv, accumulation_dtype(tokens.dtype))
    else:
        rows = _rows_of(recv)
    if spare:
        assert placement is not None
        alone = lambda *args: apply(*args, totals={})[0]
        in_two = experts_format is not None
        y = apply_to_both(alone, rows, weights, recv, placement, fetched, in_two=in_two)
    else:
        y, totals = apply(rows, weights, recv.group_sizes, totals=totals)
    routing = recv.routing
    back = check_combine(y, routing, None, exchange.wire_dtype)
    # The tail, too: only grouped products read the gradient of y, and they ignore rows after the
    # last group.
    back = back._replace(options=arguments.options.unencoded)
    return back.sums(bind(COMBINE, back.payload, routing, **back.params)), routing, totals


def _warn_of_few_rows(given: Exchange, options: RouteOptions, num_tokens: int) -> None:
    """Warn if an argument limits the rows of all ranks to less than one for each token."""
    size, replicated = options.group.size, options.replicated
    num_rows = options.capacity
    if options.shared_expert:
        num_rows -= shared_tokens(num_tokens, size, replicated)
    if given.capacity is None and given.capacity_factor is None:
        return
    if max(0, num_rows) * (size if replicated else 1) >= num_tokens:
        return
    name = "capacity" if given.capacity_factor is None else "capacity_factor"
    warnings.warn(
        f"{name}={getattr(given, name)!r} leaves {max(0, num_rows)} rows for the experts of each "
        f"of {size} ranks, and {'all ranks have the same' if replicated else 'each rank has'} "
        f"{num_tokens} tokens, so some tokens reach no expert. Pass a larger one, for example "
        "Exchange(capacity_factor=1.25), or omit it to drop nothing",
        stacklevel=2,
    )


def _product(
    rows: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    totals: Totals,
    name: str,
    quantized: dict[str, QuantizedExperts] | None = None,
) -> tuple[jax.Array, Totals]:
    """Return the products of rows, and totals.

    Args:
      name: of the weights in ``totals`` and ``quantized``.
      quantized: None for a product that is not in FP8.
    """
    weights: Any = w
    if quantized is not None:
        weights = dataclasses.replace(quantized.get(name, QuantizedExperts()), source=w)
    if name in totals:
        product, total = summing_dot(rows, weights, totals[name], sizes)
        return product, {**totals, name: total}
    if isinstance(w, tuple):
        return unspecified_dot(rows, w, sizes, None), totals
    if quantized is None:
        return grouped_dot(rows, w, sizes, tail="unspecified"), totals
    return dot_in_fp8(rows, weights, sizes), totals


def _is_trained(w: Any) -> bool:
    """Return whether weights are [L, K, N] of which all squares are whole."""
    shape = () if isinstance(w, QuantizedExperts) else np.shape(w)
    return len(shape) == 3 and not any(size % BLOCK for size in shape[1:])


@scopes.products
def _fused_experts(
    rows: Rows, weights: Weights, sizes: jax.Array, *, totals: Totals, activation: FusedActivation
) -> tuple[jax.Array, Totals]:
    """Return what ``experts_of`` returns, by kernels that apply the activation."""
    names = [name for name in SUMMED if name in totals]
    of_names = tuple(totals[name] for name in names)
    w_in, b_in, w_out, b_out = weights
    operands = Experts(rows.rows, w_in, b_in, rows.weights, w_out, b_out, sizes, of_names)
    y, found = bind_experts(operands, activation=activation)
    return y, {**totals, **dict(zip(names, found, strict=True))}


@scopes.products
def experts_of(
    rows: Rows,
    weights: Weights,
    sizes: jax.Array,
    *,
    totals: Totals,
    multiply: Callable[..., tuple[jax.Array, Totals]],
    activate: Callable[[jax.Array, Rows, jax.Array], Any],
) -> tuple[jax.Array, Totals]:
    """Return the outputs of the experts [C, H], unspecified after the last group, and totals.

    Args:
      multiply: as ``_product``.
      activate: maps first products, rows and sizes to rows for the second product.
    """
    product, totals = multiply(rows.rows, weights.w_in, sizes, totals, "w_in")
    if weights.b_in is not None:
        ones = jnp.ones(rows.has_token.shape, jnp.float32)
        product += bias_of_rows(weights.b_in, ones, sizes)
    h = activate(product, rows, sizes)
    y, totals = multiply(h, weights.w_out, sizes, totals, "w_out")
    if weights.b_out is not None:
        y += bias_of_rows(weights.b_out, rows.weights, sizes)
    return y, totals


unfused_p = compat.Primitive("moe_a2a_unfused_activation")
"""The identity, which marks separate passes of an activation. Its parameter says why the kernels do
not apply the activation."""

register_fixed(unfused_p)


def _choose_passes(ctx: Any, x: Any, *, why: str) -> Choice:
    return Choice("passes over the rows", why, lambda: [x])


mlir.register_lowering(unfused_p, paths.lowering(unfused_p, _choose_passes), platform="cuda")


@scopes.activation
def _activate(
    activation: Activation,
    intermediate: int,
    why: str,
    product: jax.Array,
    row_weights: jax.Array,
    is_row: jax.Array,
) -> jax.Array:
    """Return the activations of rows, times their weights: [C, I] like ``product``.

    Rows without a token, and their weights, hold unspecified values, and the activation and its
    derivative may be infinite at any fixed value. None of these values may reach a gradient. This
    includes the gradient of an array that the activation reads from the enclosing function, which
    adds 0 * act'(row) for each row without a token. So these rows have the values of a row with a
    token before the activation, and are zero after it.
    """
    has_token = is_row[:, None]
    # The first row holds a token if any row does. Otherwise 0.5 is in the domain of most functions.
    first = jnp.where(has_token[:1], unfused_p.bind(product[:1], why=why), 0.5)
    act = activation(jnp.where(has_token, product, first))
    expected = (product.shape[0], intermediate)
    if getattr(act, "shape", None) != expected or not jnp.issubdtype(act.dtype, jnp.floating):
        got = short(act) if hasattr(act, "shape") else repr(act)
        raise ValueError(
            f"activation must return floats [C, I]={list(expected)}, because w_out has I="
            f"{intermediate}; got {got} for {short(product)}. For a gated "
            "activation, use ma.gated"
        )
    acc_dtype = accumulation_dtype(act.dtype)
    weights = jnp.where(is_row, row_weights.astype(acc_dtype), 0)
    weighted = act.astype(acc_dtype) * weights[:, None]
    return jnp.where(has_token, weighted, 0).astype(product.dtype)


def _rows_of(recv: Recv) -> Rows:
    """Return the rows of a rank with their router weights, which are any values for rows without a
    token."""
    is_row = recv.routing.row_rank >= 0
    ones = jnp.ones(is_row.shape, jnp.float32)
    return Rows(recv.rows, ones if recv.weights is None else recv.weights, is_row)


def _weighted_rows(recv: Recv, dtype: Any) -> Rows:
    """Return the rows of a rank with their weights: 0 for padding, any value after the last group,
    1 for other rows without router weights."""
    has_token = recv.routing.row_rank >= 0
    weights = has_token if recv.weights is None else recv.weights
    return Rows(recv.rows, weights.astype(dtype), has_token)


def _check_tokens(leaves: list[jax.Array], treedef: jax.tree_util.PyTreeDef) -> jax.Array:
    """Return the tokens if they are one float array [T, H]; otherwise raise an error."""
    if not jax.tree_util.treedef_is_leaf(treedef):
        raise TypeError(f"x must be one array [num_tokens, hidden]; got {treedef}")
    (x,) = leaves
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise TypeError(f"x must hold floats of 16 bits or more; got {short(x)}. Cast it first")
    if x.ndim != 2:
        raise ValueError(
            f"x must be an array [num_tokens, hidden]; got {short(x)}{merge_axes('x', x, 2)}"
        )
    return x


def _check_weights(
    name: str,
    value: Any,
    x: jax.Array,
    options: RouteOptions,
    experts: int,
    axes: str,
    hidden: int,
) -> jax.Array:
    """Return weights as an array of the local experts, or raise an error.

    Args:
      experts: expected size of the first axis.
      axes: the last two axes for the error, with ``{}`` in place of the size of the hidden axis.
      hidden: expected size of that axis.
    """
    if isinstance(value, tuple | list):
        raise TypeError(
            f"{name} must be one array; got a {type(value).__name__} of {len(value)}. Put gate and "
            f"up side by side: jnp.concatenate({name}, axis=-1)"
        )
    w = as_array(value)
    check_static(name, w)
    expected = f"[L={experts}, {axes.format(hidden)}]"
    at = 1 if axes.startswith("H") else 2
    if w.ndim != 3 or w.shape[0] != experts or w.shape[at] != hidden:
        remedy = _side_by_side(name, w, 2)
        if w.ndim == 3 and w.shape[0] == options.num_experts > experts:
            remedy = (
                ", the experts of all ranks. Split them over the ranks, in jax.shard_map with the "
                f"in_specs P({options.group.axis_name!r}) for {name}"
            )
        raise ValueError(
            f"{name} must have the shape {expected}, for the L local experts (a shared expert is "
            f"one of them) and x {short(x)}; got {short(w)}{remedy}"
        )
    return _with_dtype_of(x, name, w)


def _check_bias(name: str, value: Any, x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Return a bias as an array of the expected shape, or raise an error."""
    bias = as_array(value)
    if bias.shape != shape:
        raise ValueError(
            f"{name} must have the shape {list(shape)}, a row for each local expert; got "
            f"{short(bias)}{_side_by_side(name, bias, 1)}"
        )
    return _with_dtype_of(x, name, bias)


def _side_by_side(name: str, array: Any, axis: int) -> str:
    """Return the end of a message about an array of ``moe``, with gate and up on an axis of their
    own: how to make the form of ``moe_mlp``. Return "" for other arrays."""
    if array.ndim != axis + 2 or array.shape[axis] != 2:
        return ""
    sizes = ", ".join(map(str, array.shape[:axis]))
    return f". Put gate and up side by side: {name}.reshape({sizes}, -1)"


def _with_dtype_of(x: jax.Array, name: str, array: Any) -> jax.Array:
    if array.dtype != x.dtype:
        raise TypeError(
            f"{name} must have the dtype of x, {x.dtype}; got {short(array)}: cast one of them"
        )
    return jnp.asarray(array)
