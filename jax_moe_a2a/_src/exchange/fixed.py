"""Define the identity whose derivative is zero."""

from __future__ import annotations

from functools import partial

import jax
from jax.interpreters import ad, batching, mlir

from .. import compat
from .rules import aval_of, zero_tangent

fixed_p = compat.Primitive("fixed")


def fixed(x: jax.Array) -> jax.Array:
    """Return ``x``, which derivatives treat as a constant.

    ``lax.stop_gradient`` does the same, but ``jax.linear_transpose`` refuses it.
    """
    return fixed_p.bind(x)


fixed_p.def_impl(partial(compat.apply_primitive, fixed_p))
fixed_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(fixed_p, lambda ctx, x: [x])
ad.primitive_jvps[fixed_p] = lambda primals, _: (fixed_p.bind(*primals), zero_tangent(primals[0]))
ad.primitive_transposes[fixed_p] = lambda ct, x: [ad.Zero(aval_of(x))]
batching.primitive_batchers[fixed_p] = lambda args, dims: (fixed_p.bind(*args), dims[0])
