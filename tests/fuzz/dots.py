"""Make random programs of `ma.grouped_dot` in nested vmaps, with a sine between two products."""

import dataclasses
import functools

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
from jax import lax

import jax_moe_a2a as ma

from . import derivatives, draw, layers, places

SINE = oracle.elementwise(np.sin, np.cos)
NAMES = ("rows", "w")


@dataclasses.dataclass(frozen=True)
class Program:
    """A chain of products. Axis 0 of all arrays is the ranks: devices, or elements of a vmap."""

    place: places.Place
    capacity: int
    columns: tuple[int, int]  # columns of rows and of the result; equal if depth > 1
    groups: int
    depth: int  # number of products
    is_scanned: bool
    is_checkpointed: bool
    dtype: str
    x64: bool
    sizes_dtype: str
    tail: str
    num_sms: int | None
    vmaps: tuple[int, ...]  # sizes of the axes, the outermost first
    axes: tuple[tuple[int | None, ...], ...]  # in_axes of each vmap, for (rows, w, sizes)
    derivative: str | None
    is_outside: bool

    def lead(self, name):
        at = (*NAMES, "sizes").index(name)
        return tuple(axes[at] is not None for axes in self.axes)

    def shape(self, name):
        """Return the shape of an array, without the axes of vmaps and of ranks."""
        k, n = self.columns
        return {
            "rows": (self.capacity, k),
            "w": (self.depth, self.groups, k, n),
            "sizes": (self.groups,),
            "g": (self.capacity, n),
        }[name]


def program(seed, number, *, has_mesh=True):
    rng = draw.generator(seed, number, 5)
    chance = lambda p: bool(rng.random() < p)
    one_of = functools.partial(draw.one_of, rng)
    x64 = chance(0.1)
    depth = one_of((1, 1, 1, 2, 3))
    columns = (one_of((1, 2, 3, 5, 8, 16)), one_of((1, 2, 3, 5, 8, 16)))
    if chance(0.04):
        columns = one_of(((0, 3), (3, 0)))
    if depth > 1:
        columns = columns[:1] * 2
    vmaps = tuple(one_of((1, 2, 3)) for _ in range(one_of((0, 0, 1, 1, 2, 2, 3))))
    axes = []
    for _ in vmaps:
        own = [None, None, None]
        while own == [None, None, None]:
            own = [int(rng.integers(3)), int(rng.integers(4)), int(rng.integers(2))]
            own = [axis if chance(0.5) else None for axis in own]
        axes.append(tuple(own))
    kind = one_of(("vmap", "vmap", "vmap", "auto", "explicit"))
    capacity, groups = one_of((0, 1, 2, 3, 5, 8, 9, 13)), one_of((0, 1, 1, 2, 3, 4, 6))
    if not (capacity and groups and all(columns) and has_mesh):
        kind = "vmap"  # see the comment in `draw.program`
    return Program(
        place=places.Place(kind, int(rng.integers(1, 4))),
        capacity=capacity,
        columns=columns,
        groups=groups,
        depth=depth,
        is_scanned=chance(0.5) and depth > 1,
        is_checkpointed=chance(0.25),
        dtype=one_of(
            ("float32",) * 4 + ("bfloat16", "bfloat16", "float16") + ("float64",) * 7 * x64
        ),
        x64=x64,
        sizes_dtype=one_of(("int8", "int16", "int32", "int32", "uint8", "uint32")),
        tail=one_of(("zero", "unspecified")),
        num_sms=one_of((None, None, 1, 7)),
        vmaps=vmaps,
        axes=tuple(axes),
        derivative=one_of((None, "jvp", "vjp", "vjp", *derivatives.SECOND)),
        is_outside=chance(0.5),
    )


# The package


def compiled(program):
    """Return a compiled function (floats, others, directions) -> results."""
    p = program

    def product(rows, w, sizes):
        return ma.grouped_dot(rows, w, sizes, tail=p.tail, num_sms=p.num_sms)

    if p.is_checkpointed:
        product = jax.checkpoint(product)

    def chain(floats, others):
        rows, w, sizes = floats["rows"], floats["w"], others["sizes"]
        if p.is_scanned:
            step = lambda rows, w: (jnp.sin(product(rows, w, sizes)), None)
            rows, _ = lax.scan(step, rows, w[:-1])
        else:
            for own in w[:-1]:
                rows = jnp.sin(product(rows, own, sizes))
        return product(rows, w[-1], sizes), {}

    def over_batch(fn, has_directions):
        for axes in reversed(p.axes):
            of = dict(zip((*NAMES, "sizes"), axes))
            of_floats = {name: of[name] for name in NAMES}
            in_axes = [of_floats, {"sizes": of["sizes"]}]
            if has_directions:
                names = derivatives.directions_of(p.derivative, NAMES)
                in_axes.append({name: 0 if name == "g" else of[name[2:]] for name in names})
            fn = jax.vmap(fn, in_axes=tuple(in_axes))
        return fn

    if p.is_outside:
        fn = derivatives.derived(p.derivative, over_batch(chain, False))
    else:
        fn = over_batch(derivatives.derived(p.derivative, chain), True)
    names = NAMES, ("sizes",), derivatives.directions_of(p.derivative, NAMES)
    inputs = [dict.fromkeys(own, False) for own in names]
    results = dict.fromkeys(derivatives.results_of(p.derivative, NAMES), False)
    return p.place.compiled(p.place.over_ranks(fn, inputs, results), inputs, p.x64)


# Inputs


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays by name, [R, *axes of vmaps, ...], with size 1 for vmaps that share the array."""

    arrays: dict[str, np.ndarray]
    names: list[str]


def drawn_sizes(rng, p):
    """Return (sizes of groups, name of their distribution)."""
    groups, capacity = p.groups, p.capacity
    limits = np.iinfo(p.sizes_dtype)
    name = draw.one_of(rng, ("some", "some", "some", "all", "one", "none", "cut", "wild"))
    if groups == 0 or name == "none":
        return np.zeros(groups, p.sizes_dtype), "none"
    if name == "one":
        sizes = np.zeros(groups, int)
        sizes[rng.integers(groups)] = rng.integers(capacity + 1)
    elif name == "wild":
        wild = (limits.min, limits.max, 0, 1, 2, 3, -1, capacity)
        sizes = np.array([draw.one_of(rng, wild) for _ in range(groups)], object)
    else:
        total = {"all": capacity, "cut": capacity + 5}.get(name, rng.integers(capacity + 1))
        sizes = rng.multinomial(total, rng.dirichlet(np.ones(groups)))
    return np.array([min(max(int(n), limits.min), limits.max) for n in sizes], p.sizes_dtype), name


def inputs(program, seed, number, run):
    """Make random arrays. Rows after an element's last group are not finite."""
    p, rng = program, draw.generator(seed, number, run, 6)
    ranks = p.place.ranks

    def lead(name):
        own = (True,) * len(p.vmaps) if name == "g" else p.lead(name.removeprefix("v."))
        return ranks, *(n if has else 1 for n, has in zip(p.vmaps, own, strict=True))

    lead_of_sizes = lead("sizes")
    drawn = [drawn_sizes(rng, p) for _ in range(int(np.prod(lead_of_sizes)))]
    sizes = np.array([sizes for sizes, _ in drawn], p.sizes_dtype)
    found = {"sizes": sizes.reshape(*lead_of_sizes, p.groups)}
    ends = [oracle.spans(own, p.capacity)[-1][1] if p.groups else 0 for own, _ in drawn]
    ends = np.array(ends).reshape(lead_of_sizes)
    for name in (*NAMES, *derivatives.directions_of(p.derivative, NAMES)):
        shape = p.shape(name.removeprefix("v."))
        x = rng.standard_normal((*lead(name), *shape))
        if name == "w":
            x /= max(1, p.columns[0]) ** 0.5
        if name.endswith(("rows", "g")):
            last = ends
            for axis, (n, of) in enumerate(zip(lead(name), lead_of_sizes)):
                last = last.max(axis, keepdims=True) if n == 1 and of > 1 else last
            last = np.broadcast_to(last, lead(name))
            is_tail = np.arange(p.capacity) >= last[..., None]
            x[is_tail] = draw.one_of(rng, (np.nan, np.inf, -np.inf))
        found[name] = x.astype(cases.dtype(p.dtype))
    return Inputs(found, [name for _, name in drawn])


def as_given(p, name, array):
    """Move the axes of vmaps to where the program expects them; drop axes of size 1."""
    kind = name.removeprefix("v.")
    lead = (True,) * len(p.vmaps) if kind == "g" else p.lead(kind)
    array = array.reshape(
        array.shape[0],
        *(n for n, has in zip(array.shape[1:], lead) if has),
        *array.shape[1 + len(lead) :],
    )
    if kind == "g":
        return array
    for axis, front in reversed(axes_of_vmaps(p, kind)):
        array = np.moveaxis(array, front, axis)
    return array


def canonical(p, kind, array):
    """Undo `as_given`, except for the dropped axes."""
    for axis, front in axes_of_vmaps(p, kind):
        array = np.moveaxis(array, axis, front)
    return array


def axes_of_vmaps(p, kind):
    """For each vmap that batches the array, return its axis in the program and in `Inputs`."""
    at = (*NAMES, "sizes").index(kind)
    axes = [axes[at] for axes in p.axes if axes[at] is not None]
    return [(1 + number + axis, 1 + number) for number, axis in enumerate(axes)]


# The oracle


def results(p, arrays, sizes, between):
    value = lambda a: {"y": oracle.products(a, sizes, between)}
    gradient = lambda a: oracle.products_transpose(a, sizes, between, arrays["g"])
    floats = {name: arrays[name] for name in NAMES}
    tangents = {name: arrays.get(f"v.{name}") for name in NAMES}
    return derivatives.expected(p.derivative, value, gradient, floats, tangents)


def run(program, given, fn):
    p = program
    of = {name: as_given(p, name, array) for name, array in given.arrays.items()}
    floats, others = {n: of.pop(n) for n in NAMES}, {"sizes": of.pop("sizes")}
    actual = fn(floats, others, of)
    wanted = derivatives.results_of(p.derivative, NAMES)
    lead = (p.place.ranks, *p.vmaps)
    expected, slack, in_group = {n: [] for n in wanted}, {n: [] for n in wanted}, []
    for index in np.ndindex(lead):
        own = {
            n: x[tuple(min(i, size - 1) for i, size in zip(index, x.shape))]
            for n, x in given.arrays.items()
        }
        sizes = own.pop("sizes")
        own = {n: x.astype(np.float64) for n, x in own.items()}
        end = oracle.spans(sizes, p.capacity)[-1][1] if p.groups else 0
        in_group.append(np.arange(p.capacity) < end)
        for name, array in own.items():
            if name.endswith(("rows", "g")):
                array[~in_group[-1]] = 0
        for name, value in results(p, own, sizes, SINE).items():
            expected[name].append(value)
        own = {n: np.abs(x) for n, x in own.items()}
        for name, value in results(p, own, sizes, layers.MAJORANT["plain"]).items():
            slack[name].append(value)
    in_group = np.array(in_group).reshape(*lead, p.capacity)
    with np.errstate(all="ignore"):
        for name in wanted:
            check_result(p, name, actual[name], lead, expected[name], slack[name], in_group)


def check_result(p, name, actual, lead, expected, slack, in_group):
    of_input = name.partition(".")[2]
    shape = p.shape(of_input or "g")
    expected, slack = (np.array(x).reshape(*lead, *shape) for x in (expected, slack))
    if p.is_outside and of_input:
        shared = tuple(1 + i for i, has in enumerate(p.lead(of_input)) if not has)
        expected, slack = expected.sum(shared), 2 * slack.sum(shared)
        in_group = in_group.all(shared)
        actual = canonical(p, of_input, actual)
    if of_input != "w" and p.tail == "unspecified":
        actual, expected, slack = (
            np.where(in_group[..., None], x, np.zeros_like(x)) for x in (actual, expected, slack)
        )
    smallest = float(ml_dtypes.finfo(p.dtype).smallest_subnormal)
    slack = layers.MOST_ROUNDINGS * (oracle.epsilon(p.dtype) * slack + smallest)
    unjudged = layers.may_be_infinite(slack, p.dtype)
    layers.check_close(actual, expected, slack, cases.dtype(p.dtype), unjudged, name)
