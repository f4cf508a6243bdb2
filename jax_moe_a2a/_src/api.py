"""Define the public functions of the exchange."""

from __future__ import annotations

from typing import Literal

from jax.typing import ArrayLike, DTypeLike

from .checks import PyTree, Tail, short
from .exchange.arguments import DispatchArguments, check_combine, check_dispatch
from .exchange.bind import bind, bind_start, route_and_dispatch, route_ids
from .exchange.dispatch_combine import COMBINE, DISPATCH
from .exchange.inflight import InFlight, check_start, finish_exchange
from .exchange.recv import Recv
from .exchange.weighted import WEIGHTED_COMBINE
from .formats.formats import TokenFormat
from .plan.options import Exchange, check_exchange
from .routing.checks import CheckedIds, GroupOrAxes, RouteArguments, check_route
from .routing.two_level import AnyRouting

# If a rank has at most this many tokens, one primitive routes and dispatches. With 4 GPUs and 256
# tokens, one primitive takes 64 us, and two primitives take 68 us (docs/history/speed.md).
FUSED_MAX_TOKENS = 256


def route(
    topk_ids: ArrayLike,
    *,
    group: GroupOrAxes,
    num_experts: int,
    exchange: Exchange | None = None,
) -> AnyRouting:
    """Compute where every token of this rank goes and where every row of this rank comes from.

    Expert ``e`` lives on rank ``e // (num_experts // group.size)``. Call ``route`` on every rank,
    where the group's axes are in scope: inside ``jax.shard_map``, or inside ``jax.vmap`` with
    ``axis_name``.

    Args:
      topk_ids: integers [T, K] of any integer dtype, K <= 32: global expert ids of this rank's
        tokens. An id outside [0, num_experts) sends nothing. Such ids, except -1, are counted in
        ``num_invalid``. A token may choose an expert twice.
      group: the ranks: a ``Group``, or the name of their axis in scope, such as ``"ep"``. A name
        or a tuple of names stands for ``Group(axis_name=name, size=...)`` with the default options.
      num_experts: number of experts of all ranks together. It must be a multiple of
        ``group.size``, and at most 2**20 for each rank.
      exchange: how tokens travel, an ``Exchange``. Only ``capacity``, ``capacity_factor``,
        ``alignment`` and ``replicated`` affect the routing.

    Returns:
      A ``Routing``, or a ``TwoLevelRouting`` if the group has two levels. ``dispatch`` accepts it
      as ``topk_ids``, and ``combine`` as ``recv``.

    Example:
      Two ranks have one expert each. Both experts receive three rows:

      ```python
      import jax
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      group = ma.Group(axis_name="ep", size=2)
      ids = jnp.array([[[0, 1], [1, -1]], [[0, -1], [1, 0]]])  # [ranks, tokens, choices]
      route = lambda ids: ma.route(ids, group=group, num_experts=2)
      routing = jax.vmap(route, axis_name="ep")(ids)
      print(routing.num_rows, routing.capacity)
      ```

      ```text
      [3 3] 8
      ```
    """
    given = RouteArguments(group, num_experts, check_exchange(exchange))
    return route_ids(*check_route(topk_ids, given))


def dispatch(
    x: PyTree,
    topk_ids: ArrayLike | AnyRouting,
    topk_weights: ArrayLike | None = None,
    *,
    group: GroupOrAxes | None = None,
    num_experts: int | None = None,
    exchange: Exchange | None = None,
    decode: bool = False,
    tail: Tail = "zero",
) -> Recv:
    """Send every token to the ranks of its experts, and return the rows of this rank's experts.

    A rank receives a token only once, even if several of the token's experts are on this rank. The
    rank then makes one row for each of the token's choices that is an expert on this rank. Rows are
    sorted by local expert, then source rank, token and choice. The gradient of a token is the sum
    of the gradients of its rows. Each rank rounds its partial sum once to ``wire_dtype``, as in
    ``combine``.

    With a ``token_format``, each token is quantized once before it travels. Rows arrive as
    ``Quantized`` (values and scales), which have no gradient. With ``decode=True``, rows arrive in
    the dtype of ``x``, and the gradient is straight-through: it equals the gradient of a dispatch
    without a format.

    Args:
      x: array [T, ...] of any dtype, or a pytree of arrays with the same first axis. Integers, and
        floats of 8 bits or fewer, are moved but have zero gradients.
      topk_ids: integers [T, K] as in ``route``; or a ``Routing``. With a ``Routing``, omit the
        arguments of ``route``, or pass equal values.
      topk_weights: router weights, floats [T, K], or None. They become ``Recv.weights``.
      group: the ranks, as in ``route``.
      num_experts: number of experts of all ranks together, as in ``route``.
      exchange: how tokens travel, an ``Exchange``. With a ``token_format``, all arrays of ``x``
        must be quantizable.
      decode: True to decode rows to the dtype of ``x``. This requires a ``token_format``.
      tail: what ``rows`` and ``weights`` contain after the last expert's rows and padding.
        ``"zero"`` writes zeros. ``"unspecified"`` leaves any values, including NaN, and saves the
        time to write zeros. Use ``"unspecified"`` if the experts read only the rows that
        ``group_sizes`` includes, as ``grouped_dot`` does. Padding is always zero. Gradients do not
        depend on the rows after the padding.

    Returns:
      A ``Recv`` with rows [C, ...], group_sizes [L] and other fields. C is the capacity, and L is
      the number of local experts.

    Example:
      Two ranks have one expert and two tokens each. Rank 0 receives three rows for expert 0: token
      10 of rank 0, and tokens 30 and 40 of rank 1. The fourth row has no token:

      ```python
      import jax
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      group = ma.Group(axis_name="ep", size=2)
      x = jnp.array([[[10.0], [20.0]], [[30.0], [40.0]]])  # [ranks, tokens, hidden]
      ids = jnp.array([[[0, 1], [1, -1]], [[0, -1], [1, 0]]])  # [ranks, tokens, choices]

      def on_rank(x, ids):
          exchange = ma.Exchange(capacity=4)
          recv = ma.dispatch(x, ids, group=group, num_experts=2, exchange=exchange)
          return recv.rows[:, 0], recv.src_info.rank

      rows, source_ranks = jax.vmap(on_rank, axis_name="ep")(x, ids)
      print(rows.tolist(), source_ranks.tolist())
      ```

      ```text
      [[10.0, 30.0, 40.0, 0.0], [10.0, 20.0, 40.0, 0.0]] [[0, 1, 1, -1], [0, 0, 1, -1]]
      ```
    """
    arrays = x, topk_ids, topk_weights
    given = RouteArguments(group, num_experts, check_exchange(exchange))
    return bind_dispatch(check_dispatch(*arrays, given, decode=decode, tail=tail))


def bind_dispatch(arguments: DispatchArguments) -> Recv:
    if arguments.route_options.has_levels:
        routing, (payload, params) = routing_of(arguments), arguments.encoded
        return arguments.recv_of_encoded(routing, bind(DISPATCH, payload, routing, **params))
    source, payload, params = arguments.source, arguments.payload, arguments.params
    if isinstance(source, CheckedIds) and len(source.ids) <= FUSED_MAX_TOKENS:
        return arguments.recv(*route_and_dispatch(source, payload, **params))
    routing = routing_of(arguments)
    return arguments.recv(routing, bind(DISPATCH, payload, routing, **params))


def routing_of(arguments: DispatchArguments) -> AnyRouting:
    source = arguments.source
    return route_ids(*source) if isinstance(source, CheckedIds) else source


def combine(
    y: PyTree,
    recv: Recv | AnyRouting,
    *,
    weights: ArrayLike | Literal["recv"] | None = "recv",
    wire_dtype: DTypeLike | TokenFormat | None = None,
    add: PyTree | None = None,
) -> PyTree:
    """Send outputs of experts back to the ranks of the tokens. Sum weight * output for each token.

    Sums are computed in float32 (float64 for float64 rows), in a fixed order. First, each rank sums
    its rows of a token in the order of choices, and rounds this partial sum once to ``wire_dtype``.
    Then the rank of the token adds the partial sums in the order of ranks. A dropped choice adds
    nothing. If tokens are replicated, the result is this rank's partial sum; add the partial sums
    of all ranks with ``lax.psum``. In a group of two levels, each host's sum of partial sums is
    rounded, too.

    Args:
      y: the experts' outputs, floats [C, ...] of 16 bits or more, in the order of ``recv.rows``.
        Without weights, ``y`` may be a pytree of such arrays.
      recv: the ``Recv`` of the dispatch, or a ``Routing``, which has no weights.
      weights: ``"recv"`` for ``recv.weights`` (unweighted if ``dispatch`` got no weights), None for
        an unweighted sum, or floats [C].
      wire_dtype: float dtype of the partial sums while they travel, or a token format
        (``BlockwiseFp8()``, ``MxFp8()``, or ``NvFp4`` with a float as global scale). None means the
        dtype of ``y``. With a token format, the last axis of ``y`` must be a multiple of the
        format's group size. With a group of two levels, a float dtype must not have more bits than
        the dtype of ``y``. The gradient does not depend on ``wire_dtype``. CPUs without float16
        arithmetic round float64 to float16 in two steps, through float32.
      add: an array that is added to the sums, such as a residual or the output of a shared expert,
        or None. The array has the shape, structure and dtypes of the result. It is added last, in
        float32 (float64 for float64 rows), before the only rounding of the result. The gradient of
        ``add`` equals the gradient of the result. With replicated tokens, add the array to the
        result of ``lax.psum`` instead.

    Returns:
      Sums [T, ...] with the structure and dtypes of ``y``.

    Example:
      Two ranks have one expert each. Each expert adds its id plus 1 to its rows:

      ```python
      import jax
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      group = ma.Group(axis_name="ep", size=2)
      x = jnp.array([[[10.0], [20.0]], [[30.0], [40.0]]])  # [ranks, tokens, hidden]
      ids = jnp.array([[[0, 1], [1, -1]], [[0, -1], [1, 0]]])  # [ranks, tokens, choices]
      weights = jnp.full((2, 2, 2), 0.5)

      def on_rank(x, ids, weights):
          recv = ma.dispatch(x, ids, weights, group=group, num_experts=2)
          return ma.combine(recv.rows + recv.expert_ids[0] + 1, recv)

      print(jax.vmap(on_rank, axis_name="ep")(x, ids, weights)[..., 0].tolist())
      ```

      ```text
      [[11.5, 11.0], [15.5, 41.5]]
      ```
    """
    arguments = check_combine(y, recv, weights, wire_dtype, add)
    exchange = COMBINE if arguments.weights is None else WEIGHTED_COMBINE
    payload, routing, params = arguments.payload, arguments.routing, arguments.params
    return arguments.sums(bind(exchange, payload, routing, **params))


def dispatch_start(
    x: PyTree,
    topk_ids: ArrayLike | AnyRouting,
    topk_weights: ArrayLike | None = None,
    *,
    group: GroupOrAxes | None = None,
    num_experts: int | None = None,
    exchange: Exchange | None = None,
    decode: bool = False,
    tail: Tail = "zero",
) -> InFlight:
    """Start a ``dispatch``, and return the ``InFlight`` that ``dispatch_done`` finishes.

    On the CUDA path, tokens travel between start and done on a separate CUDA stream. Use
    ``overlap`` to run other work meanwhile. Several split exchanges can be in flight, and they can
    finish in any order. The ids are routed before the start returns. The backward pass is split
    too: the gradient of ``dispatch_start`` is ``combine_done``, and the gradient of
    ``dispatch_done`` is ``combine_start``. With a ``token_format``, XLA quantizes before the start
    and decodes after the done. With ``decode=True``, the gradient is not split.

    Replicated tokens do not travel, so a routing of replicated tokens is an error. On the CUDA
    path, the call must be under ``jax.jit``.

    Args:
      x: as in ``dispatch``.
      topk_ids: as in ``dispatch``.
      topk_weights: as in ``dispatch``.
      group: as in ``dispatch``.
      num_experts: as in ``dispatch``.
      exchange: as in ``dispatch``.
      decode: as in ``dispatch``.
      tail: as in ``dispatch``.

    Returns:
      An ``InFlight``. Pass it to ``dispatch_done`` once, in the same function.
    """
    arrays = x, topk_ids, topk_weights
    given = RouteArguments(group, num_experts, check_exchange(exchange))
    arguments = check_dispatch(*arrays, given, decode=decode, tail=tail)
    routing, (payload, params) = routing_of(arguments), arguments.encoded
    check_start("dispatch", routing)
    in_flight, bind_done = bind_start(DISPATCH, payload, routing, **params)

    finish = lambda in_flight: arguments.recv_of_encoded(routing, bind_done(in_flight))
    return InFlight("dispatch", in_flight, finish, routing.group)


def dispatch_done(inflight: InFlight) -> Recv:
    """Wait for a ``dispatch_start``, and return the ``Recv`` that ``dispatch`` would have returned.

    Args:
      inflight: the result of ``dispatch_start``, or of an ``overlap`` with it.

    Returns:
      A ``Recv``.
    """
    return finish_exchange(inflight, "dispatch")


def combine_start(
    y: PyTree,
    recv: Recv | AnyRouting,
    *,
    wire_dtype: DTypeLike | TokenFormat | None = None,
) -> InFlight:
    """Start a ``combine`` without weights. Return the ``InFlight`` that ``combine_done`` finishes.

    ``combine_start`` works like ``dispatch_start``, and its gradient is ``dispatch_done``. There is
    no argument ``add``: add the array to the result of ``combine_done``. For a weighted sum,
    multiply the experts' activations or outputs by ``recv.weights[:, None]``, and pass
    ``recv.routing``.

    Args:
      y: as in ``combine``.
      recv: the ``Recv`` of a dispatch without weights, or a ``Routing``.
      wire_dtype: as in ``combine``.

    Returns:
      An ``InFlight``. Pass it to ``combine_done`` once, in the same function.
    """
    if isinstance(recv, Recv) and recv.weights is not None:
        raise ValueError(
            "recv must have no weights in combine_start; got weights "
            f"{short(recv.weights)}. Multiply y by recv.weights[:, None], and pass recv.routing"
        )
    arguments = check_combine(y, recv, None, wire_dtype)
    check_start("combine", arguments.routing)
    payload, routing, params = arguments.payload, arguments.routing, arguments.params
    in_flight, bind_done = bind_start(COMBINE, payload, routing, **params)
    finish = lambda in_flight: arguments.sums(bind_done(in_flight))
    return InFlight("combine", in_flight, finish, routing.group)


def combine_done(inflight: InFlight) -> PyTree:
    """Wait for a ``combine_start``, and return the sums that ``combine`` would have returned.

    Args:
      inflight: the result of ``combine_start``, or of an ``overlap`` with it.

    Returns:
      Sums [T, ...] with the structure and dtypes of ``y`` of ``combine_start``.
    """
    return finish_exchange(inflight, "combine")
