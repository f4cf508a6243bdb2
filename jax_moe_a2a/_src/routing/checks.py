"""Check the arguments of ``route``, or the routing that replaces these arguments."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..checks import as_array, check_int, fitting_experts, merge_axes, short
from ..group.group import Group
from ..group.value import check_axis_name
from ..plan.capacity import check_top_k
from ..plan.options import Exchange, without_capacity
from .two_level import AnyRouting
from .types import RouteOptions

# Some arrays have an entry for each local expert. This number limits their memory.
MAX_LOCAL_EXPERTS = 2**20
INT32_MAX = int(np.iinfo(np.int32).max)

# A name or a tuple of names stands for a group over these axes with default options.
GroupOrAxes: TypeAlias = Group | str | tuple[str, ...]


class RouteArguments(NamedTuple):
    """The keyword arguments that ``dispatch`` and ``route`` share. An omitted argument is None."""

    group: GroupOrAxes | None
    num_experts: int | None
    exchange: Exchange


class CheckedIds(NamedTuple):
    """Checked ids, int32 [T, K], and the options of their routing."""

    ids: jax.Array
    options: RouteOptions


def check_ids_or_routing(
    topk_ids: ArrayLike | AnyRouting, given: RouteArguments
) -> CheckedIds | AnyRouting:
    if isinstance(topk_ids, AnyRouting):
        check_scope(topk_ids.group)
        topk_ids.check("topk_ids")
        _check_repeated(given, topk_ids)
        return topk_ids
    if given.group is None or given.num_experts is None:
        missing = "group" if given.group is None else "num_experts"
        raise ValueError(
            f"{missing} must be given with topk_ids; got None. Pass it, or pass a Routing in place "
            "of topk_ids"
        )
    return check_route(topk_ids, given)


def check_route(topk_ids: ArrayLike, given: RouteArguments) -> CheckedIds:
    group = check_scope(given.group)
    ids = check_ids("topk_ids", topk_ids)
    exchange, (num_tokens, top_k) = given.exchange, ids.shape
    alignment = exchange.alignment or 1
    check_top_k(top_k, of=f" in topk_ids {short(ids)}")
    num_experts = check_int("num_experts", given.num_experts, least=1)
    largest = min(MAX_LOCAL_EXPERTS * group.size, INT32_MAX)
    if num_experts % group.size or num_experts > largest:
        remedy = "Use fewer" if num_experts > largest else fitting_experts(num_experts, group.size)
        raise ValueError(
            f"num_experts must be a multiple of the group's size {group.size} and at most "
            f"{largest} ({MAX_LOCAL_EXPERTS} for each rank); got {num_experts}. {remedy}"
        )
    sizes = dict(num_tokens=num_tokens, top_k=top_k, group_size=group.size, num_experts=num_experts)
    most_rows = without_capacity(exchange).rows_per_rank(**sizes)
    if most_rows > INT32_MAX:  # kernels count all rows before they drop rows
        raise ValueError(
            "alignment and num_experts must keep the rows of a rank, with padding, below 2**31; "
            f"got alignment={alignment} and num_experts={num_experts}, which may need {most_rows} "
            f"rows for {short(ids)} on each of {group.size} ranks. Use a smaller alignment"
        )
    options = RouteOptions(
        group=group,
        num_experts=num_experts,
        capacity=exchange.rows_per_rank(**sizes),
        alignment=alignment,
        replicated=bool(exchange.replicated),
    )
    return CheckedIds(as_int32(ids, num_experts), options)


def as_int32(ids: jax.Array | np.ndarray, num_experts: int) -> jax.Array:
    """Return ids as int32. Ids outside [0, num_experts) stay outside, and -1 stays -1."""
    if ids.dtype == np.int32:
        return jnp.asarray(ids)
    limits = jnp.iinfo(ids.dtype)
    ids = ids.clip(max(int(limits.min), -2), min(int(limits.max), num_experts))
    return jnp.asarray(ids.astype(np.int32))


def check_ids(name: str, value: ArrayLike) -> jax.Array | np.ndarray:
    """Return the argument ``name`` as an array [T, K] of any integer dtype."""
    ids = as_array(value)
    is_integer, remedy = jnp.issubdtype(ids.dtype, jnp.integer), merge_axes(name, ids, 2)
    if ids.dtype == np.bool_:
        remedy = ". Convert a routing map with choices_of in docs/coming_from.md"
    elif jnp.issubdtype(ids.dtype, jnp.floating):
        remedy = f". Cast it: {name}.astype(jnp.int32)"
    if ids.ndim != 2 or not is_integer:
        raise (ValueError if is_integer else TypeError)(
            f"{name} must be an integer array [num_tokens, top_k]; got {short(ids)}{remedy}"
        )
    if not all(isinstance(size, int) for size in ids.shape):
        raise ValueError(
            f"{name} must have a static shape [num_tokens, top_k]; got {short(ids)} with a "
            "symbolic size: use jax.export once for each number of tokens, or export for the "
            "largest number and fill up with tokens whose ids are -1"
        )
    return ids


def _check_repeated(given: RouteArguments, routing: AnyRouting) -> None:
    """Raise an error if an argument is not None and differs from the same field of the routing."""
    arguments = {**vars(given.exchange), "group": given.group, "num_experts": given.num_experts}
    for field in dataclasses.fields(RouteOptions):
        name, value, own = field.name, arguments[field.name], getattr(routing, field.name)
        if value is None:
            continue
        if name == "group" and value in (own.axis_name, own.axes):
            continue
        if name == "num_experts":
            value = check_int(name, value, least=0)
        if value != own:
            raise ValueError(
                f"{name} must be omitted or equal to the Routing's {name}, {own!r}; got {value!r}. "
                "Omit it, or pass topk_ids in place of the Routing"
            )
    factor = given.exchange.capacity_factor
    if factor is None:
        return
    rows = routing.sizes(routing.num_tokens, routing.top_k).rows(factor)
    if rows != routing.capacity:
        raise ValueError(
            "capacity_factor must be omitted or lead to the Routing's capacity, "
            f"{routing.capacity}; got {factor!r}, which leads to {rows}. Omit it, "
            "or pass topk_ids in place of the Routing"
        )


def axes_of(group: object, argument: str = "group") -> tuple[str, ...]:
    if isinstance(group, Group):
        return group.axes
    if not isinstance(group, str | tuple):
        raise TypeError(
            f"{argument} must be a Group, the name of a mesh axis, or a tuple of such names; got "
            f"{group!r}"
        )
    return check_axis_name(group, argument)


def check_scope(group: object) -> Group:
    """Return ``group`` as a ``Group``: names become a group over these axes. Raise an error if the
    group does not match the axes or mesh in scope, or needs CUDA kernels that cannot run."""
    axes = axes_of(group)
    if not isinstance(group, Group):
        return Group(axis_name=axes, size=math.prod(_sizes_in_scope(axes, repr(group))))
    sizes = _sizes_in_scope(group.axes, str(group))
    levels = [level.size for level in group.levels]
    if levels != (sizes if group.two_level else [math.prod(sizes)]):
        raise ValueError(
            f"group must match the axes in scope, {dict(zip(group.axes, sizes, strict=True))}; "
            f"got {group} with size {' x '.join(map(str, levels))}. Make the group from the mesh "
            "in scope"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if group.mesh is not None and set(group.axes) <= set(mesh.manual_axes):
        here, own = list(mesh.shape.items()), list(group.mesh.shape.items())
        if here != own:
            raise ValueError(
                f"group must match the mesh in scope, {dict(here)}; got a group of the mesh "
                f"{dict(own)}. Make the group from the mesh of the shard_map"
            )
    if group.implementation == "cuda":
        _ = group.path  # raises if the kernels cannot run
    return group


def _sizes_in_scope(axes: tuple[str, ...], got: str) -> list[int]:
    sizes = []
    for axis in axes:
        try:
            sizes.append(lax.axis_size(axis))
        except NameError:
            raise ValueError(
                f"group must have its axes in scope; got {got}, and {axis!r} is not in scope. "
                "Call this inside jax.shard_map or inside jax.vmap(..., axis_name=...), or call "
                "ma.moe, which accepts the arrays of all ranks"
            ) from None
    return sizes
