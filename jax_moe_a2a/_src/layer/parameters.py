"""Initialize the parameters of ``moe`` at random, and place them over a mesh."""

from __future__ import annotations

import dataclasses
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
from ..routing.checks import axes_of
from .axes import AxesLike, as_axes
from .router import Choose, Router
from .top_k import TopK
from .weights import Activation, Experts, Names, check_type, specs_of


def shortest(spec: P) -> P:
    """Return a ``PartitionSpec`` without None at its end, like the specs of results over Auto axes.
    If two specs of one placement differ in such a None, JAX compiles a function twice."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def moe_partition_specs(params: Mapping[str, Any], axes: AxesLike) -> dict[str, Any]:
    """Return a ``PartitionSpec`` for each parameter of ``moe``, in a pytree like the parameters.

    Args:
      params: arguments of ``moe`` by name: ``router``, ``experts`` and ``shared``, or some of these
        parameters. Only their shapes are read, so they may be a result of ``jax.eval_shape``.
      axes: as in ``moe``. The axes of ``fsdp`` divide the H axis.

    Returns:
      A dict like ``params``, with a ``PartitionSpec`` in place of each array. Like the placements
      that XLA returns over Auto axes, no spec ends with None.

    Raises:
      TypeError: if ``moe`` does not accept the type of ``axes``, or a parameter is not a ``Router``
        or ``Experts``.
      ValueError: if a name is unknown, or an array has the wrong number of axes.

    Example:
      ```python
      import jax
      import jax_moe_a2a as ma

      config = ma.MoEConfig(16, 32, 8, ma.TopK(2))
      params = jax.eval_shape(lambda key: ma.init_moe(key, config), jax.random.key(0))
      specs = ma.moe_partition_specs(params, ma.Axes("ep", tensor="tensor", fsdp="data"))
      print(specs["router"].kernel, specs["experts"].w_in, specs["experts"].w_out)
      ```

      ```text
      P('data',) P('ep', 'data', None, 'tensor') P('ep', 'tensor', 'data')
      ```
    """
    axes = as_axes(axes)
    expert_axes, fsdp = _only(axes_of(axes.experts)), _only(names_of(axes.fsdp))

    def placed(name: str, value: Any) -> Any:
        if name == "router" and isinstance(value, Router):
            return jax.tree.map(lambda _: P(), value).replace(kernel=shortest(P(fsdp)))
        leads: dict[str, tuple[Names, ...]] = {"experts": (expert_axes,), "shared": ()}
        if name not in leads:
            raise ValueError(f"params must have the names router, experts and shared; got {name!r}")
        check_type(value, name)
        lead = leads[name]
        if name == "shared" and isinstance(value.w_in, QuantizedExperts):
            lead = (None,)  # for the axis E of size 1
        if len(value.w_out.shape) != len(lead) + 2:
            raise ValueError(
                f"params must be those of one layer of moe by name; got {name}.w_out="
                f"{list(value.w_out.shape)}. For layers on a first axis, pass the parameters of one"
                " layer, and put None in front of each placement"
            )
        return jax.tree.map(shortest, specs_of(value, lead, axes.tensor, fsdp))

    return {name: placed(name, value) for name, value in params.items()}


def _only(names: tuple[str, ...]) -> Names:
    """Return the entry of a ``PartitionSpec`` for mesh axes: None, a name, or a tuple of names."""
    return names if len(names) > 1 else names[0] if names else None


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """The sizes and dtypes of a layer, for ``init_moe`` and the Flax modules."""

    hidden: int
    """H, the number of features of a token."""
    expert_hidden: int
    """I, the number of columns of an expert."""
    num_experts: int
    """E, number of experts of all ranks together."""
    choose: Choose
    """A ``TopK``, or a function, as in ``Router``."""
    _: dataclasses.KW_ONLY
    activation: Activation | None = None
    """The activation of gated experts, as in ``Experts``."""
    bias: bool = False
    """True to add biases, which are zeros, to the router and to the experts."""
    shared_hidden: int | None = None
    """J, the number of columns of a shared expert, or None for no shared expert."""
    shared_gate: bool = False
    """True to give the shared expert an ``output_gate``, as in ``Experts``."""
    weigh_input: bool = False
    """True if weights of choices multiply the inputs of the experts, as in ``Experts``."""
    dtype: DTypeLike = jnp.float32
    """dtype of the experts."""
    router_dtype: DTypeLike = jnp.float32
    """dtype of the router."""
    initializer: Callable[..., jax.Array] | None = None
    """A function ``(key, shape, dtype)`` that returns a random matrix [inputs, outputs], for the
    router and for each matrix of each expert. None means ``jax.nn.initializers.lecun_normal()``."""

    def __post_init__(self) -> None:
        sizes = ["hidden", "expert_hidden", "num_experts"]
        sizes += ["shared_hidden"] * (self.shared_hidden is not None)
        for name in sizes:
            object.__setattr__(self, name, check_int(name, getattr(self, name), least=1))
        for name in ("bias", "shared_gate", "weigh_input"):
            check_bool(name, getattr(self, name))
        if not isinstance(self.choose, TopK) and not callable(self.choose):
            remedy = f". Pass ma.TopK({self.choose})" if isinstance(self.choose, int) else ""
            raise TypeError(f"choose must be a TopK or a function; got {self.choose!r}{remedy}")
        if self.shared_gate and self.shared_hidden is None:
            raise ValueError(
                "shared_gate must be False without a shared expert; got True. Pass shared_hidden"
            )
        for name in ("dtype", "router_dtype"):
            object.__setattr__(self, name, jnp.dtype(getattr(self, name)))


def init_moe(key: jax.Array, config: MoEConfig, axes: AxesLike | None = None) -> dict[str, Any]:
    """Return random parameters of ``moe``, as a dict of keyword arguments.

    Args:
      key: a key of ``jax.random``.
      config: the sizes and dtypes of the layer.
      axes: as in ``moe``, or None to leave the placement to JAX. With axes, the parameters are
        created in the placements of ``moe_partition_specs``, and the call must be under
        ``jax.set_mesh``.

    Returns:
      A dict. ``router`` is a ``Router`` with a kernel [H, E]. ``experts`` are ``Experts`` with
      ``w_in`` [E, H, 2, I] and ``w_out`` [E, I, H]. If the config has ``shared_hidden``, the dict
      also has ``shared``: ``Experts`` with ``w_in`` [H, 2, J] and ``w_out`` [J, H], without biases.
      If the config has ``shared_gate``, the shared expert has an ``output_gate`` [H].

    Raises:
      TypeError: if ``config`` is not a ``MoEConfig``.

    Example:
      ```python
      import jax
      import jax_moe_a2a as ma

      params = ma.init_moe(jax.random.key(0), ma.MoEConfig(16, 32, 8, ma.TopK(2)))
      print(params["router"].kernel.shape, params["experts"].w_in.shape)
      ```

      ```text
      (16, 8) (8, 16, 2, 32)
      ```
    """
    if not isinstance(config, MoEConfig):
        raise TypeError(f"config must be a MoEConfig; got {config!r}")
    fields = (getattr(config, field.name) for field in dataclasses.fields(config))
    is_hashable = all(isinstance(value, Hashable) for value in fields)  # some functions are not
    compiled = _compiled if is_hashable else _compiled.__wrapped__
    if axes is None:
        return compiled(config, None)(key)
    params = compiled(config, as_axes(axes))(key)
    # Inside an outer ``jit``, the types of these results do not contain placements, so add them.
    return jax.tree.map(place, params, moe_partition_specs(params, axes))


def place(array: jax.Array, spec: P) -> jax.Array:
    """Reshard an array to ``spec`` over the Explicit axes of the mesh in scope, because there
    ``shard_map`` accepts only the placement of its specs. Over Auto axes, the compiler reshards."""
    mesh = jax.sharding.get_abstract_mesh()
    every = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, of_axis in every if of_axis is AxisType.Explicit}
    if not explicit:
        return array
    kept = (tuple(axis for axis in names_of(entry) if axis in explicit) for entry in spec)
    return jax.sharding.reshard(array, P(*(names or None for names in kept)))


def names_of(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


@functools.cache
def _compiled(config: MoEConfig, axes: AxesLike | None) -> Any:
    """Return the jitted function that creates the parameters. The cache avoids compiling again."""
    draw = functools.partial(_draw, config)
    if axes is None:
        return jax.jit(draw)
    shapes = jax.eval_shape(draw, jax.random.key(0))
    return jax.jit(draw, out_shardings=moe_partition_specs(shapes, axes))


def _draw(config: MoEConfig, key: jax.Array) -> dict[str, Any]:
    hidden, width, num_experts = config.hidden, config.expert_hidden, config.num_experts
    dtype = config.dtype
    draw_matrix = config.initializer or lecun_normal()

    def matrices(key: jax.Array, inputs: int, outputs: int) -> jax.Array:
        keys = jax.random.split(key, num_experts)
        return jax.vmap(lambda key: draw_matrix(key, (inputs, outputs), dtype))(keys)

    keys = jax.random.split(key, 7)
    gate, up = (matrices(key, hidden, width) for key in keys[:2])
    kernel = draw_matrix(keys[2], (hidden, num_experts), config.router_dtype)
    experts = Experts(
        jnp.stack([gate, up], axis=2),
        matrices(keys[3], width, hidden),
        jnp.zeros((num_experts, 2, width), dtype) if config.bias else None,
        jnp.zeros((num_experts, hidden), dtype) if config.bias else None,
        activation=config.activation,
        weigh_input=config.weigh_input,
    )
    router_bias = jnp.zeros(num_experts, config.router_dtype) if config.bias else None
    params: dict[str, Any] = {
        "router": Router(kernel, router_bias, choose=config.choose),
        "experts": experts,
    }
    if config.shared_hidden is not None:
        shape = hidden, config.shared_hidden
        gate, up = (draw_matrix(key, shape, dtype) for key in keys[4:6])
        w_out = draw_matrix(keys[6], shape[::-1], dtype)
        w_in = jnp.stack([gate, up], axis=1)
        params["shared"] = Experts(w_in, w_out, activation=config.activation)
        if config.shared_gate:
            # Do not split ``key`` into 8 keys: this would change all other parameters.
            column = draw_matrix(jax.random.fold_in(keys[6], 0), (hidden, 1), dtype)
            params["shared"] = params["shared"].replace(output_gate=column[:, 0])
    return params
