"""Dispatch the rows of an expert layer, under a name for the policies of ``jax.checkpoint``."""

from __future__ import annotations

import dataclasses

from .. import compat
from ..api import bind_dispatch
from ..exchange.arguments import DispatchArguments
from ..exchange.recv import Recv

ROWS_CHECKPOINT_NAME = "moe_a2a_rows"
"""Checkpoint name, a str, of the rows that ``moe_mlp`` dispatches and of their router weights.

If a policy saves this name and ``ROUTING_CHECKPOINT_NAME``, the backward pass of ``jax.checkpoint``
does not dispatch the tokens again."""


def dispatch_rows(arguments: DispatchArguments) -> Recv:
    """Dispatch the tokens of a layer.

    Args:
      arguments: of a dispatch of one array [T, H] with ``tail="unspecified"``. A dispatch with
        a format decodes the rows.

    Returns:
      The ``Recv``, whose rows and weights have the checkpoint name. After the last group, rows,
      weights and their derivatives are unspecified.
    """
    recv = bind_dispatch(arguments)
    rows, weights = compat.checkpoint_name((recv.rows, recv.weights), ROWS_CHECKPOINT_NAME)
    return dataclasses.replace(recv, rows=rows, weights=weights)
