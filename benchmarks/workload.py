"""What is exchanged: the sizes, a routing drawn for them, and what that routing puts on the wire.

Plain numpy, for the wire is measured, for exactly these bytes, before JAX takes the GPUs.
"""

from __future__ import annotations

import dataclasses

import numpy as np

DTYPE = "bfloat16"
ITEM_BYTES = 2
CAPACITY_MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes of one exchange; ``tokens`` is per rank."""

    tokens: int
    hidden: int
    top_k: int
    experts: int
    routing: str = "uniform"
    """``"uniform"``: distinct experts, all equally likely. ``"skewed"``: see ``SKEW``."""

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens x {self.hidden}, top-{self.top_k} of {self.experts}, "
            f"{self.routing}"
        )


SKEW = 4
"""In a skewed routing, rank 0 gets this many times its share of the rows (at most all of them)."""

FULL = dict(hidden=7168, top_k=8, experts=256)
GPU_SETTINGS = (
    *(Setting(tokens, **FULL) for tokens in (4096, 128, 8, 1, 1024, 8192)),
    Setting(1024, hidden=2048, top_k=4, experts=32),
    Setting(4096, **FULL, routing="skewed"),
)
TINY = dict(hidden=64, top_k=4, experts=32)
CPU_SETTINGS = (
    Setting(16, **TINY),
    Setting(16, **TINY, routing="skewed"),
)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A setting with a routing drawn for it. R ranks."""

    setting: Setting
    ids: np.ndarray
    """[R, tokens, top_k] int32; the experts of a token are distinct."""
    weights: np.ndarray
    """[R, tokens, top_k] float32; the weights of a token sum to one."""
    capacity: int
    """Rows that the fullest rank gets, rounded up to ``CAPACITY_MULTIPLE``."""
    pair_capacity: int
    """Choices that the busiest pair of ranks exchanges: the padding of a dense all_to_all."""
    leaving_bytes: int
    """Bytes of token rows that leave the rank that sends most; a token crosses once per rank."""
    entering_bytes: int
    """Bytes of token rows that enter the rank that receives most; combine sends these."""

    @property
    def ranks(self) -> int:
        """R."""
        return self.ids.shape[0]

    @property
    def busiest_bytes(self) -> int:
        """Bytes through the busiest direction of any rank's links, whichever way."""
        return max(self.leaving_bytes, self.entering_bytes)


def draw(setting: Setting, ranks: int, seed: int = 0) -> Workload:
    """Draws a routing: another one for each rank, the same in every run."""
    rng = np.random.default_rng([seed, ranks, *dataclasses.astuple(setting)[:4]])
    shape = (ranks, setting.tokens, setting.top_k)
    local_experts = setting.experts // ranks
    if setting.experts % ranks or setting.top_k > local_experts:
        raise ValueError(
            f"experts must divide by the ranks, with top_k of them on each; got {setting} "
            f"on {ranks} ranks"
        )
    if setting.routing == "uniform":
        ids = _distinct(rng, shape, setting.experts)
    elif setting.routing == "skewed":
        hot = _distinct(rng, shape, local_experts)
        cold = hot
        if ranks > 1:
            cold = local_experts + _distinct(rng, shape, setting.experts - local_experts)
        num_hot = rng.binomial(setting.top_k, min(SKEW / ranks, 1.0), shape[:2])
        ids = np.where(np.arange(setting.top_k) < num_hot[..., None], hot, cold)
    else:
        raise ValueError(f"routing must be 'uniform' or 'skewed'; got {setting.routing!r}")
    ids = ids.astype(np.int32)
    weights = np.exp(rng.standard_normal(shape))
    weights = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)

    choice_rank = ids // local_experts
    pairs = np.stack([np.bincount(r.ravel(), minlength=ranks) for r in choice_rank])  # [from, to]
    goes_to = np.zeros((ranks, setting.tokens, ranks), bool)
    np.put_along_axis(goes_to, choice_rank, True, axis=2)
    crossing = goes_to.sum(axis=1)
    np.fill_diagonal(crossing, 0)
    row_bytes = setting.hidden * ITEM_BYTES
    return Workload(
        setting=setting,
        ids=ids,
        weights=weights,
        capacity=round_up(int(pairs.sum(axis=0).max()), CAPACITY_MULTIPLE),
        pair_capacity=round_up(int(pairs.max()), 8),
        leaving_bytes=int(crossing.sum(axis=1).max()) * row_bytes,
        entering_bytes=int(crossing.sum(axis=0).max()) * row_bytes,
    )


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below ``number``."""
    return -(-number // multiple) * multiple


def _distinct(
    rng: np.random.Generator, shape: tuple[int, int, int], num_experts: int
) -> np.ndarray:
    """Experts of every token, distinct and in random order."""
    *lead, top_k = shape
    return rng.random((*lead, num_experts), np.float32).argsort(axis=-1)[..., :top_k]
