"""Define the primitives ``grouped_dot_p`` and ``grouped_outer_p``, and register their rules.

``grouped_dot_p`` multiplies rows by the weights of their groups, or by the transposed weights.
``grouped_outer_p`` computes the gradient with respect to the weights. Both are bilinear, and their
transposes are calls of these two primitives. Therefore derivatives of any order exist.

The operands of ``grouped_dot_p`` are ``rows [*B, C, K], w [*B, L, K, N], sizes [*B, L]``. The
operands of ``grouped_outer_p`` are ``x [*B, C, K], y [*B, C, N], sizes [*B, L]``. ``grouped_dot_p``
may have one more operand, ``spare [*B, S, K, N]``: the weights of the last S groups. Then ``w`` has
the weights of the first L - S groups. Programs thus need not join two arrays of weights. ``vmap``
adds the leading axes ``B``. All operands have the same number of leading axes. In ``w``, ``sizes``
and ``spare``, a leading axis has size 1 if ``vmap`` does not map the array.

Both primitives have the parameters ``dtype`` (dtype of the operands and the result), ``tail`` and
``num_sms`` (as in ``grouped_dot``). With ``transposed``, ``grouped_dot_p`` maps rows [*B, C, N] to
[*B, C, K]. ``parts`` of ``grouped_outer_p`` has, for each result, the result's shape without the
axes K and N. If a leading axis has size 1 in this shape, the result is a sum over this axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from .. import compat, paths
from ..ad import aval_of, is_zero, zero_tangent
from ..checks import check_tail, check_unsharded
from . import lowering as lowered
from . import reference

grouped_dot_p = compat.Primitive("moe_a2a_grouped_dot")
grouped_outer_p = compat.Primitive("moe_a2a_grouped_outer")
grouped_outer_p.multiple_results = True


def bind(primitive: Any, *operands: Any, **params: Any) -> Any:
    """Bind a primitive, after a cast that makes all operands vary over the same mesh axes."""
    return primitive.bind(*compat.align_varying(operands, ()), **params)


bind_dot: Callable[..., jax.Array] = partial(bind, grouped_dot_p)
bind_outers: Callable[..., list[jax.Array]] = partial(bind, grouped_outer_p)


def bind_outer(
    x: jax.Array, y: jax.Array, sizes: jax.Array, *, lead: tuple[int, ...], **params: object
) -> jax.Array:
    """Bind ``grouped_outer_p`` for one result, whose leading axes have the sizes ``lead``."""
    return bind_outers(x, y, sizes, parts=((*lead, sizes.shape[-1]),), **params)[0]


def unspecified_dot(
    rows: jax.Array,
    w: Any,
    sizes: jax.Array,
    *parts: Any,
    transposed: bool = False,
    primitive: compat.Primitive = grouped_dot_p,
    **params: object,
) -> jax.Array:
    """Bind a product in the dtype of its rows, with ``tail="unspecified"``. ``w`` may be a tuple
    (home, spare) of weights, each with at least one matrix."""
    tail = check_tail("unspecified")
    params.update(transposed=transposed, dtype=rows.dtype, tail=tail, num_sms=None)
    w, *spare = (x.astype(rows.dtype) for x in reference.arrays_of(w))
    return bind(primitive, rows, w, sizes, *spare, *parts, **params)


def register(
    primitive: compat.Primitive,
    *,
    abstract: Callable[..., Any],
    jvp: Callable[..., Any],
    composition: Callable[..., Any],
    is_full: Sequence[bool] | Callable[..., Sequence[bool]] = (),
    passed: Callable[..., Sequence[int]] = lambda **_: (),
    batch: Callable[..., Any] | None = None,
    transpose: Callable[..., Any] | None = None,
    cuda: Callable[..., Any] | None = None,
) -> None:
    """Register the implementation and the transformation rules of a primitive.

    Args:
      abstract: a function that returns the types of the results. It need not check the operands.
      composition: a function that computes the results with jnp and other primitives.
      is_full: a bool for each operand, or a function of the parameters that returns these bools. If
        ``vmap`` does not map an operand, True broadcasts it, and False adds an axis of size 1.
      passed: a function from the parameters to the indices of the operands that the primitive
        returns unchanged, as its last results.
      batch: a batching rule to use in place of ``is_full`` and ``passed``.
      cuda: a function that chooses the implementation on NVIDIA GPUs. None means the composition.
    """

    def checked(*avals: Any, **params: Any) -> Any:
        for aval in avals:
            check_unsharded("arrays of grouped_dot", aval)
        return abstract(*avals, **params)

    primitive.def_impl(partial(compat.apply_primitive, primitive))
    primitive.def_abstract_eval(checked)
    ad.primitive_jvps[primitive] = jvp
    in_one_launch = partial(_batch, primitive, is_full, passed)
    batching.primitive_batchers[primitive] = batch or in_one_launch
    lower = mlir.lower_fun(composition, multiple_results=primitive.multiple_results)
    mlir.register_lowering(primitive, lower)
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    if cuda is None:
        paths.compositions[primitive] = composition
    else:
        mlir.register_lowering(primitive, paths.lowering(primitive, cuda), platform="cuda")


def rows_like(rows: Any, columns: int, dtype: Any = None) -> Any:
    """Return the type of an array [*B, C, columns]. The default dtype is the dtype of ``rows``."""
    dtype = rows.dtype if dtype is None else dtype
    return compat.result_aval(rows, (*rows.shape[:-1], columns), dtype)


def dot_abstract(
    rows: Any, w: compat.Aval, *_: object, transposed: bool, dtype: jnp.dtype, **__: object
) -> Any:
    return rows_like(rows, w.shape[-2] if transposed else w.shape[-1], dtype)


def _outer_abstract(
    x: compat.Aval,
    y: compat.Aval,
    _: object,
    *,
    parts: tuple[tuple[int, ...], ...],
    dtype: jnp.dtype,
    **__: object,
) -> list[Any]:
    columns = x.shape[-1], y.shape[-1]
    return [compat.result_aval(x, (*part, *columns), dtype) for part in parts]


# Derivatives of o_g = r_g w_g and of the outer product u_g = x_g^T y_g, for rows of group g:
#   jvp: both are bilinear: do_g = dr_g w_g + r_g dw_g.
#   transpose of o_g: ct(r_g) = ct_g w_g^T (grouped_dot_p), ct(w_g) = r_g^T ct_g (grouped_outer_p).
#   transpose of u_g: ct(x_g) = y_g ct_g^T and ct(y_g) = x_g ct_g (both grouped_dot_p).


def bilinear_jvp(
    primitive: compat.Primitive,
    primals: compat.Primals,
    tangents: compat.Tangents,
    **params: object,
) -> Any:
    """Compute the jvp of a primitive that is linear in each of its first two operands."""
    (a, b, *others), (d_a, d_b, *_) = primals, tangents
    out = primitive.bind(*primals, **params)
    moving = [pair for pair in ((d_a, b), (a, d_b)) if not any(map(is_zero, pair))]
    terms = [primitive.bind(*pair, *others, **params) for pair in moving]
    return out, jax.tree.map(lambda out, *terms: sum_of(out, terms), out, *terms)


def _dot_jvp(primals: Any, tangents: compat.Tangents, **params: object) -> Any:
    """Compute the jvp. One product computes the tangents for home and spare weights."""
    rows, _, sizes, *_ = primals
    d_rows, d_w, _, *d_spare = tangents
    out, terms = grouped_dot_p.bind(*primals, **params), []
    if not is_zero(d_rows):
        terms.append(grouped_dot_p.bind(d_rows, *primals[1:], **params))
    if not is_zero(d_ws := all_or_none((d_w, *d_spare))):
        terms.append(bind_dot(rows, d_ws[0], sizes, *d_ws[1:], **params))
    return out, sum_of(out, terms)


def all_or_none(d: Any) -> Any:
    """If all tangents of a tuple ``d`` are symbolic zeros, return one of them. If only some are,
    replace them in the tuple by arrays of zeros. If ``d`` is not a tuple, return it unchanged."""
    if not isinstance(d, tuple):
        return d
    return d[0] if all(map(is_zero, d)) else tuple(map(ad.instantiate_zeros, d))


def sum_of(like: Any, terms: Sequence[Any]) -> Any:
    """Return the sum of ``terms``, or the zero tangent of ``like`` if ``terms`` is empty."""
    return sum(terms[1:], terms[0]) if terms else zero_tangent(like)


def _dot_transpose(
    ct: Any, rows: Any, w: Any, sizes: Any, *spare: Any, transposed: bool, **params: object
) -> list[Any]:
    others = [None] * len(spare)
    if ad.is_undefined_primal(rows):
        if is_zero(ct):
            return [ad.Zero(rows.aval), None, None, *others]
        dtype = rows.aval.dtype
        params = dict(params, dtype=dtype, transposed=not transposed)
        return [bind_dot(ct.astype(dtype), w, sizes, *spare, **params), None, None, *others]
    x, y = (ct, rows) if transposed else (rows, ct)
    d_w, *d_spare = outers_like((w, *spare), x, y, sizes, ct, **params)
    return [None, d_w, None, *d_spare]


def outers_like(
    ws: Sequence[Any], x: jax.Array, y: Any, sizes: jax.Array, ct: Any, **params: object
) -> list[Any]:
    """Return the cotangent of each array of weights, or None where JAX needs no cotangent. Either
    ``x`` or ``y`` is ``ct``."""
    avals = [aval_of(w) for w in ws]
    is_wanted = list(map(ad.is_undefined_primal, ws))
    if is_zero(ct):
        return [ad.Zero(aval) if wanted else None for aval, wanted in zip(avals, is_wanted)]
    dtype = avals[0].dtype
    x, y = (z.astype(dtype) if z is ct else z for z in (x, y))
    parts = tuple(aval.shape[:-2] for aval in avals)
    found = bind_outers(x, y, sizes, parts=parts, **dict(params, dtype=dtype))
    return [out if wanted else None for out, wanted in zip(found, is_wanted)]


def _outer_transpose(
    cts: Any, x: Any, y: Any, sizes: Any, *, parts: tuple[tuple[int, ...], ...], **params: object
) -> list[Any]:
    del parts
    of_x = ad.is_undefined_primal(x)
    wanted, other = (x, y) if of_x else (y, x)
    found: Any = ad.Zero(wanted.aval)
    if not is_zero(cts := all_or_none(tuple(cts))):
        dtype = wanted.aval.dtype
        params = dict(params, dtype=dtype, transposed=of_x)
        w, *spare = (ct.astype(dtype) for ct in cts)
        found = bind_dot(other, w, sizes, *spare, **params)
    return [found, None, None] if of_x else [None, found, None]


def _with_batch(
    args: Sequence[jax.Array], dims: Sequence[int | None], is_full: Sequence[bool]
) -> tuple[list[Any], int]:
    """Return the operands with the mapped axis in front, and its size. Where ``is_full`` is False
    or missing, an operand without a mapped axis gets an axis of size 1."""
    (size,) = {arg.shape[dim] for arg, dim in zip(args, dims) if dim is not None}

    def with_axis(arg: Any, dim: int | None, is_full: bool) -> Any:
        if dim is not None:
            return jnp.moveaxis(arg, dim, 0)
        return jnp.broadcast_to(arg, (size if is_full else 1, *arg.shape))

    of_all = [*is_full, *[False] * (len(args) - len(is_full))]
    return [with_axis(*each) for each in zip(args, dims, of_all, strict=True)], size


def _batch(
    primitive: compat.Primitive,
    is_full: Any,
    passed: Any,
    args: Sequence[jax.Array],
    dims: Sequence[int | None],
    **params: object,
) -> Any:
    moved, _ = _with_batch(args, dims, is_full(**params) if callable(is_full) else is_full)
    outs = bind(primitive, *moved, **params)
    if not primitive.multiple_results:
        return outs, 0
    found_dims: list[int | None] = [0] * len(outs)
    places = passed(**params)
    for i, place in enumerate(places, start=len(outs) - len(places)):
        if dims[place] is None:
            outs[i], found_dims[i] = jnp.squeeze(outs[i], 0), None
    return outs, found_dims


def _outer_batch(
    args: Sequence[jax.Array], dims: Sequence[int | None], *, parts: Any, **params: object
) -> tuple[Any, list[int]]:
    args, size = _with_batch(args, dims, (True, True))
    outs = bind_outers(*args, parts=tuple((size, *part) for part in parts), **params)
    return outs, [0] * len(outs)


register(
    grouped_dot_p,
    abstract=dot_abstract,
    jvp=_dot_jvp,
    transpose=_dot_transpose,
    is_full=(True,),
    composition=reference.dot,
    cuda=lowered.dot_cuda,
)
register(
    grouped_outer_p,
    abstract=_outer_abstract,
    jvp=partial(bilinear_jvp, grouped_outer_p),
    transpose=_outer_transpose,
    batch=_outer_batch,
    composition=reference.outer,
    cuda=lowered.outer_cuda,
)
