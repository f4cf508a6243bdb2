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

from ..checks import check_int, short
from ..grouped.weights import QuantizedExperts
from ..routing.checks import axes_of
from .axes import AxesLike, as_axes
from .router import Choose, Router

Names = str | tuple[str, ...] | None
NUM_AXES = {"w_gate_up": 4, "w_down": 3, "b_gate_up": 3, "b_down": 2}
NUM_AXES |= {"shared_gate_up": 3, "shared_down": 2}
"""The experts' parameters, and how many axes they have with gate and up in one array."""


def spec_of(name: str, ndim: int, experts: Names, tensor: Names, fsdp: Names = None) -> P:
    """Return the placement of a parameter of experts with ``ndim`` axes, with an entry for each."""
    between = (None,) * (ndim - 3)  # the axis of gate and up
    specs = {
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


def moe_partition_specs(params: Mapping[str, Any], axes: AxesLike) -> dict[str, Any]:
    """Return the placements of the parameters of ``moe``, as a pytree of their structure.

    Args:
      params: arguments of ``moe`` by name: ``router``, ``w_gate_up``, ``w_down``, ``b_gate_up``,
        ``b_down``, ``shared_gate_up`` and ``shared_down``, or some of them. Only their shapes
        matter, so the result of ``jax.eval_shape`` serves, too.
      axes: as in ``moe``. Over the axes of ``fsdp``, parts of the H axis are stored.

    Returns:
      A dict with a ``PartitionSpec`` in place of each array. Last axes that are not divided have no
      entry, as in the placements that XLA returns over Auto axes.

    Raises:
      TypeError: if ``axes`` is none of the types that ``moe`` accepts.
      ValueError: if a name is unknown, or an array does not have the axes of one layer.

    Example:
      ```python
      import jax
      import jax_moe_a2a as ma

      make = lambda key: ma.init_moe(key, 16, 32, 8, choose=ma.TopK(2))
      params = jax.eval_shape(make, jax.random.key(0))
      specs = ma.moe_partition_specs(params, ma.Axes("ep", tensor="tensor", fsdp="data"))
      print(specs["router"].kernel, specs["w_gate_up"], specs["w_down"])
      ```

      ```text
      P('data',) P('ep', 'data', None, 'tensor') P('ep', 'tensor', 'data')
      ```
    """
    axes = as_axes(axes)
    experts, fsdp = _only(axes_of(axes.experts)), _only(names_of(axes.fsdp))

    def placed(name: str, value: Any) -> Any:
        if name == "router" and isinstance(value, Router):
            return jax.tree.map(lambda _: P(), value).replace(kernel=shortest(P(fsdp)))
        arrays = [value.values] if isinstance(value, QuantizedExperts) else value
        for array in jax.tree.leaves(arrays):
            is_pair = isinstance(value, tuple)
            allowed = {NUM_AXES.get(name, 0) - is_pair}
            if not is_pair and name.endswith("gate_up"):  # experts without a gate
                allowed.add(NUM_AXES[name] - 1)
            if array.ndim not in allowed:
                raise ValueError(
                    f"params must be those of one layer of moe by name; got {name}="
                    f"{short(array)}. For layers on a first axis, pass the parameters of one layer,"
                    " and put None in front of each placement"
                )

        def spec(array: Any) -> P:
            return spec_of(name, array.ndim, experts, axes.tensor, fsdp)

        if isinstance(value, QuantizedExperts):
            plain, own = spec(value.values), shortest(quantized_spec(spec(value.values)))
            turned = None if value.transposed is None else shortest(plain)
            return QuantizedExperts(own, own, turned)
        return jax.tree.map(lambda array: shortest(spec(array)), value)

    return {name: placed(name, value) for name, value in params.items()}


def _only(names: tuple[str, ...]) -> Names:
    """Return the entry of a ``PartitionSpec`` for names, in the form of XLA's results."""
    return names if len(names) > 1 else names[0] if names else None


def init_moe(
    key: jax.Array,
    hidden: int,
    expert_hidden: int,
    num_experts: int,
    *,
    choose: Choose,
    axes: AxesLike | None = None,
    dtype: DTypeLike = jnp.float32,
    router_dtype: DTypeLike = jnp.float32,
    bias: bool = False,
    shared_hidden: int | None = None,
    two_arrays: bool = False,
    initializer: Callable[..., jax.Array] | None = None,
) -> dict[str, Any]:
    """Draw the parameters of ``moe``, as keyword arguments by name.

    Args:
      key: a key of ``jax.random``.
      hidden: H, features of a token.
      expert_hidden: I, width of an expert.
      num_experts: E, number of experts of all ranks together.
      choose: a ``TopK``, or a function, as in ``Router``.
      axes: as in ``moe``. The parameters are then drawn where ``moe_partition_specs`` says, and the
        call must be under ``jax.set_mesh``. None leaves the placement to JAX.
      dtype: dtype of the experts.
      router_dtype: dtype of the router.
      bias: True to add a bias of the router, ``b_gate_up`` and ``b_down``, which are zeros.
      shared_hidden: J, width of a shared expert, or None without one.
      two_arrays: True to draw ``w_gate_up`` and ``shared_gate_up`` as tuples (gate, up).
      initializer: a function ``(key, shape, dtype)`` that draws one matrix [inputs, outputs]. It is
        applied to the router and to each matrix of each expert. None means
        ``jax.nn.initializers.lecun_normal()``.

    Returns:
      A dict with ``router``, which is a ``Router`` with a kernel [H, E], with ``w_gate_up``
      [E, H, 2, I] or a tuple of [E, H, I], and with ``w_down`` [E, I, H]; with ``bias`` the biases;
      and with ``shared_hidden`` the weights ``shared_gate_up`` [H, 2, J] and ``shared_down``
      [J, H].

    Raises:
      TypeError: if a size is not an int.
      ValueError: if a size is less than 1.

    Example:
      ```python
      import jax
      import jax_moe_a2a as ma

      params = ma.init_moe(jax.random.key(0), 16, 32, 8, choose=ma.TopK(2))
      print(params["router"].kernel.shape, params["w_gate_up"].shape, params["w_down"].shape)
      ```

      ```text
      (16, 8) (8, 16, 2, 32) (8, 32, 16)
      ```
    """
    hidden = check_int("hidden", hidden, least=1)
    width = check_int("expert_hidden", expert_hidden, least=1)
    experts = check_int("num_experts", num_experts, least=1)
    if shared_hidden is not None:
        shared_hidden = check_int("shared_hidden", shared_hidden, least=1)
    dtypes = jnp.dtype(dtype), jnp.dtype(router_dtype)
    drawing: Callable[..., Any] = _drawing
    compiled: Callable[..., Any] = _compiled
    if not all(isinstance(fn, Hashable) for fn in (initializer, choose)):  # such as a dataclass
        drawing, compiled = _drawing.__wrapped__, _compiled.__wrapped__
    sizes = hidden, width, experts
    draw = drawing(*sizes, choose, *dtypes, bias, shared_hidden, two_arrays, initializer)
    if axes is None:
        return compiled(draw, None)(key)
    params = compiled(draw, as_axes(axes))(key)
    # While an outer program is traced, the types of an inner program's results have no placement.
    return jax.tree.map(place, params, moe_partition_specs(params, axes))


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
def _compiled(draw: Callable[..., Any], axes: AxesLike | None) -> Any:
    """Return the function compiled, once for all layers of a model."""
    if axes is None:
        return jax.jit(draw)
    shapes = jax.eval_shape(draw, jax.random.key(0))
    return jax.jit(draw, out_shardings=moe_partition_specs(shapes, axes))


@functools.cache
def _drawing(
    hidden: int,
    width: int,
    experts: int,
    choose: Choose,
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
        kernel = draw_matrix(keys[2], (hidden, experts), router_dtype)
        router_bias = jnp.zeros(experts, router_dtype) if bias else None
        params: dict[str, Any] = {
            "router": Router(kernel, router_bias, choose=choose),
            "w_gate_up": (gate, up) if two_arrays else jnp.stack([gate, up], axis=2),
            "w_down": matrices(keys[3], experts, width, hidden),
        }
        if bias:
            zeros = jnp.zeros((experts, width), dtype)
            params["b_gate_up"] = (zeros, zeros) if two_arrays else jnp.stack([zeros] * 2, axis=1)
            params["b_down"] = jnp.zeros((experts, hidden), dtype)
        if shared_hidden is not None:
            shape = hidden, shared_hidden
            gate, up = (draw_matrix(key, shape, dtype) for key in keys[4:6])
            params["shared_gate_up"] = (gate, up) if two_arrays else jnp.stack([gate, up], axis=1)
            params["shared_down"] = draw_matrix(keys[6], shape[::-1], dtype)
        return params

    return draw_moe
