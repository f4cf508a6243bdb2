"""Offer the layer with the interfaces of other code bases, in one module for each code base.

``maxtext`` and ``transformers`` need only JAX. ``nnx`` and ``linen`` need Flax.
This package imports none of them, so import a module yourself: ``jax_moe_a2a.integrations.nnx``.
"""

import typing as _typing

_NEEDS_FLAX = ("linen", "nnx")
_MODULES = ("maxtext", "transformers", *_NEEDS_FLAX)

if not _typing.TYPE_CHECKING:  # a ``__getattr__`` makes type checkers accept every name

    def __getattr__(name):
        """Raise an AttributeError that says how to import a module of this package."""
        remedy = f"; it has {', '.join(_MODULES)}"
        if name in _MODULES:
            needs = ", which needs Flax" if name in _NEEDS_FLAX else ""
            remedy = f" before it is imported: import {__name__}.{name}{needs}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{remedy}")
