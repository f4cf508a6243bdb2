"""Define the routers that ``moe`` accepts: ``Router``, ``Replay``, and choices without a router."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..checks import as_array, check_floats, short
from ..routing.choices import RouterChoices
from .logits import router_logits
from .top_k import TopK, check_bias, check_ids

Choose: TypeAlias = TopK | Callable[[jax.Array, jax.Array, Any, Any], RouterChoices]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Router:
    """The router of a layer, as a pytree. It computes the logits of tokens, and chooses experts.

    Logits are ``tokens @ kernel + bias``, with the precision of float32. The field ``choose`` is
    static. All other fields contain arrays, or a ``PartitionSpec`` in place of each array.

    ``choose`` may be a function ``choose(tokens, logits, per_token, whole)``. On each rank, ``moe``
    calls this function with the rank's T tokens [T, H], their logits [T, E], and the fields
    ``per_token`` and ``whole``. Arrays in ``per_token`` then have the axis T in place of the
    leading axes of the tokens. Arrays in ``whole`` are unchanged. The function returns
    ``RouterChoices`` with ids [T, K], and with scores [T, E] or None. Ids outside [-1, E) choose no
    expert, and the statistics count them in ``num_invalid``. The ids of masked tokens are ignored.
    Pass traced arrays in ``per_token`` and ``whole``: over Explicit axes, JAX does not allow the
    function to read traced arrays of an enclosing function. Define the function once, at the top of
    a module, because JAX traces a program again for each new function.

    Example:
      A hash layer chooses the expert from the id of a token in the vocabulary. The weight is the
      sigmoid of the logit:

      ```python
      import jax
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      def hashed(tokens, logits, token_ids, table):
          ids = table[token_ids][:, None]
          return ma.RouterChoices(ids, jax.nn.sigmoid(jnp.take_along_axis(logits, ids, axis=1)))

      with jax.set_mesh(jax.make_mesh((4,), ("ep",))):
          params = ma.init_moe(jax.random.key(0), ma.MoEConfig(16, 32, 8, hashed), "ep")
          token_ids, table = jnp.array([[7, 3, 7, 1]]), jnp.arange(10) % 8
          params["router"] = params["router"].replace(per_token=token_ids, whole=table)
          x = jax.random.normal(jax.random.key(1), (1, 4, 16))
          layer = lambda params, x: ma.moe(x, **params, axes="ep", outputs=("choices",))
          y, stats = jax.jit(layer)(params, x)
      print(stats.choices.ids[..., 0])
      ```

      ```text
      [[7 3 7 1]]
      ```
    """

    kernel: Any
    """[H, E] floats. Keep the kernel in float32 for exact logits. If the dtypes of kernel and
    tokens differ, both are first cast to float32. If ``choose`` is a function, the number of
    columns may differ from the number of experts."""
    bias: Any = None
    """[E] floats, added to the logits, or None."""
    select_bias: Any = None
    """[E] floats or None. ``TopK`` adds them to the scores only to choose experts."""
    _: dataclasses.KW_ONLY
    choose: Choose = dataclasses.field(metadata=dict(static=True))
    """A ``TopK``, or a function."""
    per_token: Any = None
    """A pytree of arrays for the function ``choose``, with the leading axes of the tokens. They are
    divided over the ranks and padded with zeros. Floats of masked tokens become 0."""
    whole: Any = None
    """A pytree of arrays for the function ``choose``. Each rank gets the same arrays."""

    def replace(self, **fields: Any) -> Router:
        """Return a copy of the router with some fields replaced, for example ``select_bias``."""
        return dataclasses.replace(self, **fields)

    def replay(self, ids: ArrayLike) -> Replay:
        """Return a router for ``moe`` that uses the experts ``ids`` and chooses none itself.

        The router computes weights and scores for these experts, so the kernel has gradients. For
        example, a trainer in reinforcement learning replays the experts that the sampler chose
        (``statistics.choices.ids``).

        Args:
          ids: integers [..., K] with the leading axes of the tokens. Ids outside [0, E), such as
            -1, choose no expert.
        """
        return Replay(self, ids)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """The result of ``Router.replay``: a router whose experts are already chosen."""

    router: Router
    ids: Any
    """[..., K] integers: the experts of each token."""


RouterLike: TypeAlias = Router | Replay | RouterChoices


def map_arrays(router: Any, per_token: Callable[[Any], Any], whole: Callable[[Any], Any]) -> Any:
    """Apply the function ``per_token`` to the arrays of a ``RouterLike`` that have the leading axes
    of tokens, and the function ``whole`` to all other arrays."""
    if isinstance(router, RouterChoices):
        return jax.tree.map(per_token, router)
    if isinstance(router, Replay):
        return Replay(map_arrays(router.router, per_token, whole), per_token(router.ids))
    others = jax.tree.map(whole, router.replace(per_token=None))
    return others.replace(per_token=jax.tree.map(per_token, router.per_token))


def num_outputs(router: Any, tokens: Any) -> int | None:
    """Return the number of columns of the kernel if ``choose`` is a ``TopK``, else None. Raise an
    error if ``router`` has the wrong type, or its kernel does not fit the tokens."""
    own = router.router if isinstance(router, Replay) else router
    if isinstance(own, RouterChoices):
        return None
    if not isinstance(own, Router):
        got = short(router) if hasattr(router, "shape") else repr(router)
        raise TypeError(
            f"router must be a Router, router.replay(ids), or RouterChoices; got {got}. Pass "
            "ma.Router(kernel, choose=ma.TopK(k))"
        )
    kernel = as_array(own.kernel)
    if kernel.ndim != 2 or kernel.shape[0] != tokens.shape[-1]:
        raise ValueError(
            f"kernel of the router must be an array [H={tokens.shape[-1]}, E], because the router "
            f"reads {short(tokens)}; got {short(kernel)}"
        )
    return kernel.shape[1] if isinstance(own.choose, TopK) else None


def check_router(router: RouterLike, tokens: Any, num_experts: int) -> RouterLike:
    """Return the router with JAX arrays, or raise an error. Call ``num_outputs`` first."""
    leading = tokens.shape[:-1]
    if isinstance(router, RouterChoices):
        return check_choices("router", router, leading, num_experts)
    own = router.router if isinstance(router, Replay) else router
    kernel = as_array(own.kernel)
    check_floats("kernel of the router", kernel, "Cast it")
    is_function = not isinstance(own.choose, TopK)
    if is_function and not callable(own.choose):
        raise TypeError(f"choose of the router must be a TopK or a function; got {own.choose!r}")
    for name in ("select_bias",) if is_function else ("per_token", "whole"):
        if getattr(own, name) is not None:
            remedy = "Pass it in whole" if is_function else "Pass a function as choose, or omit it"
            raise ValueError(
                f"{name} of the router must be None with choose={own.choose!r}, which does not "
                f"read it; got {getattr(own, name)!r}. {remedy}"
            )
    biases = {}
    for field, label in {"bias": "bias of the router", "select_bias": "select_bias"}.items():
        if (bias := getattr(own, field)) is not None:
            biases[field] = check_bias(label, bias, kernel.shape[1])
    for path, leaf in jax.tree_util.tree_leaves_with_path(own.per_token):
        if jnp.shape(leaf)[: len(leading)] != leading:
            raise ValueError(
                f"per_token{jax.tree_util.keystr(path)} of the router must have the leading axes "
                f"of the tokens, {list(leading)}; got {short(as_array(leaf))}"
            )
    own = jax.tree.map(jnp.asarray, own.replace(**biases))
    if not isinstance(router, Replay):
        return own
    if is_function:
        raise ValueError(
            "a replay needs a router whose choose is a TopK, which knows the weights of given ids; "
            f"got choose={own.choose!r}. Compute the weights, and pass ma.RouterChoices(ids, "
            "weights) as router"
        )
    return Replay(own, check_ids("ids of the replay", router.ids, leading, num_experts))


def check_choices(
    name: str, choices: object, leading: tuple[int, ...], num_experts: int
) -> RouterChoices:
    """Return choices as JAX arrays. Raise an error if their leading axes are not ``leading``."""
    if not isinstance(choices, RouterChoices):
        raise TypeError(f"{name} must be RouterChoices; got {choices!r}")
    ids = check_ids(f"ids of {name}", choices.ids, leading, num_experts)
    weights, scores = (None if x is None else as_array(x) for x in choices[1:])
    if weights is not None:
        check_floats(f"weights of {name}", weights, "Cast it")
        if weights.shape != ids.shape:
            raise ValueError(
                f"weights of {name} must have the shape of ids, {list(ids.shape)}; got "
                f"{short(weights)}"
            )
    if scores is not None:
        check_floats(f"scores of {name}", scores, "Cast it")
        if scores.shape[:-1] != leading or scores.ndim == 0 or scores.shape[-1] < num_experts:
            raise ValueError(
                f"scores of {name} must have the shape {[*leading, num_experts]}, a score for each "
                f"expert; got {short(scores)}. Omit them to have no balance loss"
            )
    return jax.tree.map(jnp.asarray, RouterChoices(ids, weights, scores))


def choose_experts(
    router: RouterLike, tokens: jax.Array, num_experts: int, mask: jax.Array | None
) -> tuple[RouterChoices, jax.Array | None]:
    """Return the choices of a rank's tokens [T, H] and their logits [T, E]. If ``router`` is
    ``RouterChoices``, the logits are None."""
    if isinstance(router, RouterChoices):
        return _without_masked(router, mask), None
    own = router.router if isinstance(router, Replay) else router
    logits = router_logits(tokens, own.kernel, own.bias)
    if isinstance(own.choose, TopK):
        if isinstance(router, Replay):
            return own.choose.replay(logits, router.ids, mask=mask), logits
        return own.choose(logits, select_bias=own.select_bias, mask=mask), logits

    def kept(array: jax.Array) -> jax.Array:
        """Set floats of masked tokens to 0, because these floats must not affect a gradient."""
        if mask is None or not jnp.issubdtype(array.dtype, jnp.floating):
            return array
        axes = (1,) * (array.ndim - 1)
        return jnp.where(mask.reshape(*mask.shape, *axes), array, 0)

    found = own.choose(tokens, logits, jax.tree.map(kept, own.per_token), own.whole)
    choices = check_choices("the result of choose", found, tokens.shape[:1], num_experts)
    return _without_masked(choices, mask), logits


def _without_masked(choices: RouterChoices, mask: jax.Array | None) -> RouterChoices:
    """Return choices in which masked tokens have the id -1, the weight 0 and the score 0."""
    if mask is None:
        return choices
    rest = jax.tree.map(lambda x: jnp.where(mask[:, None], x, 0), choices)
    return rest._replace(ids=jnp.where(mask[:, None], choices.ids, -1))
