"""Make random programs with `ma.moe_mlp`, some in a scan or under checkpoint policies."""

import dataclasses
import functools

import cases
import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
from dense_layer import experts_of
from jax import lax

import jax_moe_a2a as ma

from . import check, derivatives, draw, places

EXPERTS = ("w_in", "w_out", "b_in", "b_out", "p")
OF_TOKENS = ("x", "topk_weights")


def sigmoid(h):
    return 0.5 * (1 + np.tanh(0.5 * h))  # does not overflow


def silu_slope(h):
    return sigmoid(h) * (1 + h * (1 - sigmoid(h)))


def tanh_slope(h):
    return 1 - np.tanh(h) ** 2


def silu(h):
    return h * sigmoid(h)


def nan_at_zero(h):
    """Replace zeros of h, and derivatives at zeros, by NaN."""
    return h + (0 * jnp.log(jnp.abs(h.astype(jnp.float32)))).astype(h.dtype)


# Each value: the activation, the oracle's activation, 2 if gated (otherwise 1), and the axes of the
# array `p` that the activation reads, or None.
ACTIVATIONS = {
    "identity": (lambda h, p: h, oracle.elementwise(lambda h: h, np.ones_like), 1, None),
    "tanh": (lambda h, p: jnp.tanh(h), oracle.elementwise(np.tanh, tanh_slope), 1, None),
    "silu": (lambda h, p: jax.nn.silu(h), oracle.elementwise(silu, silu_slope), 1, None),
    "square": (lambda h, p: h * h, oracle.elementwise(np.square, lambda h: 2 * h), 1, None),
    "sine": (lambda h, p: jnp.sin(h), oracle.elementwise(np.sin, np.cos), 1, None),
    "gated silu": (
        lambda h, p: ma.gated(jax.nn.silu)(h),
        oracle.gated(silu, silu_slope),
        2,
        None,
    ),
    "gated tanh": (lambda h, p: ma.gated(jnp.tanh)(h), oracle.gated(np.tanh, tanh_slope), 2, None),
    "p cos": (
        lambda h, p: p[None] * jnp.cos(h),
        oracle.scaled(np.cos, lambda h: -np.sin(h)),
        1,
        "columns",
    ),
    "tanh of p": (lambda h, p: jnp.tanh(p * h), oracle.steep(np.tanh, tanh_slope), 1, "none"),
    "p nan": (
        lambda h, p: p[None] * nan_at_zero(h),
        oracle.scaled(lambda h: h, np.ones_like),
        1,
        "columns",
    ),
}


# At |h|, a MAJORANT and its derivative bound |activation(h)| and |derivative(h)|, up to a factor.
MAJORANT = dict(
    plain=oracle.elementwise(lambda h: 1.5 * (h + h * h), lambda h: 1.5 + 3 * h),
    gated=oracle.gated(lambda h: 1.5 * (h + h * h), lambda h: 1.5 + 3 * h),
    columns=oracle.scaled(lambda h: 1 + h + h * h, lambda h: 1 + 2 * h),
    none=oracle.steep(lambda h: 1.5 * (h + h * h), lambda h: 1.5 + 3 * h),
)
# The allowed error is this number times epsilon times the result with MAJORANT. Of 45,000 layers
# and products, only one needed more than 6.
MOST_ROUNDINGS = 12

POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "routing": jax.checkpoint_policies.save_only_these_names(ma.ROUTING_CHECKPOINT_NAME),
    "rows": jax.checkpoint_policies.save_only_these_names(ma.ROWS_CHECKPOINT_NAME),
    "both": jax.checkpoint_policies.save_only_these_names(
        ma.ROUTING_CHECKPOINT_NAME, ma.ROWS_CHECKPOINT_NAME
    ),
    "products": jax.checkpoint_policies.save_only_these_names(
        ma.ROUTING_CHECKPOINT_NAME, ma.PRODUCTS_CHECKPOINT_NAME
    ),
    "dots": jax.checkpoint_policies.dots_saveable,
}


@dataclasses.dataclass(frozen=True)
class Program(draw.Routed):
    hidden: int
    width: int
    dtype: str
    activation: str
    biases: tuple[str, ...]
    wire: str | None
    depth: int  # number of layers in a scan; 0: one layer without a scan
    policy: str | None
    is_outside: bool
    num_chunks: int | None
    spare: tuple[int, ...] | None  # the experts in spare slots (-1: none); None: no placement
    weigh_input: bool

    @property
    def floats(self):
        names = ["x", *self.router_weights, "w_in", "w_out", *self.biases]
        return names + ["p"] * (ACTIVATIONS[self.activation][3] is not None)

    @property
    def others(self):
        return ["ids", *(["scale"] * self.has_traced_scale)]

    def is_batched(self, name):
        if not self.batch or name == "scale":
            return False
        name = name.removeprefix("v.")
        kind = {"ids": "ids", "x": "x", "g": "g"}.get(name)
        kind = kind or ("weights" if name in OF_TOKENS else "experts")
        return kind == "g" or kind in self.batched

    def is_summed(self, name):
        is_one = self.is_outside or self.place.has_domains
        return bool(self.batch) and is_one and not self.is_batched(name)

    @property
    def placement(self):
        if self.spare is None:
            return None
        home = np.arange(self.num_experts).reshape(self.ranks, -1)
        spare = np.reshape(self.spare, (self.ranks, -1))
        slots = np.concatenate([home, spare], axis=1).ravel()
        return ma.Placement.from_slots(slots, self.num_experts, num_ranks=self.ranks)

    def has_layers(self, name):
        return self.depth > 0 and name not in ("x", "scale", "g", "v.x")


def program(seed, number, *, has_mesh=True):
    """Make a program. If `has_mesh` is False, its ranks are elements of a vmap."""
    rng = draw.generator(seed, number, 3)
    chance = lambda p: bool(rng.random() < p)
    one_of = functools.partial(draw.one_of, rng)
    sizes = draw.drawn_sizes(rng, most_tokens=9)
    ranks = sizes["ranks"]
    hosts = one_of([h for h in (1, 2, 3, 4) if ranks % h == 0]) if chance(0.12) else 0
    x64 = chance(0.08)
    dtype = one_of(("float32",) * 6 + ("bfloat16", "bfloat16", "float16") + ("float64",) * 9 * x64)
    hidden, width = one_of((1, 2, 3, 5, 8)), one_of((1, 2, 3, 4, 6))
    activation = one_of(tuple(ACTIVATIONS))
    derivative = one_of(
        (None, "jvp", *(["vjp"] * 5), *(one_of(derivatives.SECOND) for _ in range(2)))
    )
    depth = one_of((2, 2, 3)) if chance(0.2) else 0
    is_simple = depth > 0 or derivative in derivatives.SECOND
    fmt = one_of(tuple(draw.FORMATS)) if chance(0.2) and dtype != "float64" and not depth else None
    wire = draw.wire(rng, fmt)
    if is_simple and wire not in draw.FORMAT_DTYPES:
        wire = None
    if hosts and draw.is_wider(wire, [draw.Leaf(dtype, ())]):
        wire = None
    group_size = draw.group_size_of(fmt, wire)
    if group_size and dtype == "float64":
        wire, group_size = None, 0
    if group_size:
        hidden = group_size
    if derivative in derivatives.SECOND and activation == "p nan":
        activation = "silu"
    if activation == "p nan" and dtype in ("bfloat16", "float16"):
        activation = "silu"  # in 16 bits, a product plus a bias may be exactly 0
    topk_weights = one_of((dtype, "float32", "bfloat16")) if chance(0.85) else None
    batch = one_of((1, 2, 3)) if chance(0.25) else 0
    kind = one_of(("vmap", "vmap", "auto", "explicit"))
    is_empty = chance(0.05)
    if is_empty:
        hidden, width = one_of(((0, width), (hidden if not group_size else 0, 0)))
        activation = "gated silu"
    if is_empty or draw.Sizes(**sizes).is_empty or not has_mesh:
        kind = "vmap"  # see the comment in `draw.program`
    domains = kind != "vmap" and batch * ranks <= harness.NUM_DEVICES and chance(0.8)
    is_outside = chance(0.4)
    place = places.Place(kind, ranks, hosts, batch, bool(batch) and domains)
    if is_outside and chance(0.3) and kind != "vmap":
        place = dataclasses.replace(place, check_vma=False)
    batched = draw.some_of(rng, ("ids", "x", "weights", "experts")) if batch else ()
    if place.has_domains and "x" not in batched:
        batched = (*batched, "x")  # cotangents and the carry of a scan are batched, too
    found = Program(
        **sizes,
        place=place,
        hidden=hidden,
        width=width,
        dtype=dtype,
        x64=x64,
        ids_dtype=one_of(draw.ID_DTYPES + (("int64", "uint64") * 3 if x64 else ())),
        activation=activation,
        biases=draw.some_of(rng, ("b_in", "b_out")) if chance(0.5) else (),
        topk_weights=topk_weights,
        format=fmt,
        has_traced_scale=fmt == "nv" and chance(0.5),
        wire=wire,
        is_routed_first=chance(0.4),
        has_load=chance(0.3) and not depth and derivative not in derivatives.SECOND,
        depth=depth,
        policy=one_of(tuple(POLICIES)) if chance(0.35) else None,
        derivative=derivative,
        is_outside=is_outside,
        batched=batched,
        num_chunks=None,
        spare=None,
        weigh_input=draw.generator(seed, number, 13).random() < 0.2,
    )
    return with_parts(rng, found)


def with_parts(rng, program):
    """Add random chunks and a placement, if the program can have them.

    Chunks and placements would change partial sums of replicated tokens. If the activation reads
    an array `p`, a replica of an expert would read the `p` of another rank.
    """
    p = program
    has_routing = p.is_routed_first or p.has_load or p.place.hosts
    has_capacity = p.capacity is not None or p.capacity_factor is not None
    if has_routing or has_capacity or p.replicated or p.is_empty:
        return p
    changed = {}
    if rng.random() < 0.3:
        numbers = [n for n in range(2, p.tokens + 1) if p.tokens % n == 0]
        changed["num_chunks"] = draw.one_of(rng, numbers) if numbers else None
    if rng.random() < 0.4 and ACTIVATIONS[p.activation][3] is None:
        experts = rng.integers(-1, p.num_experts, p.ranks * draw.one_of(rng, (1, 2)))
        changed["spare"] = tuple(map(int, experts))
    return dataclasses.replace(p, **changed)


# The package


def of_one_rank(program, group):
    p = program

    def layer(a, ids, scale):
        routed = draw.routed_by(p, group)
        source = ids
        if p.is_routed_first or p.has_load:
            source, routed = ma.route(ids, **routed), {}
        own = {n: a[n] for n in ("w_in", "w_out", "b_in", "b_out") if n in a}
        activation = lambda h: ACTIVATIONS[p.activation][0](h, a.get("p"))
        y = ma.moe_mlp(
            a["x"],
            ma.RouterChoices(source, a.get("topk_weights")),
            experts_of(**own, activation=activation).replace(weigh_input=p.weigh_input),
            **harness.exchanging(
                routed,
                wire_dtype=draw.FORMATS.get(p.wire, p.wire),
                token_format=p.format_with(scale),
                num_chunks=p.num_chunks,
            ),
            placement=p.placement,
        )
        return y, ma.expert_load(source) if p.has_load else None

    if p.policy:
        layer = jax.checkpoint(layer, policy=POLICIES[p.policy])

    def run(floats, others):
        if p.depth:
            x, layers = floats["x"], {n: a for n, a in floats.items() if n != "x"}

            def step(x, own):
                y, _ = layer({"x": x, **own[0]}, own[1], None)
                return x + y, None

            return lax.scan(step, x, (layers, others["ids"]))[0], {}
        y, load = layer(floats, others["ids"], others.get("scale"))
        return y, {"load": load} if p.has_load else {}

    return run


def compiled(program):
    """Return a compiled function (floats, others, directions) -> results."""
    p = program
    batched = lambda names: {name: p.is_batched(name) for name in names}
    inputs = batched(p.floats), batched(p.others)
    directions = batched(derivatives.directions_of(p.derivative, p.floats))
    extra = {"load": True} if p.has_load else {}
    layer = of_one_rank(p, p.place.group)
    if p.is_outside:

        def with_name(floats, others):
            y, aux = layer(floats, others)
            return {"y": y, **aux}

        over = p.place.over_ranks(with_name, inputs, {"y": True, **extra})

        def of_all(floats, others):
            found = over(floats, others)
            return found.pop("y"), found

        fn = derivatives.derived(p.derivative, of_all)
    else:
        results = derivatives.results_of(p.derivative, p.floats)
        out = {name: not is_summed_result(p, name) for name in results}
        fn = derivatives.derived(p.derivative, layer)
        fn = p.place.over_ranks(fn, (*inputs, directions), {**out, **extra})
    return p.place.compiled(fn, (*inputs, directions), p.x64)


def is_summed_result(program, name):
    kind, _, of = name.partition(".")
    return kind in ("d", "dd") and program.is_summed(of)


# Inputs


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays [R, batch, layer, ...]. An array that all elements share has no batch axis. With depth
    0, no array has a layer axis."""

    floats: dict[str, np.ndarray]
    others: dict[str, np.ndarray]
    directions: dict[str, np.ndarray]
    routings: list[list[list[oracle.Routing]]]  # [element][layer][domain]
    names: list[str]


def inputs(program, seed, number, run):
    """Make random arrays, with NaN where no program may read."""
    rng = draw.generator(seed, number, run, 4)
    p, elements, depth = program, max(1, program.batch), max(1, program.depth)
    count = elements if p.is_batched("ids") else 1
    drawn = [[draw.ids_of(rng, p) for _ in range(depth)] for _ in range(count)]
    all_ids = [[ids for ids, _ in own] for own in drawn]
    routings = [[draw.routings_of(p, ids) for ids in own] for own in all_ids]
    routings = routings if count == elements else routings * elements

    def stacked(arrays, name):
        own = [np.stack(a, axis=1) if p.has_layers(name) else a[0] for a in arrays]
        return np.stack(own, axis=1) if p.is_batched(name) else own[0]

    def is_read(name):
        """Return masks of the entries that a program reads, for each element of the batch."""
        masks = []
        for own in routings:
            has_row = draw.has_row(p, own[0])
            masks.append(has_row[..., : p.top_k] if name == "topk_weights" else has_row.any(axis=2))
        return masks if p.is_batched(name) else [np.any(masks, axis=0)]

    def array(name):
        kind = name.removeprefix("v.")
        shape, dtype, scale = shapes[kind]
        shape = (p.ranks, *shape)
        count = elements if p.is_batched(name) else 1
        layers = depth if p.has_layers(name) else 1
        arrays = [[scale * rng.standard_normal(shape) for _ in range(layers)] for _ in range(count)]
        if p.replicated and kind in OF_TOKENS:
            arrays = [[np.broadcast_to(a[:1], a.shape).copy() for a in own] for own in arrays]
        arrays = [[a.astype(cases.dtype(dtype)) for a in own] for own in arrays]
        if kind in ("x", "topk_weights", "g") and not p.depth:
            for (a,), mask in zip(arrays, is_read(kind), strict=True):
                a[~mask] = np.nan
        return stacked(arrays, name)

    experts, columns = p.local_experts, p.width * ACTIVATIONS[p.activation][2]
    shapes = dict(
        x=((p.tokens, p.hidden), p.dtype, 1.0),
        g=((p.tokens, p.hidden), p.dtype, 1.0),
        topk_weights=((p.tokens, p.top_k), p.topk_weights, 1.0),
        w_in=((experts, p.hidden, columns), p.dtype, max(1, p.hidden) ** -0.5),
        w_out=((experts, p.width, p.hidden), p.dtype, max(1, p.width) ** -0.5),
        b_in=((experts, columns), p.dtype, 0.5),
        b_out=((experts, p.hidden), p.dtype, 0.5),
        p=((columns,) if ACTIVATIONS[p.activation][3] == "columns" else (), p.dtype, 1.0),
    )
    floats = {name: array(name) for name in p.floats}
    names = derivatives.directions_of(p.derivative, p.floats)
    directions = {name: array(name) for name in names}
    others = {"ids": stacked(all_ids, "ids")}
    if p.has_traced_scale:
        others["scale"] = np.full(p.ranks, draw.TRACED_SCALE, np.float32)
    names = [name for own in drawn for _, name in own]
    return Inputs(floats, others, directions, routings, names)


# The oracle


class Expected:
    def __init__(self, program, given, b):
        self.p = p = program
        floats, others, directions = (
            {n: a[:, b] if p.is_batched(n) else a for n, a in arrays.items()}
            for arrays in (given.floats, given.others, given.directions)
        )
        self.dtypes = {name: a.dtype for name, a in floats.items()}
        self.dtypes["y"] = floats["x"].dtype
        self.routings = given.routings[b]
        ids = others["ids"]
        self.rows = [
            oracle.rows_of(
                ids[:, i] if p.depth else ids,
                p.local_experts,
                own,
                p.replicated,
            )
            for i, own in enumerate(self.routings)
        ]
        if p.format:
            fmt = p.format_with(draw.TRACED_SCALE)
            floats["x"] = check.rounded_to(fmt, floats["x"], p.dtype)
        self.a = {name: x.astype(np.float64) for name, x in floats.items()}
        directions = {name: x.astype(np.float64) for name, x in directions.items()}
        self.g = directions.get("g")
        self.v = {name[2:]: x for name, x in directions.items() if name != "g"}

    def of_layer(self, a, i, x):
        own = {n: array[:, i] if self.p.has_layers(n) else array for n, array in a.items()}
        tokens = own["x"].shape[:2]
        found = {n: own[n] for n in EXPERTS if n in own}
        weights = own.get("topk_weights", np.ones((*tokens, self.p.top_k)))
        return {"x": x, "weights": weights, **found}

    def xs(self, a, activation):
        xs = [a["x"]]
        for i, rows in enumerate(self.rows):
            arrays = self.of_layer(a, i, xs[-1])
            y = oracle.expert_layer(arrays, rows, activation, self.p.weigh_input)
            xs.append(xs[-1] + y if self.p.depth else y)
        return xs

    def value(self, activation, a):
        return {"y": self.xs(a, activation)[-1]}

    def gradient(self, activation, g, a):
        p, xs = self.p, self.xs(a, activation)
        layers = []
        for i, rows in reversed(list(enumerate(self.rows))):
            own = oracle.expert_layer_transpose(
                self.of_layer(a, i, xs[i]), rows, activation, g, p.weigh_input
            )
            g = g + own["x"] if p.depth else own["x"]
            own["topk_weights"] = own["weights"]
            layers.append(own)
        found = {n: [own[n] for own in reversed(layers)] for n in a if n != "x"}
        found = {n: np.stack(x, 1) if p.has_layers(n) else x[0] for n, x in found.items()}
        return {"x": g, **found}

    def results(self, activation, a, g, v):
        value = functools.partial(self.value, activation)
        gradient = functools.partial(self.gradient, activation, g)
        return derivatives.expected(self.p.derivative, value, gradient, a, v)

    @functools.cached_property
    def values(self):
        return self.results(ACTIVATIONS[self.p.activation][1], self.a, self.g, self.v)

    @functools.cached_property
    def slack(self):
        """Return, by name, the largest allowed difference from `values`."""
        p = self.p
        _, _, columns, reads = ACTIVATIONS[p.activation]
        majorant = MAJORANT[reads or ("plain" if columns == 1 else "gated")]
        a, v = ({n: np.abs(x) for n, x in d.items()} for d in (self.a, self.v))
        g = None if self.g is None else np.abs(self.g)
        largest = self.results(majorant, a, g, v)
        slack = {}
        for name, x in largest.items():
            dtype = self.dtypes[name.partition(".")[2] or "y"]
            epsilon = max(map(oracle.epsilon, (p.dtype, dtype, self.dtype_of_weights)))
            smallest = max(float(ml_dtypes.finfo(t).smallest_subnormal) for t in (p.dtype, dtype))
            slack[name] = MOST_ROUNDINGS * (epsilon * x + smallest)
        if p.wire:
            travels = ("y", "t") if p.derivative in (None, "jvp") else ("y", "t", "d.x", "dd.x")
            for name in travels:
                if name in slack:
                    slack[name] = slack[name] + self.of_wire(largest[name])
            if p.depth:
                wire = 4 * oracle.epsilon(cases.dtype(p.wire))
                slack = {n: x + wire * largest[n] for n, x in slack.items()}
        return slack

    @property
    def dtype_of_weights(self):
        return "float64" if self.p.topk_weights in ("float64", None) else "float32"

    def of_wire(self, largest):
        """Return the largest rounding error of partial sums in the wire dtype."""
        wire = self.p.wire
        if wire in draw.FORMATS:  # rounding depends on the largest number of the group
            share = 0.5 if wire == "nv" else 0.1
            return share * np.max(largest, axis=-1, keepdims=True, initial=0)
        wire = cases.dtype(wire)
        smallest = float(ml_dtypes.finfo(wire).smallest_subnormal)
        return 2 * oracle.epsilon(wire) * largest + self.p.ranks * smallest


def run(program, given, fn):
    p = program
    found = fn(given.floats, given.others, given.directions)
    all_expected = [Expected(p, given, b) for b in range(max(1, p.batch))]
    with np.errstate(all="ignore"):
        for name in derivatives.results_of(p.derivative, p.floats):
            values = [e.values[name] for e in all_expected]
            slacks = [e.slack[name] for e in all_expected]
            dtype = all_expected[0].dtypes[name.partition(".")[2] or "y"]
            if is_summed_result(p, name):
                slack = 2 * sum(slacks)
                unjudged = may_be_infinite(slack, p.dtype, p.wire)
                check_close(found[name], sum(values), slack, dtype, unjudged, name)
                continue
            for b, (value, slack) in enumerate(zip(values, slacks)):
                own = found[name][:, b] if p.batch else found[name]
                which = f"element {b} of the batch, " * bool(p.batch)
                unjudged = may_be_infinite(slack, p.dtype, p.wire)
                check_close(own, value, slack, dtype, unjudged, which + name)
    if p.has_load:
        for b, expected in enumerate(all_expected):
            own = jax.tree.map(lambda x: x[:, b] if p.batch else x, found["load"])
            check.check_load(own, expected.routings[0])


def may_be_infinite(slack, dtype, wire=None):
    """Return True for numbers that cannot be compared, because a term may be infinite."""
    largest = lambda dtype: oracle.epsilon(dtype) * float(ml_dtypes.finfo(dtype).max)
    found = slack > MOST_ROUNDINGS * largest(cases.dtype(dtype))
    if wire in draw.FORMAT_DTYPES:
        found = found | (slack > 2 * largest(cases.dtype(wire)))
    return found


def check_close(actual, expected, slack, dtype, unjudged, what):
    assert actual.dtype == dtype, f"{what}: {actual.dtype}, expected {dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, expected {expected.shape}"
    judged = np.where(unjudged, expected, actual.astype(np.float64))
    harness.assert_sums_agree(judged, expected, slack + 1e-30, what)
