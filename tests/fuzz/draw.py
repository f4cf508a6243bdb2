"""Make random programs of exchanges, and random arrays for their runs.

A `Program` depends only on the seed and the number, so a failure can be repeated alone.
"""

import dataclasses

import cases
import harness
import ml_dtypes
import numpy as np
import oracle

import jax_moe_a2a as ma

from . import places

FORMATS = {
    "blockwise": ma.BlockwiseFp8(),
    "mx": ma.MxFp8(),
    "nv": ma.NvFp4(global_scale=0.0037187),
}
FORMAT_DTYPES = ("bfloat16", "float16", "float32")
WIRE_DTYPES = (*FORMAT_DTYPES, "float8_e4m3fn", "float8_e5m2")
ID_DTYPES = ("int8", "int16", "int32", "int32", "int32", "uint8", "uint16", "uint32")
TRACED_SCALE = 0.37


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The dtype and the trailing shape (without the first axis) of an array of tokens or rows."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_differentiated(self):
        dtype = cases.dtype(self.dtype)
        is_inexact = dtype.kind in "fc" or self.dtype == "bfloat16"
        return is_inexact and dtype.itemsize > 1


@dataclasses.dataclass(frozen=True)
class Sizes:
    ranks: int
    tokens: int
    top_k: int
    local_experts: int
    capacity: int | None
    capacity_factor: float | None
    alignment: int
    replicated: bool

    @property
    def num_experts(self):
        return self.ranks * self.local_experts

    @property
    def rows(self):
        if self.capacity is not None:
            return self.capacity
        numbers = self.ranks, self.tokens, self.top_k, self.local_experts, self.alignment
        if self.capacity_factor is not None:
            return oracle.capacity_of_factor(self.capacity_factor, *numbers, self.replicated)
        return oracle.mode_capacity(*numbers, self.replicated)

    @property
    def is_empty(self):
        return 0 in (self.tokens, self.top_k, self.rows)


@dataclasses.dataclass(frozen=True)
class Routed(Sizes):
    place: places.Place
    x64: bool
    ids_dtype: str
    topk_weights: str | None
    format: str | None
    has_traced_scale: bool
    is_routed_first: bool
    has_load: bool
    batched: tuple[str, ...]  # inputs that differ between elements of the batch
    derivative: str | None

    @property
    def batch(self):
        return self.place.batch

    @property
    def router_weights(self):
        return ["topk_weights"] * (self.topk_weights is not None)

    def format_with(self, scale):
        """Return the token format or None, with `scale` in place of a traced global scale."""
        return ma.NvFp4(global_scale=scale) if self.has_traced_scale else FORMATS.get(self.format)


@dataclasses.dataclass(frozen=True)
class Program(Routed):
    x: tuple[Leaf, ...]
    decode: bool
    is_split: bool
    y: tuple[Leaf, ...]
    y_weights: str | None  # "recv", "own", or None
    weights_are_powers: bool  # weights are powers of two, so that no product is rounded
    dispatch_wire: str | None
    combine_wire: str | None
    tail: str  # "zero" or "unspecified"
    has_token_scales: bool
    has_addends: bool

    @property
    def addends(self):
        adds = self.has_addends and not self.is_split and not self.replicated
        return [f"add{i}" for i in range(len(self.y) * adds)]

    @property
    def hosts(self):
        return self.place.hosts

    @property
    def is_weighted(self):
        return self.y_weights == "own" or (
            self.y_weights == "recv" and self.topk_weights is not None
        )

    @property
    def differentiated(self):
        names = [f"x{i}" for i, leaf in enumerate(self.x) if leaf.is_differentiated]
        names += self.router_weights
        names += [f"y{i}" for i in range(len(self.y))] + self.addends
        return names + ["y_weights"] * (self.y_weights == "own")


def generator(*numbers):
    return np.random.default_rng(numbers)


def one_of(rng, values):
    return values[rng.integers(len(values))]


def some_of(rng, values):
    return tuple(value for value in values if rng.random() < 0.5)


def program(seed, number, *, has_mesh=True):
    """Make a program. If `has_mesh` is False, its ranks are elements of a vmap."""
    rng = generator(seed, number)
    chance = lambda p: bool(rng.random() < p)
    numbers = drawn_sizes(rng)
    ranks = numbers["ranks"]
    hosts = one_of(rng, [h for h in (1, 2, 3, 4) if ranks % h == 0]) if chance(0.15) else 0
    x64 = chance(0.12)

    float_dtypes = (*FORMAT_DTYPES, *(["float64"] * 3 * x64))
    fmt = one_of(rng, tuple(FORMATS)) if chance(0.25) else None
    decode = fmt is not None and chance(0.6)
    # Rows of x must consist of whole groups of the token format and of the gradients' wire format.
    dispatch_wire = wire(rng, fmt)
    group = group_size_of(fmt, dispatch_wire)
    if group:
        shapes = [*some_of(rng, (2,)), group * int(rng.integers(1, 4))]
        leaves = [Leaf(one_of(rng, FORMAT_DTYPES), tuple(shapes)) for _ in range(1 + chance(0.3))]
    else:
        moved = cases.MOVED_DTYPES + (cases.WIDE_DTYPES * 4 if x64 else ())
        kinds = [one_of(rng, (moved, moved, float_dtypes)) for _ in range(rng.integers(1, 5))]
        leaves = [Leaf(one_of(rng, dtypes), trailing(rng)) for dtypes in kinds]

    topk_weights = one_of(rng, float_dtypes) if chance(0.8) else None
    y_weights = one_of(rng, ("recv", "recv", "recv", "own", None))
    is_weighted = y_weights == "own" or (y_weights == "recv" and topk_weights is not None)
    combine_wire = wire(rng)
    num_sums = 1 if is_weighted else int(rng.integers(1, 4))
    if combine_wire in FORMATS:
        width = FORMATS[combine_wire].group_size * int(rng.integers(1, 3))
        sums = [Leaf(one_of(rng, FORMAT_DTYPES), (width,)) for _ in range(num_sums)]
    else:
        sums = [Leaf(one_of(rng, float_dtypes), trailing(rng)) for _ in range(num_sums)]

    if hosts:  # two levels refuse a wire dtype with more bits than the sums
        dispatch_wire = None if is_wider(dispatch_wire, leaves) else dispatch_wire
        combine_wire = None if is_wider(combine_wire, sums) else combine_wire

    batch = one_of(rng, (1, 2, 3)) if chance(0.25) else 0
    kind = one_of(rng, ("vmap", "vmap", "vmap", "auto", "explicit"))
    scale_of = one_of(rng, ("format", "tensor", "token", "token")) if fmt == "nv" else "format"
    is_empty = Sizes(**numbers).is_empty or any(0 in leaf.shape for leaf in (*leaves, *sums))
    if is_empty or not has_mesh:
        # In jax 0.12.0.1, gradients of empty arrays in shard_map may fail to compile.
        kind = "vmap"
    has_domains = batch > 0 and kind != "vmap" and batch * ranks <= harness.NUM_DEVICES
    inputs_of = ("ids", "x", "weights", "y")
    batched = inputs_of if has_domains else some_of(rng, inputs_of) if batch else ()
    found = Program(
        **numbers,
        place=places.Place(kind, ranks, hosts, batch, has_domains),
        x64=x64,
        ids_dtype=one_of(rng, ID_DTYPES + (("int64", "uint64") * 3 if x64 else ())),
        x=tuple(leaves),
        topk_weights=topk_weights,
        format=fmt,
        decode=decode,
        has_traced_scale=scale_of == "tensor",
        is_routed_first=chance(0.4),
        is_split=chance(0.25) and not numbers["replicated"],
        has_load=chance(0.2),
        y=tuple(sums),
        y_weights=y_weights,
        # Sums of rounded products could round to a neighbouring value of an 8-bit wire dtype.
        weights_are_powers=combine_wire in (*FORMATS, "float8_e4m3fn", "float8_e5m2")
        or chance(0.5),
        dispatch_wire=dispatch_wire,
        combine_wire=combine_wire,
        batched=batched,
        derivative=one_of(rng, (None, "jvp", "vjp", "vjp")),
        tail=one_of(rng, ("zero", "unspecified")),
        has_token_scales=scale_of == "token",
        has_addends=chance(0.4),
    )
    # A split combine has no weights.
    return dataclasses.replace(found, y_weights=None) if found.is_split else found


def drawn_sizes(rng, most_tokens=13):
    chance = lambda p: bool(rng.random() < p)
    ranks = int(rng.integers(1, 9))
    tokens, top_k, local_experts = drawn_tokens(rng, ranks)
    tokens = min(tokens, most_tokens)
    replicated = chance(0.15)
    alignment = one_of(rng, (1, 1, 1, 2, 3, 4, 8, 16))
    capacity, factor, limited_by = None, None, rng.random()
    if limited_by < 0.4:
        worst = oracle.mode_capacity(ranks, tokens, top_k, local_experts, alignment, replicated)
        capacity = one_of(
            rng, (0, 1, 2, worst + 3, *(int(n) for n in rng.integers(0, worst + 1, 9)))
        )
    elif limited_by < 0.65:
        factor = one_of(rng, (0.1, 0.5, 0.75, 1, 1.0, 1.1, 1.25, 1.3, 1.5, 2.0, 3, 8.0))
    return dict(
        ranks=ranks,
        tokens=tokens,
        top_k=top_k,
        local_experts=local_experts,
        capacity=capacity,
        capacity_factor=factor,
        alignment=alignment,
        replicated=replicated,
    )


def drawn_tokens(rng, ranks):
    """Return small (tokens, top_k, local_experts), because the oracle has loops."""
    if ranks <= 3 and rng.random() < 0.04:  # more tokens than one launch can route and dispatch
        return 257, int(rng.integers(1, 3)), 2
    tokens = one_of(rng, (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 13))
    local_experts = int(rng.integers(1, 6))
    if rng.random() < 0.05:
        return min(tokens, 3), one_of(rng, (0, 31, 32)), local_experts
    return tokens, one_of(rng, (1, 1, 2, 2, 3, 4, 5, 8)), local_experts


def wire(rng, fmt=None):
    if fmt is not None:
        return one_of(rng, (None, *FORMAT_DTYPES, fmt))
    if rng.random() < 0.6:
        return None
    return one_of(rng, (*WIRE_DTYPES, *FORMATS))


def group_size_of(*names):
    """Return the largest group size of the named formats."""
    return max([FORMATS[name].group_size for name in names if name in FORMATS], default=0)


def is_wider(wire, leaves):
    if wire not in WIRE_DTYPES:
        return False
    summed = [cases.dtype(leaf.dtype) for leaf in leaves if leaf.is_differentiated]
    return any(cases.dtype(wire).itemsize > dtype.itemsize for dtype in summed)


def trailing(rng):
    width = one_of(rng, (1, 2, 3, 5, 7, 8, 17, 33))
    return one_of(rng, ((), (width,), (width,), (width,), (2, width), (0,)))


# The functions below make arrays of all ranks: [R, ...], or [R, B, ...] with a batch.


def anything(rng, ranks, layout):
    experts = layout.num_experts(ranks)
    wild = (-1, -1, -1, experts, -2, cases.INT32.max, cases.INT32.min)
    size = rng.integers(1, experts + 4)
    pool = [one_of(rng, wild) if rng.random() < 0.3 else rng.integers(experts) for _ in range(size)]
    return rng.choice(np.array(pool, np.int64), cases.shape(ranks, layout))


ROUTINGS = {**cases.ROUTINGS, "anything": anything}
NAMES = (*cases.ROUTINGS, *(["anything"] * 8), *(["masked", "repeated"] * 2))


def ids_of(rng, program):
    """Return (random ids [R, T, K], name of their distribution)."""
    layout = cases.Layout("drawn", program.tokens, program.top_k, program.local_experts)
    name = one_of(rng, NAMES) if program.tokens and program.top_k else "all_masked"
    ids = np.asarray(ROUTINGS[name](rng, program.ranks, layout), np.int64)
    limits = np.iinfo(program.ids_dtype)
    # The dtype's largest number, which is an invalid id, replaces ids that the dtype cannot hold.
    fits = np.array([limits.min <= int(i) <= limits.max for i in ids.flat], bool)
    ids = np.where(fits.reshape(ids.shape), ids, 0).astype(program.ids_dtype)
    ids[~fits.reshape(ids.shape)] = limits.max
    if program.replicated:
        ids = np.broadcast_to(ids[:1], ids.shape).copy()
    return ids, name


def routings_of(program, ids):
    p = program
    return oracle.route_mode(ids, p.local_experts, p.rows, p.alignment, p.replicated)


def has_row(program, routings):
    """Return a bool for each choice [R, T, K' >= K]: True if the choice has a row."""
    kept = np.concatenate([r.choice_row for r in routings]) >= 0
    if program.replicated:
        kept = np.broadcast_to(kept.any(axis=0), kept.shape)
    return kept


def routed_by(program, group):
    p = program
    return dict(
        group=group,
        num_experts=p.num_experts,
        exchange=ma.Exchange(
            capacity=p.capacity,
            capacity_factor=p.capacity_factor,
            alignment=p.alignment,
            replicated=p.replicated,
        ),
    )


def axis_of(name):
    if name == "ids":
        return "ids"
    if name in ("topk_weights", "y_weights", "scales"):
        return "weights"
    name = name.rstrip("0123456789")
    return "x" if name == "add" else name  # an addend is batched if x is


@dataclasses.dataclass(frozen=True)
class Inputs:
    args: dict[str, np.ndarray]  # the inputs by name; a batch is axis 1
    directions: dict[str, np.ndarray]  # tangents of inputs, or cotangents of outputs
    routings: list[list[oracle.Routing]]  # [element][domain]
    names: list[str]


def inputs(program, seed, number, run):
    """Make random arrays, with NaN where no program may read."""
    rng = generator(seed, number, run, 1)
    p, elements = program, max(1, program.batch)
    all_ids, names = [], []
    for _ in range(elements if "ids" in p.batched else 1):
        ids, name = ids_of(rng, p)
        all_ids.append(ids)
        names.append(name)
    own = [routings_of(p, ids) for ids in all_ids]
    routings = own if len(own) == elements else own * elements

    def drawn(name, shape, draw, is_same_on_ranks):
        """Make arrays [R, *shape]: one for each element if the input is batched, otherwise one."""
        count = elements if axis_of(name) in p.batched else 1
        arrays = [draw((p.ranks, *shape)) for _ in range(count)]
        if is_same_on_ranks:
            arrays = [np.broadcast_to(a[:1], a.shape).copy() for a in arrays]
        return arrays

    def poisoned(name, arrays, is_read):
        masks = [is_read(each) for each in routings]
        for i, array in enumerate(arrays):
            mask = masks[i] if len(arrays) == len(masks) else np.any(masks, axis=0)
            array[~mask] = np.nan
        return arrays

    def is_row(routings):
        return np.concatenate([r.row_token for r in routings]) >= 0

    def is_choice(routings):
        return has_row(p, routings)[:, :, : p.top_k]

    def normal(dtype):
        return lambda shape: cases.normal(rng, shape, dtype)

    def weights(dtype):
        if not p.weights_are_powers:
            return normal(dtype)
        return lambda shape: (
            rng.choice([-1, 1], shape) * 2.0 ** rng.integers(-2, 2, shape)
        ).astype(cases.dtype(dtype))

    found = {"ids": all_ids}
    for i, leaf in enumerate(p.x):
        found[f"x{i}"] = drawn(f"x{i}", (p.tokens, *leaf.shape), tokens(rng, p, leaf), p.replicated)
    if p.has_token_scales:
        found["scales"] = drawn(
            "scales", (p.tokens,), lambda shape: scales(rng, shape), p.replicated
        )
    if p.topk_weights:
        shape = (p.tokens, p.top_k)
        arrays = drawn("topk_weights", shape, weights(p.topk_weights), p.replicated)
        found["topk_weights"] = poisoned("topk_weights", arrays, is_choice)
    for i, leaf in enumerate(p.y):
        arrays = drawn(f"y{i}", (p.rows, *leaf.shape), normal(leaf.dtype), False)
        found[f"y{i}"] = poisoned(f"y{i}", arrays, is_row)
    for name, leaf in zip(p.addends, p.y, strict=False):
        found[name] = drawn(name, (p.tokens, *leaf.shape), normal(leaf.dtype), False)
    if p.y_weights == "own":
        arrays = drawn("y_weights", (p.rows,), weights("float32"), False)
        found["y_weights"] = poisoned("y_weights", arrays, is_row)

    directions = {}
    if p.derivative == "jvp":
        for name in p.differentiated:
            like = found[name][0]
            draw = weights if "weights" in name else normal
            arrays = drawn(name, like.shape[1:], draw(like.dtype.name), p.replicated)
            if name[0] == "y":
                poisoned(name, arrays, is_row)
            directions[name] = arrays
    elif p.derivative == "vjp":
        for name, shape, dtype in outputs_of(p):
            arrays = [normal(dtype)((p.ranks, *shape)) for _ in range(elements)]
            if not name.startswith("sum"):
                poisoned(name, arrays, is_row)
            directions[name] = arrays

    def joined(arrays, is_batched):
        return np.stack(arrays, axis=1) if is_batched else arrays[0]

    args = {n: joined(a, axis_of(n) in p.batched) for n, a in found.items()}
    directions = {
        n: joined(a, p.batch > 0 if p.derivative == "vjp" else axis_of(n) in p.batched)
        for n, a in directions.items()
    }
    return Inputs(args, directions, routings, names)


def tokens(rng, program, leaf):
    """Return a function that maps a shape to random tokens (without a format: random bits)."""

    def for_a_format(shape):
        x = rng.standard_normal(shape) * 10.0 ** rng.uniform(
            -3, 3, (*shape[:2], *[1] * len(leaf.shape))
        )
        special = [0.0, -0.0, np.inf, np.nan, 1e-39, float(ml_dtypes.finfo(leaf.dtype).max)]
        x = np.where(rng.random(shape) < 0.01, rng.choice(special, shape), x)
        with np.errstate(over="ignore"):
            return x.astype(cases.dtype(leaf.dtype))

    if program.format:
        return for_a_format
    return lambda shape: cases.any_bits(rng, shape, leaf.dtype)


def scales(rng, shape):
    """Return random global scales, of which some are invalid."""
    special = np.float32([0, -0.0, -1, np.inf, np.nan, 1e-40, 2.0**-120, 3e38])
    ordinary = (10.0 ** rng.uniform(-6, 3, shape)).astype(np.float32)
    return np.where(rng.random(shape) < 0.1, rng.choice(special, shape), ordinary)


def outputs_of(program):
    """Return (name, shape, dtype) of each result of one rank that has derivatives."""
    p = program
    found = []
    if p.format is None or p.decode:
        for i, leaf in enumerate(p.x):
            if leaf.is_differentiated:
                found.append((f"rows{i}", (p.rows, *leaf.shape), leaf.dtype))
    if p.topk_weights:
        found.append(("weights", (p.rows,), weights_dtype(p)))
    for i, leaf in enumerate(p.y):
        found.append((f"sum{i}", (p.tokens, *leaf.shape), leaf.dtype))
    return found


def weights_dtype(program):
    return "float64" if program.topk_weights == "float64" else "float32"
