"""Place and draw the parameters of ``moe``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn.initializers import lecun_normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ..checks import check_bool, check_int
from ..grouped.weights import QuantizedExperts
from ..routing.checks import GroupOrAxes, axes_of

Axes = str | tuple[str, ...] | None


def spec_of(name: str, ndim: int, experts: Axes, tensor: Axes, fsdp: Axes = None) -> P:
    """Return the placement of a parameter of ``moe`` with ``ndim`` axes, with an entry for each."""
    between = (None,) * (ndim - 3)  # the axis of gate and up
    specs = {
        "router": (fsdp,),
        "router_bias": (),
        "select_bias": (),
        "w_gate_up": (experts, fsdp, *between, tensor),
        "w_down": (experts, tensor, fsdp),
        "b_gate_up": (experts, *(None,) * (ndim - 2), tensor),
        "b_down": (experts,),
        "shared_gate_up": (fsdp, *(None,) * (ndim - 2), tensor),
        "shared_down": (tensor, fsdp),
    }
    spec = specs[name]
    return P(*spec, *(None,) * (ndim - len(spec)))


def quantized_spec(spec: P) -> P:
    """Return the placement of values and scales of quantized weights from that of weights."""
    experts, k, *others = spec
    return P(experts, *others, k)


def shortest(spec: P) -> P:
    """Return a placement without its last entries that are None.

    XLA returns the placements of results over Auto axes in this form. Placements that divide arrays
    alike share a compiled program. But JAX counts each form as a signature of a jitted function.
    With this form, ``_cache_size()`` of a training step stays 1.
    """
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def moe_partition_specs(
    group: GroupOrAxes,
    *,
    tensor_axis: str | None = None,
    fsdp_axes: str | tuple[str, ...] | None = None,
    two_arrays: bool = False,
    quantized: bool = False,
) -> dict[str, Any]:
    """Return the placement of each parameter of ``moe``, by the name of its argument.

    Args:
      group: as in ``moe``.
      tensor_axis: as in ``moe``.
      fsdp_axes: name or names of mesh axes over which weights are stored in parts of their H axis,
        usually the ``data_axes`` of ``moe``. Each call of ``moe`` then gathers them, and their
        gradients are scattered. None stores whole weights on each index of these axes.
      two_arrays: True if ``w_gate_up``, ``b_gate_up`` and ``shared_gate_up`` are tuples (gate, up).
      quantized: True if ``w_gate_up`` and ``w_down`` are ``QuantizedExperts``, without
        ``transposed``. So are then their placements. Parts of an axis need 128 columns each.

    Returns:
      A dict of ``PartitionSpec``. The names are ``router``, ``router_bias``, ``select_bias``,
      ``w_gate_up``, ``w_down``, ``b_gate_up``, ``b_down``, ``shared_gate_up`` and ``shared_down``.
      Last axes that are not divided have no entry, as in the placements that XLA returns over Auto
      axes.

    Raises:
      TypeError: if ``group`` is neither a ``Group`` nor names of axes.

    Example:
      ```python
      import jax_moe_a2a as ma

      specs = ma.moe_partition_specs("ep", tensor_axis="tensor", fsdp_axes="data")
      print(specs["w_gate_up"], specs["w_down"])
      ```

      ```text
      P('ep', 'data', None, 'tensor') P('ep', 'tensor', 'data')
      ```
    """
    axes = axes_of(group)
    experts = axes[0] if len(axes) == 1 else axes
    num_axes = {"router": 2, "w_gate_up": 4, "w_down": 3, "b_gate_up": 3, "b_down": 2}
    num_axes |= {"router_bias": 1, "select_bias": 1, "shared_gate_up": 3, "shared_down": 2}

    check_bool("quantized", quantized)

    def spec(name: str) -> Any:
        if quantized and name in ("w_gate_up", "w_down"):
            own = spec_of(name, num_axes[name], experts, tensor_axis, fsdp_axes)
            return QuantizedExperts(*(shortest(quantized_spec(own)),) * 2)
        is_pair = two_arrays and name.endswith("gate_up")
        own = shortest(spec_of(name, num_axes[name] - is_pair, experts, tensor_axis, fsdp_axes))
        return (own, own) if is_pair else own

    return {name: spec(name) for name in num_axes}


def init_moe(
    key: jax.Array,
    hidden: int,
    expert_hidden: int,
    num_experts: int,
    *,
    dtype: DTypeLike = jnp.float32,
    router_dtype: DTypeLike = jnp.float32,
    bias: bool = False,
    shared_hidden: int | None = None,
    two_arrays: bool = False,
    initializer: Callable[..., jax.Array] | None = None,
    specs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Draw the parameters of ``moe``, as keyword arguments by name.

    Args:
      key: a key of ``jax.random``.
      hidden: H, features of a token.
      expert_hidden: I, width of an expert.
      num_experts: E, number of experts of all ranks together.
      dtype: dtype of the experts.
      router_dtype: dtype of the router.
      bias: True to add ``router_bias``, ``b_gate_up`` and ``b_down``, which are zeros.
      shared_hidden: J, width of a shared expert, or None without one.
      two_arrays: True to draw ``w_gate_up`` and ``shared_gate_up`` as tuples (gate, up).
      initializer: a function ``(key, shape, dtype)`` that draws one matrix [inputs, outputs]. It is
        applied to the router and to each matrix of each expert. None means
        ``jax.nn.initializers.lecun_normal()``.
      specs: the result of ``moe_partition_specs``. The parameters are then drawn where they belong,
        and the call must be under ``jax.set_mesh``. None leaves the placement to JAX.

    Returns:
      A dict with ``router`` [H, E], ``w_gate_up`` [E, H, 2, I] or a tuple of [E, H, I], ``w_down``
      [E, I, H], with ``bias`` the biases, and with ``shared_hidden`` the weights ``shared_gate_up``
      [H, 2, J] and ``shared_down`` [J, H].

    Raises:
      TypeError: if a size is not an int.
      ValueError: if a size is less than 1.

    Example:
      ```python
      import jax
      import jax_moe_a2a as ma

      params = ma.init_moe(jax.random.key(0), 16, 32, 8)
      print({name: param.shape for name, param in params.items()})
      ```

      ```text
      {'router': (16, 8), 'w_down': (8, 32, 16), 'w_gate_up': (8, 16, 2, 32)}
      ```
    """
    hidden = check_int("hidden", hidden, least=1)
    width = check_int("expert_hidden", expert_hidden, least=1)
    experts = check_int("num_experts", num_experts, least=1)
    if shared_hidden is not None:
        shared_hidden = check_int("shared_hidden", shared_hidden, least=1)
    dtypes = jnp.dtype(dtype), jnp.dtype(router_dtype)
    drawing, compiled = _drawing, _compiled
    if not isinstance(initializer, Hashable):  # such as an object of a dataclass
        drawing, compiled = _drawing.__wrapped__, _compiled.__wrapped__
    draw = drawing(hidden, width, experts, *dtypes, bias, shared_hidden, two_arrays, initializer)
    if specs is None:
        return compiled(draw, None)(key)
    own = {name: specs[name] for name in jax.eval_shape(draw, key)}
    params = compiled(draw, tuple(own.items()))(key)
    # While an outer program is traced, the types of an inner program's results have no placement.
    return jax.tree.map(place, params, own)


def place(array: jax.Array, spec: P) -> jax.Array:
    """Return an array with a placement over those axes of the mesh in scope that are Explicit.

    Over Explicit axes, an array's type has its placement, and ``shard_map`` refuses another one.
    Over Auto axes, the compiler moves arrays.
    """
    mesh = jax.sharding.get_abstract_mesh()
    every = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, of_axis in every if of_axis is AxisType.Explicit}
    if not explicit:
        return array
    kept = (tuple(axis for axis in names_of(entry) if axis in explicit) for entry in spec)
    return jax.sharding.reshard(array, P(*(names or None for names in kept)))


def names_of(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a ``PartitionSpec``."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


@functools.cache
def _compiled(draw: Callable[..., Any], shardings: tuple[tuple[str, Any], ...] | None) -> Any:
    """Return the function compiled, once for all layers of a model."""
    return jax.jit(draw, out_shardings=None if shardings is None else dict(shardings))


@functools.cache
def _drawing(
    hidden: int,
    width: int,
    experts: int,
    dtype: Any,
    router_dtype: Any,
    bias: bool,
    shared_hidden: int | None,
    two_arrays: bool,
    initializer: Callable[..., jax.Array] | None,
) -> Callable[[jax.Array], dict[str, Any]]:
    """Return the function that draws the parameters of a layer, which is the same for layers of
    equal sizes."""
    draw_matrix = lecun_normal() if initializer is None else initializer

    def matrices(key: jax.Array, num: int, inputs: int, outputs: int) -> jax.Array:
        keys = jax.random.split(key, num)
        return jax.vmap(lambda key: draw_matrix(key, (inputs, outputs), dtype))(keys)

    def draw_moe(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, 7)
        gate, up = (matrices(key, experts, hidden, width) for key in keys[:2])
        params: dict[str, Any] = {
            "router": draw_matrix(keys[2], (hidden, experts), router_dtype),
            "w_gate_up": (gate, up) if two_arrays else jnp.stack([gate, up], axis=2),
            "w_down": matrices(keys[3], experts, width, hidden),
        }
        if bias:
            zeros = jnp.zeros((experts, width), dtype)
            params["router_bias"] = jnp.zeros(experts, router_dtype)
            params["b_gate_up"] = (zeros, zeros) if two_arrays else jnp.stack([zeros] * 2, axis=1)
            params["b_down"] = jnp.zeros((experts, hidden), dtype)
        if shared_hidden is not None:
            shape = hidden, shared_hidden
            gate, up = (draw_matrix(key, shape, dtype) for key in keys[4:6])
            params["shared_gate_up"] = (gate, up) if two_arrays else jnp.stack([gate, up], axis=1)
            params["shared_down"] = draw_matrix(keys[6], shape[::-1], dtype)
        return params

    return draw_moe
