"""Make a random routing, and count the bytes that it moves, before JAX reserves the memory of the
GPUs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import jax_moe_a2a as ma

DTYPE = "bfloat16"
ITEM_BYTES = 2
# (elements of a group, bytes of a group with its scale).
FORMAT_GROUPS = {"BlockwiseFp8": (128, 132), "MxFp8": (32, 33), "NvFp4": (16, 9)}
CAPACITY_MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class Setting:
    """``tokens`` is per rank."""

    tokens: int
    hidden: int
    top_k: int
    experts: int
    capacity: str = "tight"
    """``"tight"`` (the fullest rank's rows, rounded up), ``"worst"`` (any routing), or a factor as
    text."""
    format: str = ""
    formatted: str = ""
    """``"rows"``: received rows stay quantized. ``"decoded"``: rows are decoded. ``"sums"``: only
    combine's partial sums are quantized."""
    sigma: float = 0
    """The standard deviation of log-odds. On 32 ranks, 0.5, 1.1 and 1.7 give the loads of
    DeepSeek-R1's best, mean and worst layer."""

    @property
    def routing(self) -> str:
        return "popular" if self.sigma else "uniform"

    @property
    def wire_row_bytes(self) -> int:
        """Return the bytes that a token or a partial sum has on a link."""
        if not self.format:
            return self.hidden * ITEM_BYTES
        numbers, num_bytes = FORMAT_GROUPS[self.format]
        return self.hidden // numbers * num_bytes

    def __str__(self) -> str:
        text = f"{self.tokens} tokens x {self.hidden}, top-{self.top_k} of {self.experts}"
        text += f", sigma {self.sigma:g}" if self.sigma else ", uniform"
        if self.capacity != "tight":
            text += f", {self.capacity} capacity"
        return ", ".join(filter(None, (text, self.format, self.formatted)))


FULL: dict[str, Any] = dict(hidden=7168, top_k=8, experts=256)
GPU_SETTINGS = (
    *(Setting(tokens, **FULL) for tokens in (4096, 128, 8, 1, 1024, 8192)),
    Setting(1024, hidden=2048, top_k=4, experts=32),
    Setting(4096, **FULL, sigma=1.1),
)
TINY: dict[str, Any] = dict(hidden=64, top_k=4, experts=32)
CPU_SETTINGS = (Setting(16, **TINY), Setting(16, **TINY, sigma=1.1))


# (the setting of a rank, the intermediate size).
LAYERS = {
    "A": (Setting(4096, hidden=4096, top_k=8, experts=64), 1536),
    "B": (Setting(4096, hidden=7168, top_k=8, experts=64), 2048),
    "qwen3-30b": (Setting(8192, hidden=2048, top_k=8, experts=128), 768),
    "deepseek-v3": (Setting(4096, hidden=7168, top_k=8, experts=256), 2048),
    "7168-3072-384": (Setting(4096, hidden=7168, top_k=6, experts=384), 3072),
    "4096-2048-256": (Setting(4096, hidden=4096, top_k=6, experts=256), 2048),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A routing of R ranks. A token is sent once to each other rank with one of its experts."""

    setting: Setting
    ids: np.ndarray
    """[R, tokens, top_k] int32, distinct for a token."""
    weights: np.ndarray
    """[R, tokens, top_k] float32, with sum 1."""
    capacity: int
    """Rows of a rank."""
    pair_capacity: int
    """Rows from rank to rank in a dense all_to_all."""
    leaving_bytes: int
    """The bytes that the busiest sender of a dispatch sends."""
    entering_bytes: int
    """The bytes of the busiest receiver of a dispatch, or of the busiest sender of a combine."""
    fan_out: float
    """The mean number of ranks that have experts of a token."""
    load: float
    """The fullest rank's rows, divided by the mean."""
    dropped: float

    @property
    def ranks(self) -> int:
        return self.ids.shape[0]

    @property
    def busiest_bytes(self) -> int:
        return max(self.leaving_bytes, self.entering_bytes)


def draw(setting: Setting, ranks: int) -> Workload:
    sizes = setting.tokens, setting.hidden, setting.top_k, setting.experts
    ids = _draw_ids(setting, ranks, np.random.default_rng([0, ranks, *sizes]))
    rng = np.random.default_rng([0, ranks, *sizes, 1])
    weights = np.exp(rng.standard_normal(ids.shape))
    weights = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)
    goes_to = (ids // (setting.experts // ranks))[..., None] == np.arange(ranks)  # [R, T, K, R]
    rows = int(goes_to.sum(axis=(0, 1, 2)).max())
    if setting.capacity != "tight":
        factor = ranks if setting.capacity == "worst" else float(setting.capacity)
        rows = ma.Exchange(capacity_factor=factor).rows_per_rank(
            num_tokens=setting.tokens,
            top_k=setting.top_k,
            num_experts=setting.experts,
            group_size=ranks,
        )
    capacity = round_up(rows, CAPACITY_MULTIPLE) if setting.capacity == "tight" else rows
    traffic = _traffic(setting, goes_to, capacity)
    return Workload(setting, ids, weights, capacity, **traffic)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _draw_ids(setting: Setting, ranks: int, rng: np.random.Generator) -> np.ndarray:
    shape = (ranks, setting.tokens, setting.top_k)
    if setting.experts % ranks or setting.top_k > setting.experts:
        raise ValueError(
            "experts must be a multiple of the number of ranks, and at least top_k; "
            f"got {setting} on {ranks} ranks"
        )
    popularity = rng.normal(0, setting.sigma, setting.experts) if setting.sigma else None
    return _distinct(rng, shape, setting.experts, popularity)


def _traffic(setting: Setting, goes_to: np.ndarray, capacity: int) -> dict[str, Any]:
    wire_row_bytes, ranks = setting.wire_row_bytes, len(goes_to)
    pairs = goes_to.sum(axis=(1, 2))  # [from, to]
    slots = goes_to.any(axis=2).sum(axis=1)
    own = np.diag(slots)
    leaving, entering = slots.sum(axis=1) - own, slots.sum(axis=0) - own
    rows = pairs.sum(axis=0)
    most = lambda counts: int(np.max(counts))
    return dict(
        pair_capacity=round_up(most(pairs), 8),
        leaving_bytes=most(leaving) * wire_row_bytes,
        entering_bytes=most(entering) * wire_row_bytes,
        fan_out=float(slots.sum() / (ranks * setting.tokens)),
        load=float(rows.max() / rows.sum() * ranks),
        dropped=float((rows - capacity).clip(0).sum() / rows.sum()),
    )


def _distinct(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    num_experts: int,
    popularity: np.ndarray | None = None,
) -> np.ndarray:
    """Return distinct random experts for every token, int32, in random order."""
    *lead, top_k = shape
    if popularity is None:
        keys = rng.random((*lead, num_experts), np.float32)
    else:  # samples without replacement
        keys = -(popularity + rng.gumbel(size=(*lead, num_experts)))
    least = keys.argpartition(top_k - 1, axis=-1)[..., :top_k]
    if popularity is not None:
        return rng.permuted(least, axis=-1).astype(np.int32)
    order = np.take_along_axis(keys, least, axis=-1).argsort(axis=-1)
    return np.take_along_axis(least, order, axis=-1).astype(np.int32)
