"""Define the expert layer: dispatch, two grouped products around an activation, and combine.

Router weights w multiply the activations a before the second product, because w (a W) = (w a) W.
The combine then sums rows without weights, and the backward pass does not need the result of the
second product. Let D be the gradient of the output after its dispatch, and P = D W^T. Then the
gradient of a is w P, the gradient of w is <a, P>, and the gradient of W is (w a)^T D.

With ``weigh_input``, the weights multiply the rows before the first product instead.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .. import scopes
from ..ad import accumulation_dtype, fixed
from ..checks import as_array, check_floats, check_static, merge_axes, short
from ..exchange.arguments import check_combine, check_dispatch
from ..exchange.bind import bind
from ..exchange.dispatch_combine import COMBINE
from ..exchange.recv import Recv
from ..formats.formats import BlockwiseFp8, RowsInFp8, TokenFormat
from ..grouped.weights import QuantizedExperts, encode_experts
from ..placement.types import Placement
from ..plan.options import Exchange, check_exchange
from ..routing.checks import GroupOrAxes, RouteArguments, check_scope
from ..routing.choices import RouterChoices
from ..routing.two_level import AnyRouting
from ..routing.types import RouteOptions
from .chunks import LayerWeights, Tokens, check_one_global_scale, in_chunks
from .dispatch_rows import dispatch_in_fp8, dispatch_rows
from .forms import choose_form
from .placed import Rows, apply_to_both, fetch_all, to_slots
from .weights import (
    Activation,
    Experts,
    Totals,
    activation_of,
    check_weights,
    flat,
    returned_totals,
    totals_of,
)


class LayerOptions(NamedTuple):
    """The options of an expert layer, except the options of its exchange."""

    activation: Activation
    placement: Placement | None
    weigh_input: bool


def moe_mlp(
    x: ArrayLike,
    choices: RouterChoices,
    experts: Experts,
    *,
    group: GroupOrAxes | None = None,
    num_experts: int | None = None,
    exchange: Exchange | None = None,
    placement: Placement | None = None,
    return_totals: bool = False,
) -> jax.Array | tuple[jax.Array, Totals | None]:
    """Send tokens to their experts, apply the experts, and return the weighted sum for each token.

    ``Experts`` defines what an expert computes. The call does the work of ``dispatch``,
    ``grouped_dot``, the activation, ``grouped_dot`` and ``combine``, in this order. It makes two
    exchanges in the forward pass and two in the backward pass. All JAX transformations work as for
    ``dispatch``, with derivatives of any order.

    For the backward pass, the call keeps the rows [C, H] and the results of the first product. If
    no kernel applies the activation (``explain`` says why), the call also keeps the weighted
    activations [C, I]. In both cases, the backward pass computes the activation again, and never
    needs the results of the second product. Policies of ``jax.checkpoint`` can save the names
    ``ROWS_CHECKPOINT_NAME``, ``ROUTING_CHECKPOINT_NAME`` and ``PRODUCTS_CHECKPOINT_NAME``. With
    ``QuantizedExperts``, products are in FP8 (docs/fp8.md). To read how many rows were dropped,
    pass a ``Routing`` in place of the ids. Read its ``num_dropped``, or call
    ``expert_load(routing)``.

    Args:
      x: tokens, floats [T, H] of 16 bits or more.
      choices: ``RouterChoices``, as ``TopK`` returns them. The ids are integers [T, K] as in
        ``route``, or a ``Routing``. With a ``Routing``, omit ``group``, ``num_experts`` and the
        options of ``route`` in ``exchange``, or pass the values of the routing. The weights are
        floats [T, K], or None for an unweighted sum. The weights multiply the activations in
        float32, and the products are rounded to the dtype of ``x``. With ``experts.weigh_input``,
        the weights multiply the rows instead. The call does not read the scores.
      experts: the weights of this rank's L experts. L is ``num_experts // group.size``.
      group: the ranks, as in ``route``.
      num_experts: number of experts of all ranks together, as in ``route``.
      exchange: how tokens travel, an ``Exchange``. With ``replicated``, each rank returns a partial
        sum. Add the partial sums of all ranks with ``lax.psum``.
      placement: a ``Placement`` with replicas of experts, or None. It has no leading axes, and is
        equal on all ranks. Each choice goes to one replica of its expert (``choose_slots``). If
        ``experts`` are the E / R home experts, the placement must have the home form. The call then
        fetches the weights of spare slots in one exchange (``fetch_experts``), and again in the
        backward pass. With ``num_chunks``, it fetches them only once, and keeps them. If
        ``experts`` are the experts of all P / R slots of this rank (``move_experts``), nothing is
        fetched. To train in FP8, pass ``experts.in_fp8()``, which is not yet quantized. A
        ``Routing`` must be a routing of slots. If ``activation`` reads arrays, they must be equal
        on all ranks, because a replica reads the arrays of its rank.
      return_totals: True to also return the totals that ``accumulate_grads`` reads.

    Returns:
      [T, H] with the dtype of ``x``. Dropped choices add 0. With ``return_totals``, a pair of this
      array and the new ``experts.totals`` for the next use of the experts, or None without totals.

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
      weights_in = jnp.array([[[[1.0]]], [[[2.0]]]])  # [ranks, local experts, hidden, intermediate]
      experts = ma.Experts(weights_in, jnp.ones((2, 1, 1, 1)), activation=lambda rows: rows)
      choices = ma.RouterChoices(ids, weights)

      def on_rank(*args):
          return ma.moe_mlp(*args, group=group, num_experts=2)

      print(jax.vmap(on_rank, axis_name="ep")(x, choices, experts)[..., 0].tolist())
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
    x = check_tokens(x)
    experts = check_weights(experts, x)
    arguments = RouteArguments(group, num_experts, exchange)
    options = LayerOptions(activation_of(experts), placement, experts.weigh_input)
    tokens = Tokens(x, choices.ids, choices.weights)
    weights, totals = LayerWeights(flat(experts)), totals_of(experts)
    num_chunks = exchange.num_chunks or 1

    def of_chunk(*arrays: Any) -> tuple[jax.Array, Totals]:
        y, _, totals = mlp_and_routing(arguments, options, *arrays)
        return y, totals

    if num_chunks == 1:
        y, totals = of_chunk(tokens, weights, totals)
    else:
        reason, remedy = "num_chunks divides the tokens", "Omit num_chunks"
        check_one_global_scale(exchange.token_format, reason, remedy)
        weights = with_fetched(weights, arguments, placement)
        totals, y = quantized_once(of_chunk, num_chunks, tokens, weights, totals)
        y = lax.collapse(y, 0, -1)
    if not return_totals:
        return y
    return y, returned_totals(experts, totals)


def with_fetched(
    weights: LayerWeights, route_arguments: RouteArguments, placement: Placement | None
) -> LayerWeights:
    """Return the weights of a rank, with the weights of spare slots if the chunks need them."""
    if not isinstance(placement, Placement) or route_arguments.group is None:
        return weights  # ``mlp_and_routing`` will raise an error
    group, given = check_scope(route_arguments.group), weights.experts
    home = placement.num_experts // group.size
    if placement.num_slots == placement.num_experts or given.w_in.shape[0] != home:
        return weights
    return weights._replace(fetched=fetch_all(given, placement, group))


def quantized_once(
    layer: Callable[[Tokens, LayerWeights, Totals], tuple[Any, Totals]],
    num_chunks: int,
    tokens: Tokens,
    weights: LayerWeights,
    totals: Totals,
) -> tuple[Totals, Any]:
    """Return the result of ``in_chunks``. For training in FP8 without fetched weights, the
    forward pass and the backward pass each quantize the weights once for all chunks."""
    experts = weights.experts
    is_done = not experts.is_trained_in_fp8 or experts.w_in.values is not None
    if is_done or weights.fetched is not None:
        return in_chunks(layer, num_chunks, tokens, weights, totals)

    # The backward pass quantizes again, so that quantized weights do not fill memory until then.
    @jax.checkpoint
    def quantized(experts: Experts) -> Any:
        encoded = experts.map_weights(
            lambda w: dataclasses.replace(encode_experts(w.source), source=w.source)
        )
        return in_chunks(layer, num_chunks, tokens, weights._replace(experts=encoded), totals)

    return quantized(experts)


def mlp_and_routing(
    route_arguments: RouteArguments,
    layer_options: LayerOptions,
    tokens: Tokens,
    weights: LayerWeights,
    totals: Totals,
) -> tuple[jax.Array, AnyRouting, Totals]:
    """Return the result of ``moe_mlp``, the routing (of slots with a placement), and new totals."""
    activation, placement, weigh_input = layer_options
    x, topk_ids, topk_weights = tokens[:3]
    given, hidden = weights.experts, x.shape[1]
    in_fp8 = isinstance(given.w_in, QuantizedExperts)
    is_frozen = in_fp8 and not given.is_trained_in_fp8
    exchange = route_arguments.exchange
    if in_fp8:
        if given.w_in.k > hidden:  # pad the tokens and not the rows, because there are more rows
            x = jnp.pad(x, ((0, 0), (0, given.w_in.k - hidden)))
        group = topk_ids.group if isinstance(topk_ids, AnyRouting) else route_arguments.group
        travels = group is None or check_scope(group).size > 1
        fmt = format_in_fp8(exchange.token_format, is_frozen=is_frozen, travels=travels)
        exchange = dataclasses.replace(exchange, token_format=fmt)
        route_arguments = route_arguments._replace(exchange=exchange)
    if placement is not None:
        topk_ids, route_arguments = to_slots(topk_ids, route_arguments, placement)
        if given.is_trained_in_fp8 and given.w_in.values is not None:
            raise ValueError(
                "experts must not be quantized yet with a placement, because replicas quantize what"
                " they fetch; got values. Pass experts.in_fp8()"
            )
    arrays = x, topk_ids, topk_weights
    decode = exchange.token_format is not None and not is_frozen
    arguments = check_dispatch(*arrays, route_arguments, decode=decode, tail="unspecified")
    if decode and given.is_trained_in_fp8 and isinstance(exchange.token_format, BlockwiseFp8):
        # The first product reads the rows in FP8, and the gradient of w_in reads decoded rows.
        kept = arguments.options._replace(keeps_encoded=True)
        arguments = arguments._replace(options=kept)
    options, tail = arguments.route_options, arguments.options.tail
    _warn_of_few_rows(exchange, options, x.shape[0])
    num_given, spare = given.w_in.shape[0], 0  # ``spare``: number of fetched slots
    if placement is not None and num_given == placement.num_experts // options.group.size:
        spare = options.num_local_experts - num_given
    _check_num_experts(given, options, options.num_local_experts - spare)
    form = choose_form(given, activation, tail)
    recv = dispatch_in_fp8(arguments) if is_frozen else dispatch_rows(arguments)
    rows = _weighted_rows(recv, accumulation_dtype(x.dtype))
    if weigh_input and recv.weights is not None:
        rows = _weighted_inputs(rows)
    if spare:
        assert placement is not None
        alone = lambda rows, weights, sizes: form(rows, weights, sizes, Totals())[0]
        y = apply_to_both(alone, rows, given, recv, placement, weights.fetched)
    else:
        y, totals = form(rows, given, recv.group_sizes, totals)
    routing = recv.routing
    back = check_combine(y, routing, None, exchange.wire_dtype)
    # The gradient of y may have any values after the last group, because only grouped products read
    # it, and they ignore these rows.
    back = back._replace(options=arguments.options.unencoded)
    sums = back.sums(bind(COMBINE, back.payload, routing, **back.params))
    return sums if y.shape[1] == hidden else sums[:, :hidden], routing, totals


def format_in_fp8(fmt: TokenFormat | None, *, is_frozen: bool, travels: bool) -> TokenFormat | None:
    """Return the token format for experts in FP8, or raise an error. If tokens do not travel and
    experts are trained, the format may be None, because the products quantize."""
    if not is_frozen:
        return BlockwiseFp8() if fmt is None and travels else fmt
    if not isinstance(fmt, BlockwiseFp8 | None):
        raise ValueError(
            "token_format must be BlockwiseFp8() or None with frozen weights in FP8, because "
            f"products read the rows in it; got {fmt!r}"
        )
    return BlockwiseFp8()


def _check_num_experts(experts: Experts, options: RouteOptions, expected: int) -> None:
    num = experts.w_in.shape[0]
    if num == expected:
        return
    remedy = ""
    if num == options.num_experts > expected:
        remedy = (
            ", the experts of all ranks. Split them over the ranks, in jax.shard_map with the "
            f"in_specs P({options.group.axis_name!r}) for experts"
        )
    raise ValueError(
        f"experts must be the L={expected} local experts of this rank; got {num}{remedy}"
    )


def _warn_of_few_rows(given: Exchange, options: RouteOptions, num_tokens: int) -> None:
    """Warn if the capacity of all ranks together is less than one row for each token."""
    size, replicated = options.group.size, options.replicated
    if given.capacity is None and given.capacity_factor is None:
        return
    if options.capacity * (size if replicated else 1) >= num_tokens:
        return
    name = "capacity" if given.capacity_factor is None else "capacity_factor"
    warnings.warn(
        f"{name}={getattr(given, name)!r} leaves {options.capacity} rows for the experts of each "
        f"of {size} ranks, and {'all ranks have the same' if replicated else 'each rank has'} "
        f"{num_tokens} tokens, so some tokens reach no expert. Pass a larger one, for example "
        "Exchange(capacity_factor=1.25), or omit it to drop nothing",
        stacklevel=2,
    )


def _weighted_rows(recv: Recv, dtype: jnp.dtype) -> Rows:
    """Return the rows of a rank with their weights. Without router weights, the weight of a row
    with a token is 1. The weight of padding is 0. Rows after the last group may have any weight."""
    has_token = recv.routing.row_rank >= 0
    weights = has_token if recv.weights is None else recv.weights
    return Rows(recv.rows, weights.astype(dtype), has_token)


@scopes.activation
def _weighted_inputs(rows: Rows) -> Rows:
    weights = rows.weights[:, None]

    def scaled(x: jax.Array) -> jax.Array:
        dtype = accumulation_dtype(x.dtype)
        return (x.astype(dtype) * weights.astype(dtype)).astype(x.dtype)

    of_outputs = rows.has_token.astype(rows.weights.dtype)
    if not isinstance(rows.rows, RowsInFp8):
        return Rows(scaled(rows.rows), of_outputs, rows.has_token)
    encoded, floats = rows.rows
    scales = encoded.scales * fixed(weights).astype(encoded.scales.dtype)
    return Rows(
        RowsInFp8(encoded._replace(scales=scales), scaled(floats)), of_outputs, rows.has_token
    )


def check_tokens(value: object) -> jax.Array:
    if not jax.tree_util.treedef_is_leaf(jax.tree.structure(value)):
        raise TypeError(
            f"x must be one array [num_tokens, hidden]; got {jax.tree.structure(value)}"
        )
    x = as_array(value)
    check_floats("x", x)
    if x.ndim != 2:
        raise ValueError(
            f"x must be an array [num_tokens, hidden]; got {short(x)}{merge_axes('x', x, 2)}"
        )
    check_static("x", x)
    return jnp.asarray(x)
