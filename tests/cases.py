"""Define the layouts (static sizes) and the routings (expert ids) of the tests' exchanges."""

import dataclasses
import os
from collections.abc import Callable

import ml_dtypes
import numpy as np
import oracle

import jax_moe_a2a as ma

INT32 = np.iinfo(np.int32)
ON_GPU = os.environ.get("MOE_A2A_TEST_GPU") == "1"
RANKS_ON_ONE_GPU = int(os.environ.get("MOE_A2A_TEST_RANKS_ON_ONE_GPU", "0"))
# limits of one launch that routes and dispatches: tokens of a rank, choices of all ranks
FUSED_TOKENS, FUSED_CHOICES = 256, 16_384


@dataclasses.dataclass(frozen=True)
class Layout:
    """The static sizes of an exchange. With capacity None, no choice is ever dropped."""

    name: str
    tokens: int
    top_k: int
    local_experts: int
    capacity: int | None = None
    alignment: int = 1
    hidden: int = 7

    def num_experts(self, ranks):
        return ranks * self.local_experts

    def rows(self, ranks):
        if self.capacity is not None:
            return self.capacity
        return oracle.default_capacity(
            ranks, self.tokens, self.top_k, self.local_experts, self.alignment
        )

    def route_args(self, group):
        return dict(
            group=group,
            num_experts=self.num_experts(group.size),
            exchange=ma.Exchange(capacity=self.capacity, alignment=self.alignment),
        )

    def has_rows(self, ranks):
        return self.tokens > 0 and self.rows(ranks) > 0

    def exchanges_of_dispatch(self, ranks):
        """Return the number of launches of route and dispatch: 0 without rows, 1 if fused, or 2."""
        is_one = self.tokens <= FUSED_TOKENS and ranks * self.tokens * self.top_k <= FUSED_CHOICES
        return (1 if is_one else 2) * self.has_rows(ranks)


# Each routing is a function (random generator, ranks, layout) -> int32 ids [ranks, tokens, top_k].


def shape(ranks, layout):
    return (ranks, layout.tokens, layout.top_k)


def uniform(rng, ranks, layout):
    experts = layout.num_experts(ranks)
    if experts < layout.top_k:
        return rng.integers(0, experts, shape(ranks, layout), np.int32)
    return np.argsort(rng.random((ranks, layout.tokens, experts)))[..., : layout.top_k].astype(
        np.int32
    )


def skewed(rng, ranks, layout):
    experts = layout.num_experts(ranks)
    popularity = 1.0 / (1 + np.arange(experts)) ** 2
    return rng.choice(experts, shape(ranks, layout), p=popularity / popularity.sum()).astype(
        np.int32
    )


def first_expert_only(rng, ranks, layout):
    return np.zeros(shape(ranks, layout), np.int32)


def last_expert_only(rng, ranks, layout):
    return np.full(shape(ranks, layout), layout.num_experts(ranks) - 1, np.int32)


def last_rank_only(rng, ranks, layout):
    first = (ranks - 1) * layout.local_experts
    return rng.integers(first, layout.num_experts(ranks), shape(ranks, layout), np.int32)


def idle_rank(rng, ranks, layout):
    """Return ids of experts that are not on rank 0, or -1 if there is only one rank."""
    if ranks == 1:
        return np.full(shape(ranks, layout), -1, np.int32)
    return rng.integers(
        layout.local_experts, layout.num_experts(ranks), shape(ranks, layout), np.int32
    )


def silent_rank(rng, ranks, layout):
    ids = uniform(rng, ranks, layout)
    ids[-1] = -1
    return ids


def own_rank(rng, ranks, layout):
    first = layout.local_experts * np.arange(ranks, dtype=np.int32)[:, None, None]
    return first + rng.integers(0, layout.local_experts, shape(ranks, layout), np.int32)


def next_rank(rng, ranks, layout):
    return np.roll(own_rank(rng, ranks, layout), -1, axis=0)


def masked(rng, ranks, layout):
    ids = uniform(rng, ranks, layout)
    return np.where(rng.random(ids.shape) < 0.4, np.int32(-1), ids)


def masked_tokens(rng, ranks, layout):
    ids = uniform(rng, ranks, layout)
    return np.where(rng.random(ids.shape[:2])[..., None] < 0.5, np.int32(-1), ids)


def all_masked(rng, ranks, layout):
    return np.full(shape(ranks, layout), -1, np.int32)


def single_choice(rng, ranks, layout):
    ids = all_masked(rng, ranks, layout)
    if layout.tokens:
        ids[-1, -1, -1] = 0
    return ids


def repeated(rng, ranks, layout):
    """Return random ids of only two experts."""
    pool = rng.permutation(layout.num_experts(ranks))[:2]
    return rng.choice(pool, shape(ranks, layout)).astype(np.int32)


def one_expert_per_token(rng, ranks, layout):
    ids = rng.integers(0, layout.num_experts(ranks), (ranks, layout.tokens, 1), np.int32)
    return np.broadcast_to(ids, shape(ranks, layout)).copy()


def invalid(rng, ranks, layout):
    experts = layout.num_experts(ranks)
    wild = np.array(
        [experts, experts + 1, -2, -3, -experts, INT32.max, INT32.min, 1 << 16, -1], np.int32
    )
    ids = uniform(rng, ranks, layout)
    return np.where(rng.random(ids.shape) < 0.5, rng.choice(wild, ids.shape), ids)


def all_invalid(rng, ranks, layout):
    return np.full(shape(ranks, layout), layout.num_experts(ranks), np.int32)


ROUTINGS: dict[str, Callable] = {
    f.__name__: f
    for f in (
        uniform,
        skewed,
        first_expert_only,
        last_expert_only,
        last_rank_only,
        idle_rank,
        silent_rank,
        own_rank,
        next_rank,
        masked,
        masked_tokens,
        all_masked,
        single_choice,
        repeated,
        one_expert_per_token,
        invalid,
        all_invalid,
    )
}

PLAIN = Layout("plain", tokens=12, top_k=4, local_experts=3)
PADDED = Layout("alignment_8", tokens=12, top_k=4, local_experts=3, alignment=8)
# Rows or padding of the last group do not fit, because 19 is no multiple of 8.
CUT = Layout(
    "alignment_8_capacity_19", tokens=12, top_k=4, local_experts=3, capacity=19, alignment=8
)
TIGHT = Layout("capacity_20", tokens=12, top_k=4, local_experts=3, capacity=20)

LAYOUTS = (
    PLAIN,
    PADDED,
    CUT,
    TIGHT,
    Layout("alignment_128", tokens=6, top_k=2, local_experts=2, alignment=128, hidden=1),
    Layout("capacity_0", tokens=5, top_k=2, local_experts=2, capacity=0),
    Layout("capacity_1", tokens=5, top_k=2, local_experts=2, capacity=1, hidden=1),
    Layout("capacity_beyond_need", tokens=5, top_k=2, local_experts=2, capacity=500),
    Layout("one_token", tokens=1, top_k=3, local_experts=2, hidden=33),
    Layout("no_tokens", tokens=0, top_k=2, local_experts=2),
    Layout("no_tokens_some_rows", tokens=0, top_k=2, local_experts=2, capacity=4),
    Layout("top_1", tokens=9, top_k=1, local_experts=1, hidden=33),
    Layout("top_32", tokens=3, top_k=32, local_experts=5, hidden=1),
    Layout("many_experts", tokens=9, top_k=2, local_experts=32),
    Layout("many_tokens", tokens=150, top_k=6, local_experts=4, hidden=33),
)
# In the kernels, these layouts use many blocks and chunks.
GPU_LAYOUTS = (
    Layout("a_thousand_tokens", tokens=1024, top_k=8, local_experts=16, hidden=256),
    Layout("wide_rows", tokens=257, top_k=3, local_experts=4, alignment=128, hidden=7169),
    Layout("overflow", tokens=2048, top_k=8, local_experts=16, capacity=9001, hidden=96),
)
MOST_RANKS = 8  # the layouts above are for at most this many ranks


def for_many_ranks(layout):
    """Reduce a layout so that all ranks fit on one GPU. The worst-case capacity, whose memory grows
    with the square of the number of ranks, becomes twice the mean number of rows of a rank."""
    if RANKS_ON_ONE_GPU <= MOST_RANKS or layout.tokens * layout.top_k < 500:
        return layout
    if layout in GPU_LAYOUTS:
        tokens = layout.tokens * MOST_RANKS // RANKS_ON_ONE_GPU
        capacity = layout.capacity and layout.capacity * MOST_RANKS // RANKS_ON_ONE_GPU
        layout = dataclasses.replace(layout, tokens=tokens, capacity=capacity)
    padding = layout.local_experts * (layout.alignment - 1)
    capacity = layout.capacity or 2 * layout.tokens * layout.top_k + padding
    return dataclasses.replace(layout, capacity=capacity)


LAYOUTS, GPU_LAYOUTS = (tuple(map(for_many_ranks, each)) for each in (LAYOUTS, GPU_LAYOUTS))


@dataclasses.dataclass(frozen=True)
class Case:
    layout: Layout
    routing: str

    @property
    def name(self):
        return f"{self.layout.name}-{self.routing}"

    def ids(self, ranks, seed=0):
        rng = np.random.default_rng([seed, ranks, *self.name.encode()])
        return ROUTINGS[self.routing](rng, ranks, self.layout)


# These layouts run with all routings, and all other layouts only with `OTHER_ROUTINGS`.
FULL_CATALOGUE = (PLAIN, CUT)
OTHER_ROUTINGS = (
    "uniform",
    "skewed",
    "first_expert_only",
    "last_rank_only",
    "masked",
    "repeated",
    "invalid",
)


def cases_of(layout):
    names = tuple(ROUTINGS) if layout in FULL_CATALOGUE else OTHER_ROUTINGS
    return [Case(layout, name) for name in (names if layout.tokens else names[:1])]


def few_layouts():
    """On GPUs, return all layouts, because the kernels depend on the layout. On CPUs, return only
    the layouts that the portable path distinguishes."""
    names = "alignment_8", CUT.name, "capacity_0", "no_tokens", "top_32"
    return [layout for layout in LAYOUTS if ON_GPU or layout.name in names]


def catalogue():
    return [case for layout in LAYOUTS for case in cases_of(layout)]


def gpu_catalogue():
    names = ("uniform", "skewed", "first_expert_only", "masked")
    return [Case(layout, name) for layout in GPU_LAYOUTS for name in names]


# dtypes of a dispatch; a combine sums only `SUMMED_DTYPES`
MOVED_DTYPES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "uint8",
    "uint16",
    "uint32",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "bfloat16",
    "float16",
    "float32",
    "complex64",
)
WIDE_DTYPES = ("int64", "uint64", "float64", "complex128")  # with jax_enable_x64
SUMMED_DTYPES = ("bfloat16", "float16", "float32")


def dtype(name):
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def any_bits(rng, shape, name):
    """Return random bytes; floats include subnormals and NaNs with payloads."""
    if name == "bool":
        return rng.integers(0, 2, shape).astype(np.bool_)
    item = dtype(name).itemsize
    raw = rng.integers(0, 256, (*shape, item), np.uint8)
    return raw.view(dtype(name)).reshape(shape)


def normal(rng, shape, name):
    return rng.standard_normal(shape).astype(dtype(name))


def bits(array):
    """Return the bytes of an array, which distinguish 0 from -0 and NaNs with different bits."""
    array = np.ascontiguousarray(array)
    return array.view(np.uint8) if array.ndim else array.reshape(1).view(np.uint8)
