"""Count exchanges: those that a traced program should launch, and those that a GPU's counters show.

If all ranks share one GPU, every test states how many exchanges it makes on each rank. Otherwise a
test whose calls take the portable path would pass without any kernel. On a GPU the statement must
equal the counters. Without a GPU it must equal the traced program, so every machine can check it.
"""

import dataclasses
import math

import numpy as np
from cases import SUMMED_DTYPES
from device_counters import epochs_of
from jax.extend.core import Literal
from jax.interpreters import partial_eval

import jax_moe_a2a as ma
from jax_moe_a2a._src.group import native
from jax_moe_a2a._src.plan.plan import RoutingArrays

# The limits of the kernels, as docs/protocol.md, section 13, states them.
MAX_ARRAYS = 16
MAX_PAIRS = 8
VECTOR_BYTES = 16
MAX_FUSED_TOKENS = 512
MAX_FUSED_CHOICES = 16_384
WARP_LANES = 32
NUM_ROUTING_ARRAYS = len(RoutingArrays._fields)  # the last operands of an exchange
CHOICE_RANK = RoutingArrays._fields.index("choice_rank") - NUM_ROUTING_ARRAYS


@dataclasses.dataclass(frozen=True)
class Count:
    """Exchanges on each rank: whole ones, and split ones (a start and its done)."""

    whole: int = 0
    split: int = 0

    def __add__(self, other):
        return Count(self.whole + other.whole, self.split + other.split)

    def __sub__(self, other):
        return Count(self.whole - other.whole, self.split - other.split)

    def times(self, factor):
        return Count(self.whole * factor, self.split * factor)


def shown_by_counters(group):
    """Return the exchanges that the counters of the group's ranks show since they opened.

    Replicated tokens are exchanged by `group.single_rank`. Its counters are separate, and are
    added.
    """
    total = Count()
    for topology in (group.topology, group.single_rank.topology):
        whole, split = (num_exchanges(topology, kind) for kind in native.WORKSPACE_KINDS)
        total += Count(whole, split)
    return total


def num_exchanges(topology, kind):
    """Return how many exchanges each rank of a topology has made; 0 while its workspace is closed.

    Epochs number the exchanges of a rank from 1.
    """
    of_ranks = {next_epoch - 1 for next_epoch, *_ in epochs_of(topology, kind)}
    assert len(of_ranks) <= 1, f"ranks have made different numbers of exchanges: {of_ranks}"
    return of_ranks.pop() if of_ranks else 0


class Unknown(Exception):
    """Error raised where a program decides while it runs how many exchanges it makes."""


def predicted(closed_jaxpr, is_compiled=True):
    """Return the exchanges that a traced program should make, or None if only a run can tell.

    If the program is compiled, neither exchanges without a used result count nor exchanges that
    repeat an earlier one on the same values: XLA removes both. XLA may remove no split exchange.
    """
    jaxpr, is_used = closed_jaxpr.jaxpr, [True] * len(closed_jaxpr.jaxpr.invars)
    if is_compiled:
        jaxpr, is_used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    values = Values(merges=is_compiled)
    try:
        counted, _ = values.count(jaxpr, closed_jaxpr.consts, values.new(sum(is_used)))
    except Unknown:
        return None
    return counted


# Primitives whose jaxpr XLA inlines, and the parameter that holds the jaxpr.
INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
}


# Primitives that leave no operation in the program.
IDENTITIES = ("name", "pvary", "pcast", "on_own_devices")


class Values:
    """The numbers of a computation's values: values that XLA finds equal have the same number."""

    def __init__(self, merges):
        self.merges = merges
        self.numbers = {}

    def of(self, key):
        return self.numbers.setdefault(key, len(self.numbers))

    def of_constant(self, value):
        value = np.asarray(value)
        return self.of((str(value.dtype), value.shape, value.tobytes()))

    def new(self, count):
        """Return numbers for values about which nothing is known."""
        return [self.of(object()) for _ in range(count)]

    def count(self, jaxpr, consts, inputs):
        """Return the exchanges of a jaxpr, and the numbers of its results."""
        known = dict(zip(jaxpr.constvars, map(self.of_constant, consts), strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def number(atom):
            return self.of_constant(atom.val) if isinstance(atom, Literal) else known[atom]

        total = Count()
        for eqn in jaxpr.eqns:
            counted, results = self.count_equation(eqn, [number(atom) for atom in eqn.invars])
            total += counted
            known.update(zip(eqn.outvars, results, strict=True))
        return total, [number(atom) for atom in jaxpr.outvars]

    def count_equation(self, eqn, inputs):
        """Return the exchanges of an equation, and the numbers of its results."""
        name, params = eqn.primitive.name, eqn.params
        if name in INLINED:
            if params.get("differentiated") and params.get("prevent_cse"):
                inputs = self.new(len(inputs))  # a barrier separates what is computed again
            inner = params[INLINED[name]]
            return self.count(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs)
        if name in IDENTITIES:
            return Count(), inputs
        results = self.new(len(eqn.outvars))
        if name == "scan":
            return self.count_separately(params["jaxpr"]).times(params["length"]), results
        if name == "while":
            if self.count_separately(params["body_jaxpr"]) != Count():
                raise Unknown
            return Count(), results
        if name == "cond":
            first, *others = map(self.count_separately, params["branches"])
            if any(other != first for other in others):
                raise Unknown
            return first, results
        assert "moe_a2a_" not in str([p for p in params.values() if holds_equations(p)]), name
        if name.endswith("_start"):
            return Count(split=len(launches(eqn, inputs))), results
        found = launches(eqn, inputs)
        if not self.merges:
            return Count(whole=len(found)), results
        counted = Count(whole=len({*found} - self.numbers.keys()))
        number = self.of((name, str(sorted(params.items())), *inputs))
        for key in found:
            self.of(key)
        return counted, [self.of((number, i)) for i in range(len(results))]

    def count_separately(self, jaxpr):
        """Return the exchanges of a computation that shares no values with others."""
        values = Values(self.merges)
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        consts = getattr(jaxpr, "consts", ())
        return values.count(inner, consts, values.new(len(inner.invars)))[0]


def holds_equations(param):
    return hasattr(param, "eqns") or hasattr(param, "jaxpr")


def launches(eqn, inputs):
    """Return a key for each exchange that the kernels make for an equation.

    Calls of the kernels with equal keys are equal. This function does not use the package's
    lowering: it implements again which calls are portable, by docs/protocol.md.
    """
    name, params = eqn.primitive.name, eqn.params
    operation = name.removeprefix("moe_a2a_").removesuffix("_start")
    group = params.get("group")
    if operation not in KERNELS or not isinstance(group, ma.Group):
        return []
    avals = [atom.aval for atom in eqn.invars]
    is_empty = any(0 in aval.shape for aval in avals)
    if "plan_options" in params:
        is_empty |= params["plan_options"].capacity == 0
    if is_empty or group.implementation == "portable":
        return []
    return [(*key, str(group)) for key in KERNELS[operation](params, avals, tuple(inputs))]


def of_route(params, avals, inputs):
    return [("route", inputs[0], params["plan_options"])]


def of_dispatch(params, avals, inputs):
    """Count the launches of a dispatch. If the kernels do not encode a payload, its values and
    scales still travel in one dispatch."""
    num_landed = num_arrays(params, len(avals) - NUM_ROUTING_ARRAYS)
    return moved(inputs, params) if num_landed <= MAX_ARRAYS else []


def moved(inputs, params):
    options = params["options"]._replace(wire_dtype=None)  # is for the transpose only
    return [("dispatch", inputs, str(options), params["num_choice_arrays"])]


def num_arrays(params, num_payload):
    """Return how many arrays land. An encoded leaf is two arrays: values and scales."""
    return num_payload + (params["num_leaves"] if params["options"].token_format is not None else 0)


def of_routed_dispatch(params, avals, inputs):
    """Count the launches of a routed dispatch: one, or a route and a dispatch in its place."""
    ids, *payload = avals
    ranks = params["group"].size
    *_, num_tokens, top_k = ids.shape
    fits = num_tokens <= MAX_FUSED_TOKENS and ranks * num_tokens * top_k <= MAX_FUSED_CHOICES
    is_encoded_alone = ranks == 1 and params["options"].token_format is not None
    lands = num_arrays(params, len(payload)) <= MAX_ARRAYS
    route = of_route(params, avals, inputs)
    if fits and lands and not is_encoded_alone:
        return [("routed", *moved(inputs, params), *route)]
    return route + (moved((*inputs[1:], *route), params) if lands else [])


def of_combine(params, avals, inputs):
    """Count the launches of a combine: one for each dtype that is summed. Scalars go with the
    first."""
    num_leaves, num_choice_arrays = params["num_leaves"], params["num_choice_arrays"]
    leaves = avals[:num_leaves]
    if num_leaves + num_choice_arrays > MAX_ARRAYS or not are_summed(leaves, params, avals):
        return []
    keys, choice_arrays = [], inputs[num_leaves : num_leaves + num_choice_arrays]
    addends = inputs[num_leaves + num_choice_arrays : -NUM_ROUTING_ARRAYS]
    for dtype in dict.fromkeys(aval.dtype for aval in leaves) or [None]:
        own = tuple(x for x, aval in zip(inputs, leaves) if aval.dtype == dtype)
        own += tuple(x for x, aval in zip(addends, leaves) if aval.dtype == dtype)
        wire = params["options"].wire_dtype or dtype
        keys.append(("combine", own, choice_arrays, inputs[-NUM_ROUTING_ARRAYS:], str(wire)))
        choice_arrays = ()
    return keys


def of_weighted_combine(params, avals, inputs):
    num_pairs, wire = params["num_leaves"], params["options"].wire_dtype
    rows, weights = avals[:num_pairs], avals[num_pairs : 2 * num_pairs]
    applies = (
        num_pairs <= (1 if is_format(wire) else MAX_PAIRS)
        and are_summed(rows, params, avals)
        and len({aval.dtype for aval in rows}) == 1
        and all(aval.dtype == np.float32 for aval in weights)
    )
    return [("weighted_combine", inputs, str(wire or rows[0].dtype))] if applies else []


def of_weighted_dispatch(params, avals, inputs):
    """Count the launches of a weighted dispatch: one launch weighs rows as they arrive, or XLA
    weighs what a dispatch has moved.

    On a single rank XLA computes all of it.
    """
    num_leaves, num_choice_arrays = params["num_leaves"], params["num_choice_arrays"]
    g, *payload = avals[: 1 + num_leaves + num_choice_arrays]
    rows, weights = payload[:num_leaves], payload[num_leaves:]
    if params["group"].size == 1:
        return []
    row_bytes = math.prod(g.shape[1 + params["emulated"] :]) * g.dtype.itemsize
    is_one = (
        max(num_leaves, num_choice_arrays) == 1
        and params["num_weight_axes"] == 0
        and g.dtype.name in SUMMED_DTYPES
        and all(aval.dtype == g.dtype for aval in rows)
        and all(aval.dtype == np.float32 for aval in weights)
        and row_bytes % VECTOR_BYTES == 0
    )
    if is_one:
        return [("weighted_dispatch", inputs, num_leaves, num_choice_arrays)]
    return moved((inputs[0], *inputs[-NUM_ROUTING_ARRAYS:]), params | dict(num_choice_arrays=0))


def is_format(wire_dtype):
    return hasattr(wire_dtype, "group_size")


def are_summed(rows, params, avals):
    """Return True if the kernels sum such rows and send such partial sums."""
    wire = params["options"].wire_dtype
    if any(aval.dtype.name not in SUMMED_DTYPES for aval in rows):
        return False
    if is_format(wire):
        top_k = avals[CHOICE_RANK].shape[-1]
        return top_k + params["group"].size <= WARP_LANES
    return all(wire is None or np.dtype(wire) in (aval.dtype, np.float32) for aval in rows)


KERNELS = {
    "route": of_route,
    "dispatch": of_dispatch,
    "routed_dispatch": of_routed_dispatch,
    "combine": of_combine,
    "weighted_combine": of_weighted_combine,
    "weighted_dispatch": of_weighted_dispatch,
}
