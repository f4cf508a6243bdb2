"""Give operations names that show their purpose in profiles and compiled programs.

Each decorator runs a function in a ``jax.named_scope``. For derivatives, JAX extends the name of
the scope, as in ``transpose(jvp(moe_router))``. The names are the same on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from . import compat

F = TypeVar("F", bound=Callable[..., Any])
NAMES: set[str] = set()


def _in_scope(name: str) -> Callable[[F], F]:
    NAMES.add(name)

    def decorate(fn: F) -> F:
        @functools.wraps(fn)
        def in_scope(*args: jax.Array, **kwargs: Any) -> Any:
            if compat.innermost_scope() == name:  # the caller is in this scope
                return fn(*args, **kwargs)
            with jax.named_scope(name):
                return fn(*args, **kwargs)

        return in_scope  # type: ignore[return-value]

    return decorate


router = _in_scope("moe_router")
losses = _in_scope("moe_losses")
load = _in_scope("moe_load")
padding = _in_scope("moe_padding")
placement = _in_scope("moe_placement")
quantization = _in_scope("moe_quantization")
exchange = _in_scope("moe_exchange")
products = _in_scope("moe_products")
activation = _in_scope("moe_activation")
shared_expert = _in_scope("moe_shared_expert")


def of_user(ctx: compat.Context) -> tuple[str, ...]:
    """Return the named scopes around a lowered primitive that are not in ``NAMES``."""
    return tuple(name for name in compat.scopes_of(ctx) if name not in NAMES)
