"""Connect the layer to other libraries, with one module for each library.

``maxtext`` and ``transformers`` need only JAX. ``nnx`` and ``linen`` need Flax. This package does
not import these modules, so import the module that you need: ``jax_moe_a2a.integrations.nnx``.
"""

import typing as _typing

_NEEDS_FLAX = ("linen", "nnx")
_MODULES = ("maxtext", "transformers", *_NEEDS_FLAX)

if not _typing.TYPE_CHECKING:  # type checkers would accept every name

    def __getattr__(name):
        """Raise an AttributeError that says how to import the module ``name``."""
        remedy = f"; it has {', '.join(_MODULES)}"
        if name in _MODULES:
            needs = ", which needs Flax" if name in _NEEDS_FLAX else ""
            remedy = f" before it is imported: import {__name__}.{name}{needs}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{remedy}")
