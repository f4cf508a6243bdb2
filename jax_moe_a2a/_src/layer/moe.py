"""Define ``moe``, the complete layer on global arrays: router, losses, experts and placements."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from .. import compat, scopes
from ..ad import accumulation_dtype
from ..checks import as_array, check_floats, fitting_experts, short
from ..experts.activations import recognize
from ..group.group import Group
from ..grouped.weights import BLOCK, QuantizedExperts
from ..placement.types import Placement, check_placement
from ..plan.options import Exchange, check_exchange
from ..routing.checks import RouteArguments, axes_of
from ..routing.choices import RouterChoices
from .axes import Axes, AxesLike, as_axes
from .balance import balance_loss_of, shares_of, sum_of_columns, z_columns, z_loss_of
from .chunks import LayerWeights, Tokens, check_one_global_scale
from .load import ExpertLoad, columns_of, load_of, most_choices, rows_of, sum_choices
from .logits import router_logits
from .lora import add_product
from .mlp import LayerOptions, mlp_and_routing, quantized_once, with_fetched
from .parameters import names_of, place
from .router import Router, RouterLike, check_router, choose_experts, map_arrays, num_outputs
from .sums import exact_in_float32, sum_over
from .top_k import TopK, check_logits
from .weights import (
    Activation,
    Experts,
    Totals,
    activation_of,
    check_weights,
    flat,
    returned_totals,
    specs_of,
    totals_of,
)

OUTPUTS = "logits", "choices"
# Sums over tokens first add groups of this many tokens, and then the sums of the groups.
TOKENS_PER_SUM = 64


class MoEStatistics(NamedTuple):
    """The second result of ``moe``: losses, and the load of experts and ranks, over all tokens."""

    balance_loss: jax.Array
    """[] float32: the ``load_balancing_loss`` without a coefficient; 0 without scores."""
    z_loss: jax.Array
    """[] float32: the ``router_z_loss``, without a coefficient; 0 if there is no router."""
    load: ExpertLoad
    """The load of experts and ranks, as sums over the data axes and over chunks. Pass
    ``load.wanted_per_expert`` [E] to ``update_select_bias``."""
    logits: jax.Array | None = None
    """[..., E] floats with the leading axes of the tokens, if ``outputs`` has ``"logits"``."""
    choices: RouterChoices | None = None
    """Ids [..., K] and weights [..., K] of the tokens, if ``outputs`` has ``"choices"``. For masked
    tokens, ids are -1 and weights are 0."""
    totals: Totals | None = None
    """The new ``experts.totals`` for the next use of the experts, as in ``accumulate_grads``."""

    @property
    def num_dropped(self) -> jax.Array:
        """Return the number of rows that all ranks dropped, [] int32."""
        return self.load.dropped_per_rank.sum(axis=-1)

    @property
    def num_invalid(self) -> jax.Array:
        """Return the number of ids outside [-1, E), [] int32. Such choices add 0 to the output."""
        return self.load.invalid_per_rank.sum(axis=-1)

    def summary(self) -> dict[str, jax.Array]:
        """Return scalars by name for a training log, such as Weights & Biases or TensorBoard.

        The method accepts traced arrays and NumPy arrays. If the statistics have leading axes, for
        example for layers or steps, the results are arrays with these axes.

        | name | meaning |
        | --- | --- |
        | ``balance_loss``, ``z_loss`` | the losses, without a coefficient |
        | ``max_over_mean`` | load of the busiest rank / the mean; 1 is balanced |
        | ``expert_max_over_mean`` | choices of the busiest expert / the mean; 1 is balanced |
        | ``entropy`` | entropy of the experts' shares of the choices, 0 to 1; 1 is balanced |
        | ``num_idle`` | experts that no token chose |
        | ``num_dropped``, ``dropped_share`` | dropped rows, and their share of all rows |
        | ``num_invalid`` | ids outside [-1, E) |
        """
        of_load = "max_over_mean", "expert_max_over_mean", "entropy", "num_idle", "dropped_share"
        own = "balance_loss", "z_loss", "num_dropped", "num_invalid"
        found = {name: getattr(self, name) for name in own}
        return found | {name: getattr(self.load, name) for name in of_load}


def moe(
    x: ArrayLike,
    router: RouterLike,
    experts: Experts,
    *,
    axes: AxesLike,
    shared: Experts | None = None,
    mask: ArrayLike | None = None,
    router_input: ArrayLike | None = None,
    exchange: Exchange | None = None,
    placement: Placement | None = None,
    outputs: tuple[str, ...] = (),
) -> tuple[jax.Array, MoEStatistics]:
    """Apply a complete mixture-of-experts layer to global arrays, outside of ``jax.shard_map``.

    The router computes logits with the precision of float32, and chooses experts. ``moe_mlp`` then
    applies these experts. The result does not depend on the mesh, except for rounding, and for
    dropped rows if there is a capacity. Call ``moe`` inside ``jax.jit``, because JAX otherwise
    compiles each operation separately.

    The call makes the group, enters ``jax.shard_map``, and divides its arrays as follows. Mesh axes
    may be Auto or Explicit. Over Explicit axes, arrays are resharded, and the result has the
    placement of ``x``. Store the weights in the placements that ``moe_partition_specs`` returns.

    - The data axes and the expert axes divide the tokens along the first axis of ``x``, or along
      its first two axes if that needs less padding. If the mesh axes do not divide these sizes,
      tokens are padded. Padding chooses no expert, and statistics do not include it. If ``x`` is
      already divided over exactly these axes, and all are Explicit, ``x`` keeps its placement.
    - The ranks with the same index on the data axes are a *domain*. If there are fewer tokens than
      ranks, all ranks of a domain have the same tokens (``replicated`` as in ``route``). If there
      are also fewer tokens than domains, all devices have the same tokens.
    - The expert axes divide the experts. The tensor axis divides the I columns of each expert, and
      partial sums are added in the dtype of ``x``. Devices repeat the work along all other mesh
      axes. If such an axis divides ``x``, a ``UserWarning`` says so once. Inside ``jax.jit``, the
      warning includes all such Auto axes, because JAX does not know if they divide ``x``.

    Args:
      x: tokens, floats [..., H] of 16 bits or more.
      router: a ``Router``, ``router.replay(ids)``, or ``RouterChoices``. A replay uses the experts
        ``ids``, with weights from the router's logits. ``RouterChoices`` have the leading axes of
        ``x``, and are divided over the ranks like the tokens. With a ``TopK``, the kernel of the
        router has E columns.
      experts: the weights of all E experts, with the dtype of ``x`` or in FP8.
      axes: an ``Axes``, or the first argument of ``Axes``, such as ``"ep"``. ``jax.set_mesh``, or a
        ``Group`` in ``axes``, defines the mesh. If one axis divides the experts and spans 2 to 32
        hosts, and if all mesh axes are Auto, tokens travel in two levels, as in a ``Group`` with
        ``two_level=True``.
      shared: None, or a shared expert, which is applied to all tokens. It is an ``Experts`` without
        the axis E, with any size I and the dtype of ``x``.
      mask: booleans [...], False for tokens that choose no expert, such as padding; or None. Masked
        tokens may have any values. Their outputs and gradients are zero.
      router_input: floats [..., H'] that the router reads in place of ``x``, or None. Use it, for
        example, if the experts read a projection of the token.
      exchange: how tokens travel, an ``Exchange``.
      placement: replicas of experts as in ``moe_mlp``, or None. With a placement, ``experts`` are
        the router's E experts, or the experts in the P slots of all ranks (``move_experts``). The
        router and the statistics have E experts in both cases.
      outputs: names of arrays to return in the statistics: ``"logits"``, ``"choices"``, both, or
        none. Results of a jitted function stay in memory, so return only what you need.

    Returns:
      The output with the shape and dtype of ``x``, and ``MoEStatistics``. Add
      ``coefficient * balance_loss`` and ``coefficient * z_loss`` to the loss of the model.
      Under ``jax.jit``, statistics that the program does not use are not computed.

    Raises:
      TypeError: if an argument has the wrong type or dtype.
      ValueError: if an argument has the wrong shape or range, no concrete mesh is in scope, or an
        axis does not exist or is already manual.

    Example:
      Eight devices form two domains of four ranks. ``init_moe`` creates each parameter on the
      devices that store it:

      ```python
      import jax
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      mesh = jax.make_mesh((2, 4), ("data", "ep"))
      with jax.set_mesh(mesh):
          axes = ma.Axes("ep", data="data")
          params = ma.init_moe(jax.random.key(0), ma.MoEConfig(16, 32, 8, ma.TopK(2)), axes)
          x = jax.random.normal(jax.random.key(1), (4, 6, 16))  # [batch, sequence, hidden]
          layer = lambda params, x: ma.moe(x, **params, axes=axes)
          y, stats = jax.jit(layer)(params, x)
      print(y.shape, stats.load.wanted_per_expert.sum(), stats.num_dropped)
      ```

      ```text
      (4, 6, 16) 48 0
      ```
    """
    scope = _check_scope(as_axes(axes))
    tensor_axis = scope.axes.tensor
    x = _check_tokens(x)
    read = x if router_input is None else _check_router_input(router_input, x)
    num_experts, experts = _check_experts(scope, x, experts, placement, num_outputs(router, read))
    if shared is not None:
        shared = check_weights(shared, x, (), name="shared")
        _check_tensor_parts(scope, "shared", shared)
    router = check_router(router, read, num_experts)
    of_tokens = {} if mask is None else {"mask": _check_mask(mask, x)}
    if router_input is not None:
        of_tokens["router_input"] = read
    _check_outputs(outputs, router)
    exchange = check_exchange(exchange, has_chunks=True)
    reason, remedy = "moe divides the tokens over the ranks", "Call moe_mlp on each rank"
    check_one_global_scale(exchange.token_format, reason, remedy)
    shape = x.shape
    if x.ndim == 1:
        x, of_tokens = x[None], {name: array[None] for name, array in of_tokens.items()}
        router = map_arrays(router, lambda array: array[None], lambda array: array)
    has_mask = mask is not None
    tokens = _divide_tokens(scope, x, exchange.replicated)
    _warn_of_repeated_work(scope, x)
    if any(tokens.padding):
        of_tokens.setdefault("mask", jnp.ones(tokens.sizes, bool))
    padded = partial(_with_padding, tokens)
    x, of_tokens = padded(x), {name: padded(array) for name, array in of_tokens.items()}
    router = map_arrays(router, padded, lambda array: place(array, P()))
    router_specs = map_arrays(router, lambda _: tokens.spec, lambda _: P())

    activation = activation_of(experts)
    of_shared = None if shared is None else activation_of(shared)
    given = tuple(None if e is None else e.replace(activation=None) for e in (experts, shared))
    leads = (scope.group.axes,), ()
    specs: Any = tuple(
        None if e is None else specs_of(e, lead, tensor_axis) for e, lead in zip(given, leads)
    )
    given = jax.tree.map(place, given, specs)
    exchange = dataclasses.replace(exchange, replicated=tokens.replicated)
    domains = tuple(axis for axis in tokens.axes if axis not in scope.group.axes)

    def on_rank(
        x: jax.Array,
        of_tokens: Mapping[str, jax.Array],
        router: RouterLike,
        given: tuple[Experts, Experts | None],
        placement: Placement | None,
        exchange: Exchange,
    ) -> tuple[jax.Array, dict[str, Any], MoEStatistics, Totals | None]:
        leading = x.shape[:-1]
        flat_tokens = lambda array: array.reshape(-1, *array.shape[len(leading) :])
        flat_x = flat_tokens(x)
        per_token = {name: flat_tokens(array) for name, array in of_tokens.items()}
        mask, read = per_token.get("mask"), per_token.get("router_input")
        # Masked tokens may have any values, which must not affect a gradient.
        if has_mask and mask is not None:
            flat_x = jnp.where(mask[:, None], flat_x, 0)
            read = None if read is None else jnp.where(mask[:, None], read, 0)
        flat_router = map_arrays(router, flat_tokens, lambda array: array)
        choices, logits = choose_experts(
            flat_router, flat_x if read is None else read, num_experts, mask
        )
        own, of_all = given
        weights = LayerWeights(flat(_biased_once(own, tensor_axis)))
        kept = None
        if of_all is not None:
            weights = weights._replace(shared=flat(_biased_once(of_all, tensor_axis)))
            kept = jnp.ones(flat_x.shape[0], accumulation_dtype(x.dtype))
            if of_all.output_gate is not None:
                kept = kept * _open_gates(flat_x, of_all.output_gate).astype(kept.dtype)
            if mask is not None:  # masked tokens have zero output
                kept = jnp.where(mask, kept, 0)
            if tokens.replicated:  # add the result of one rank only
                kept = jnp.where(lax.axis_index(scope.group.axes) == 0, kept, 0)
        totals, y, counts = _experts(
            Tokens(flat_x, choices.ids, choices.weights, kept),
            weights,
            Totals() if domains else totals_of(own),
            RouteArguments(scope.group, num_experts, exchange),
            LayerOptions(activation, placement, experts.weigh_input),
            of_shared,
        )
        partial = scope.group.axes if tokens.replicated else ()
        partial += () if tensor_axis is None else (tensor_axis,)
        y = lax.psum(y, partial) if partial else y
        is_top_k = isinstance(flat_router, Router) and isinstance(flat_router.choose, TopK)
        counted = num_experts if placement is None else placement.num_slots
        losses, load = _statistics(
            choices,
            logits,
            mask,
            is_top_k,
            axes=tokens.axes,
            all_axes=tuple(dict.fromkeys((*tokens.axes, *scope.group.axes))),
            counts=counts,
            sizes=(scope.group.size, counted),
            placement=placement,
        )
        found = {"logits": logits, "choices": choices._replace(scores=None)}
        unflat = lambda array: array.reshape(*leading, *array.shape[1:])
        found = jax.tree.map(unflat, {name: found[name] for name in outputs})
        statistics = MoEStatistics(*losses, load)
        return y.reshape(x.shape), found, statistics, returned_totals(own, totals)

    y, found, statistics, totals = scope.shard_map(
        on_rank,
        in_specs=(tokens.spec, tokens.spec, router_specs, specs, P(), P()),
        out_specs=(tokens.spec, tokens.spec, P(), specs[0].totals),
    )(x, of_tokens, router, given, placement, exchange)

    def unpadded(array: jax.Array) -> jax.Array:
        array = _without_padding(tokens, array, keeps_last=False)
        return array.reshape(*shape[:-1], array.shape[-1])

    statistics = statistics._replace(**jax.tree.map(unpadded, found), totals=totals)
    return _without_padding(tokens, y).reshape(shape), statistics


@scopes.losses
def _statistics(
    choices: RouterChoices,
    logits: jax.Array | None,
    mask: jax.Array | None,
    is_top_k: bool,
    *,
    axes: tuple[str, ...],
    all_axes: tuple[str, ...],
    counts: tuple[jax.Array, jax.Array],
    sizes: tuple[int, int],
    placement: Placement | None,
) -> tuple[tuple[jax.Array, jax.Array], ExpertLoad]:
    """Return the balance loss (0 without scores), the z-loss (0 without logits), and the load.

    If possible, one array contains all sums, so that one all-reduce adds them over ranks.

    Args:
      axes: the mesh axes that divide the tokens.
      all_axes: ``axes`` and the axes of the group.
      counts: this rank's results of ``columns_of`` and ``rows_of``.
      sizes: the number of ranks, and the number of experts (or slots) of the routing.
    """
    found = [jnp.zeros((), jnp.float32)] * 2
    others = () if logits is None else z_columns(logits, mask)
    shares = jnp.zeros((len(choices.ids), 0), others[0].dtype if others else jnp.float32)
    if choices.scores is not None:
        shares = check_logits(choices.scores, "scores")
        if is_top_k:
            # Scores of a TopK are already shares, with 0 for masked tokens.
            is_token = jnp.ones_like(shares[:, 0], bool) if mask is None else mask
        else:
            shares, is_token = shares_of(shares, choices.ids)
        others = is_token, *others
    num_scores, num_sums = shares.shape[-1], shares.shape[-1] + len(others)
    columns, rows = counts
    is_one_sum = axes == all_axes and exact_in_float32(most_choices(axes, columns))
    given = [shares, *others, columns]
    if len(shares) >= 16 * TOKENS_PER_SUM:
        per_sum = math.gcd(len(shares), TOKENS_PER_SUM)
        given = [x.reshape(-1, per_sum, *x.shape[1:]) for x in given]
    *given, of_blocks = given
    if is_one_sum:
        own = sum_of_columns(*given, counted=of_blocks, num_counted=sum(sizes))
        sums = sum_over(axes, jnp.concatenate([own, rows.astype(own.dtype)]))
        number = sums[num_sums:].astype(jnp.int32)
    else:
        sums = sum_over(axes, sum_of_columns(*given))
        number = sum_choices(all_axes, columns, rows, sum(sizes))
    load = load_of(number, sizes, placement)
    if logits is not None:
        found[1] = z_loss_of(sums[num_sums - 2], sums[num_sums - 1])
    if choices.scores is not None:
        # A function ``choose`` may return scores with more columns than there are experts.
        wanted = jnp.pad(load.wanted_per_expert, (0, num_scores - load.wanted_per_expert.size))
        found[0] = balance_loss_of(sums[:num_scores], sums[num_scores], wanted)
    return (found[0], found[1]), load


@scopes.shared_expert
def _open_gates(x: jax.Array, output_gate: jax.Array) -> jax.Array:
    """Return the factors [T] of a shared expert's outputs, from its ``output_gate``."""
    return jax.nn.sigmoid(router_logits(x, output_gate[:, None], None)[:, 0])


def _biased_once(experts: Experts, tensor: str | None) -> Experts:
    """Return experts with ``b_out`` only at index 0 of ``tensor``, so that a sum adds it once."""
    if experts.b_out is None or tensor is None:
        return experts
    return experts.replace(b_out=jnp.where(lax.axis_index(tensor) == 0, experts.b_out, 0))


def _experts(
    tokens: Tokens,
    weights: LayerWeights,
    totals: Totals,
    route_arguments: RouteArguments,
    options: LayerOptions,
    shared_activation: Activation | None,
) -> tuple[Totals, jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the totals, the outputs [T, H] of a rank, the result of ``columns_of`` for its tokens,
    and the sum of ``rows_of`` over all chunks."""
    num_chunks = route_arguments.exchange.num_chunks or 1

    @scopes.shared_expert
    def shared_expert(x: jax.Array, weights: jax.Array, shared: Experts) -> jax.Array:
        product = add_product(jnp.dot(x, shared.w_in), x, shared.lora_in, jnp.dot)
        if shared.b_in is not None:
            product += shared.b_in[None]
        assert shared_activation is not None
        act = (recognize(shared_activation) or shared_activation)(product)
        act_dtype = accumulation_dtype(act.dtype)
        of_tokens = weights.astype(act_dtype)[:, None]
        act = (act.astype(act_dtype) * of_tokens).astype(x.dtype)
        y = add_product(jnp.dot(act, shared.w_out), act, shared.lora_out, jnp.dot)
        if shared.b_out is not None:
            y += (of_tokens * shared.b_out.astype(act_dtype)[None]).astype(x.dtype)
        return y

    def layer(
        tokens: Tokens, weights: LayerWeights, totals: Totals
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Totals]:
        y, routing, totals = mlp_and_routing(route_arguments, options, tokens, weights, totals)
        if weights.shared is not None:
            y += shared_expert(tokens.x, tokens.shared_weights, weights.shared)
        return (y, columns_of(routing), rows_of(routing)), totals

    if num_chunks == 1:
        (y, columns, rows), totals = layer(tokens, weights, totals)
        return totals, y, (columns, rows)
    num_tokens = tokens.x.shape[0]
    more = -num_tokens % num_chunks

    @scopes.padding
    def padded(array: jax.Array, value: int = 0) -> jax.Array:
        widths = (0, more), *((0, 0),) * (array.ndim - 1)
        return jnp.pad(array, widths, constant_values=value)

    tokens = jax.tree.map(padded, tokens)._replace(topk_ids=padded(tokens.topk_ids, -1))
    weights = with_fetched(weights, route_arguments, options.placement)
    totals, (y, columns, rows) = quantized_once(layer, num_chunks, tokens, weights, totals)
    y, columns = (lax.collapse(x, 0, -1)[:num_tokens] for x in (y, columns))
    return totals, y, (columns, rows.sum(axis=0, dtype=jnp.int32))


def _warn_of_repeated_work(scope: _Scope, x: jax.Array) -> None:
    """Warn if a mesh axis may divide the tokens [..., H] but is not in ``axes`` of ``moe``."""
    named = (*scope.data, *scope.group.axes)
    if math.prod(x.shape[:-1]) < 2 * scope.size(named):
        return  # one more axis could not divide so few tokens
    auto, spec = scope.axes_of_type(AxisType.Auto), scope.spec_of(x)
    is_traced = isinstance(x, jax.core.Tracer)
    if auto and not is_traced:
        spec = getattr(x.sharding, "spec", None)
    dividing = {name for entry in spec or () for name in names_of(entry)}
    if auto and is_traced:
        dividing |= auto
    repeating = tuple(
        axis
        for axis in scope.mesh.axis_names
        if axis in dividing - {*named, scope.axes.tensor} and scope.size((axis,)) > 1
    )
    if repeating:
        each = " and ".join(f"{axis!r} of size {scope.size((axis,))}" for axis in repeating)
        data = (*scope.data, *repeating)
        warnings.warn(
            f"the axes of moe do not have {each}, so their devices repeat its work. If "
            f"they divide the tokens, pass ma.Axes(..., data={data})",
            stacklevel=2,
        )


class _Tokens(NamedTuple):
    """How ``moe`` divides the tokens over all ranks."""

    spec: P
    """Placement of the leading axes, after padding."""
    axes: tuple[str, ...]
    """The mesh axes over which different ranks have different tokens."""
    replicated: bool
    """True if all ranks of a group have the same tokens."""
    sizes: tuple[int, ...]
    """The sizes of the leading axes without padding."""
    padding: tuple[int, ...]
    """The number of tokens to append to each leading axis."""
    home: P | None
    """The placement of the caller's tokens over Explicit axes, which the result also gets."""

    @property
    def unpadded(self) -> P:
        """Return the placement of arrays without padding: ``spec``, with None for padded axes."""
        spec = (*self.spec, *(None,) * (len(self.padding) - len(self.spec)))
        return P(*(None if more else axes for axes, more in zip(spec, self.padding)))


def _divide_tokens(scope: _Scope, x: jax.Array, replicated: bool | None) -> _Tokens:
    sizes = x.shape[:-1]
    num_tokens, num_domains = math.prod(sizes), scope.size(scope.data)
    if replicated is None:
        replicated = num_tokens < num_domains * scope.group.size
    axes = scope.data if num_tokens >= num_domains else ()
    axes += () if replicated else scope.group.axes
    home = scope.spec_of(x)
    if home is not None and num_tokens and scope.divides(home, axes):
        return _Tokens(P(*home[:-1]), axes, replicated, sizes, (0,) * len(sizes), home)
    choices = []
    for first in range(len(axes), -1 if len(sizes) > 1 else len(axes) - 1, -1):
        parts = (axes[:first], axes[first:])[: len(sizes)]
        divisors = (*map(scope.size, parts), *(1,) * (len(sizes) - len(parts)))
        # An axis of size 0 gets one token of padding for each shard, because XLA of jax 0.11.2
        # crashes on the gradient if an argument of shard_map has no elements.
        more = tuple(-size % by if size else by for size, by in zip(sizes, divisors))
        padded = math.prod(size + n for size, n in zip(sizes, more))
        choices.append((padded, -first, P(*(part or None for part in parts)), more))
    _, _, spec, more = min(choices, key=lambda choice: choice[:2])
    return _Tokens(spec, axes, replicated, sizes, more, home)


@scopes.padding
def _with_padding(tokens: _Tokens, array: jax.Array) -> jax.Array:
    """Return an array with the axes of the tokens, padded with 0 and moved to the ranks."""
    if any(tokens.padding):
        widths = [(0, more) for more in tokens.padding]
        widths += [(0, 0)] * (array.ndim - len(widths))
        array = jnp.pad(place(array, tokens.unpadded), widths)
    return place(array, tokens.spec)


@scopes.padding
def _without_padding(tokens: _Tokens, y: jax.Array, *, keeps_last: bool = True) -> jax.Array:
    """Return ``y`` without padding, placed like the caller's tokens. If ``keeps_last`` is False,
    the last axis of the result is not divided."""
    if any(tokens.padding):
        y = place(y, tokens.unpadded)[tuple(map(slice, tokens.sizes))]
    if tokens.home is None:
        return y
    return place(y, P(*tokens.home[:-1], tokens.home[-1] if keeps_last else None))


@dataclasses.dataclass(frozen=True)
class _Scope:
    """The mesh of a call, and which mesh axes divide tokens, experts and columns."""

    mesh: Mesh | AbstractMesh
    group: Group
    axes: Axes
    in_context: bool
    """True if ``mesh`` is the mesh in scope. False if it comes from the group."""

    @property
    def data(self) -> tuple[str, ...]:
        """Return the mesh axes that divide tokens, apart from the axes of the group."""
        return names_of(self.axes.data)

    def size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def axes_of_type(self, *types: AxisType) -> set[str]:
        every = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return {name for name, of_axis in every if of_axis in types}

    def spec_of(self, array: jax.Array) -> P | None:
        """Return an array's placement with an entry for each axis; None without Explicit axes."""
        if not self.axes_of_type(AxisType.Explicit):
            return None
        spec = jax.typeof(array).sharding.spec
        return P(*spec, *(None,) * (array.ndim - len(spec)))

    def divides(self, spec: P, axes: tuple[str, ...]) -> bool:
        """Return True if a placement of tokens divides them over exactly these axes, and all axes
        are Explicit. JAX guarantees the placement of an array only for Explicit axes."""
        used = [name for entry in spec[:-1] for name in names_of(entry)]
        is_explicit = self.axes_of_type(AxisType.Explicit) >= set(axes)
        return is_explicit and set(used) == set(axes) and not names_of(spec[-1])

    def shard_map(self, layer: Any, **specs: Any) -> Any:
        """Return the function of global arrays that applies ``layer`` on each rank."""
        axes = self.axes_of_type(AxisType.Explicit, AxisType.Auto)
        if self.in_context:
            return jax.shard_map(layer, axis_names=axes, **specs)

        def mapped(*args: jax.Array) -> Any:
            # The mesh in scope may have other axes, over the same devices in the same order.
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return jax.shard_map(layer, mesh=self.mesh, axis_names=axes, **specs)(*args)

        return mapped


def _check_scope(axes: Axes) -> _Scope:
    """Return the mesh of a call and how the call uses its axes, or raise an error."""
    group = axes.experts
    of_group = group.mesh if isinstance(group, Group) else None
    of_devices = of_group if isinstance(of_group, Mesh) else compat.mesh_in_context()
    here = jax.sharding.get_abstract_mesh()
    mesh = of_group if here.empty else here
    if mesh is None or (here.empty and of_devices is None):
        # The mesh of ``with mesh:`` is not enough: no public function of JAX returns it.
        found = (
            "only the mesh of `with mesh:`" if compat.in_context_of_old() else "no mesh in scope"
        )
        raise _no_devices(found, group)
    tensor = () if axes.tensor is None else (axes.tensor,)
    experts = axes_of(group)
    given = {"experts": experts, "data": names_of(axes.data), "tensor": tensor}
    seen: set[str] = set()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for argument, names in given.items():
        for axis in names:
            if axis not in types:
                is_clear = axes == Axes(axis) and len(types) == 1
                remedy = f". Pass axes={mesh.axis_names[0]!r}" if is_clear else ""
                raise ValueError(
                    f"{argument} of axes must name axes of the mesh, which has {mesh.axis_names}; "
                    f"got {axis!r}{remedy}"
                )
            if types[axis] is AxisType.Manual:
                raise ValueError(
                    f"{argument} of axes must name axes that are not manual; got {axis!r} inside a "
                    "jax.shard_map over it. Call moe outside, or call moe_mlp inside with group="
                    f"{experts[0]!r}"
                )
            if axis in seen:
                raise ValueError(
                    f"experts, data and tensor of axes must be different axes; got {axis!r} twice"
                )
            seen.add(axis)
    if of_devices is None:
        raise _no_devices(f"the abstract mesh {dict(here.shape)}", group)
    if not isinstance(group, Group):
        # JAX may run the traced program again on other devices, so the group must not contain
        # devices. The devices in scope only determine ``two_level``.
        two_level = Group(of_devices, group).two_level
        group = Group(here, group, two_level=two_level)
    levels = group.divided_by_hosts(of_devices)
    if levels is not None and set(mesh.axis_types) == {AxisType.Auto}:
        divided, group = levels
        return _Scope(divided, group, axes, in_context=False)
    scope = _Scope(mesh, group, axes, not here.empty)
    explicit = scope.axes_of_type(AxisType.Explicit)
    if here.empty and explicit:
        raise ValueError(
            f"moe needs a mesh with Explicit axes in scope; got {group} with the Explicit axes "
            f"{sorted(explicit)}, and no mesh in scope. Call it under jax.set_mesh(mesh), or make "
            "the mesh with jax.sharding.AxisType.Auto"
        )
    return scope


def _no_devices(found: str, group: Any) -> ValueError:
    return ValueError(
        f"moe needs a mesh with devices; got {found} and experts over {group!r}. Call it in `with "
        "jax.set_mesh(mesh):`, where the program is traced"
    )


def _check_tokens(value: object) -> jax.Array:
    x = as_array(value)
    is_shape = x.ndim > 0 and x.shape[-1] > 0
    if not is_shape or not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise (TypeError if is_shape else ValueError)(
            f"x must be an array [..., H] of floats of 16 bits or more, with H > 0; got {short(x)}"
        )
    return jnp.asarray(x)


def _check_experts(
    scope: _Scope,
    x: jax.Array,
    experts: object,
    placement: Placement | None,
    num_outputs: int | None,
) -> tuple[int, Experts]:
    """Return E, and the experts with JAX arrays. ``num_outputs`` is E of the router, or None."""
    found = check_weights(experts, x)
    num = num_weights = found.w_in.shape[0]
    if num_outputs is not None:
        num = num_outputs
    elif isinstance(placement, Placement):
        num = placement.num_experts
    if num % scope.group.size:
        source = "router" if num_outputs is not None else "experts"
        raise ValueError(
            f"{source} must have E experts, a multiple of the {scope.group.size} ranks along "
            f"{scope.group.axis_name!r}; got {num}. {fitting_experts(num, scope.group.size)}"
        )
    expected = num
    if placement is not None:
        check_placement(placement, scope.group.size, num_experts=num, or_none=True)
        if num_weights == placement.num_slots:
            expected = num_weights  # weights that ``move_experts`` placed
        else:
            placement.check_home()
    if num_weights != expected:
        raise ValueError(
            f"experts must be the weights of E={expected} experts, like the router; got those of "
            f"{num_weights}"
        )
    _check_tensor_parts(scope, "experts", found)
    return num, found


def _check_mask(mask: object, x: jax.Array) -> jax.Array:
    found, sizes = as_array(mask), x.shape[:-1]
    if found.dtype != jnp.bool_ or found.shape != sizes:
        remedy = ""
        if found.dtype != jnp.bool_:
            remedy = ". Cast it: mask.astype(bool)"
        elif found.ndim and found.shape == sizes[: found.ndim]:
            index = ", None" * (len(sizes) - found.ndim)
            remedy = f". Broadcast it: jnp.broadcast_to(mask[...{index}], {sizes})"
        raise (TypeError if found.dtype != jnp.bool_ else ValueError)(
            f"mask must hold a boolean for each token, {list(sizes)}; got {short(found)}{remedy}"
        )
    return jnp.asarray(found)


def _check_router_input(value: object, x: jax.Array) -> jax.Array:
    array = as_array(value)
    check_floats("router_input", array, "Cast it")
    if array.ndim != x.ndim or array.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"router_input must have the leading axes of x, {list(x.shape[:-1])}, and an axis of "
            f"features; got {short(array)}"
        )
    return jnp.asarray(array)


def _check_outputs(outputs: object, router: RouterLike) -> None:
    if not isinstance(outputs, tuple) or any(name not in OUTPUTS for name in outputs):
        remedy = f". Write outputs=({outputs!r},)" if isinstance(outputs, str) else ""
        raise ValueError(f"outputs must be a tuple of the names {OUTPUTS}; got {outputs!r}{remedy}")
    if "logits" in outputs and isinstance(router, RouterChoices):
        raise ValueError(
            f'outputs must not have "logits" if router is RouterChoices; got {outputs}. Pass a '
            "Router, or omit it"
        )


def _check_tensor_parts(scope: _Scope, name: str, experts: Experts) -> None:
    """Raise an error if the tensor axis cannot divide the I columns of the weights."""
    tensor = scope.axes.tensor
    num_parts = 1 if tensor is None else scope.size((tensor,))
    least = BLOCK if isinstance(experts.w_in, QuantizedExperts) else 1
    if experts.w_in.shape[-1] % (num_parts * least):
        times = f"the size {num_parts} of the tensor axis {tensor!r}"
        factors = [str(least)] * (least > 1) + [times] * (num_parts > 1)
        raise ValueError(
            f"{name}.w_in must have a number of columns that is a multiple of "
            f"{' times '.join(factors)}; got {list(experts.w_in.shape)}"
        )
