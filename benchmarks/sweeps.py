"""Define the sweeps. A sweep takes about 15 seconds, because it has few samples and short
programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jax_moe_a2a._src.group import native

from .operations import (
    BACKWARD,
    COMBINE,
    DISPATCH,
    EXCHANGE,
    FORMAT_TOLERANCE,
    ROUND_TRIP,
    ROUTE,
    TOLERANCE,
)
from .suite import Plan
from .workload import FULL, TINY, Setting, draw

CPU_SIZES = 3
TOKENS, FEW_TOKENS = 4096, 128
PLAIN_TOKENS = (128, 4096)
PLAIN = ("ours", "all_gather", "dense")
NUM_SMS = (16, 24, 32, 48, 64, 96)  # and all SMs of the GPU

FORWARD = (DISPATCH, EXCHANGE, COMBINE)
BOTH_WAYS = (*FORWARD, ROUND_TRIP, BACKWARD)


class Sweep(NamedTuple):
    cases: Callable[[Any], Iterable[dict[str, Any]]]
    """Maps one of the ``sizes`` to fields of a setting."""
    sizes: tuple[Any, ...]
    options: Callable[[Setting], dict[str, Any]]
    """Maps a setting to options of ``Plan``."""
    has_few: bool = False
    """True: also with ``FEW_TOKENS``."""


def by(field: str) -> Callable[[Any], Iterable[dict[str, Any]]]:
    return lambda size: [{field: size}]


def with_plain_jax(setting: Setting, ops: tuple[Any, ...], plain_ops: tuple[Any, ...]) -> Any:
    """Return options of ``Plan``. Plain JAX is timed only with ``PLAIN_TOKENS``."""
    methods = PLAIN if setting.tokens in PLAIN_TOKENS else ("ours",)
    return dict(methods=methods, ops=ops, plain_ops=plain_ops)


def formats(name: str) -> list[dict[str, Any]]:
    found = ("rows", "decoded", "sums") if name else ("",)
    return [dict(format=name, formatted=formatted) for formatted in found]


def of_format(setting: Setting) -> dict[str, Any]:
    if not setting.format:
        return dict(ops=FORWARD)
    tolerance = FORMAT_TOLERANCE.get(setting.format, TOLERANCE)
    if setting.formatted == "sums":
        return dict(ops=(COMBINE,), tolerance=tolerance)
    return dict(ops=(DISPATCH, EXCHANGE), tolerance=tolerance)


def of_budgets(setting: Setting) -> dict[str, Any]:
    round_trip = (ROUND_TRIP,) if setting.tokens != FEW_TOKENS else ()
    all_sms = getattr(native.default_gpu(), "core_count", NUM_SMS[-1])
    budgets = tuple(dict(num_sms=n) for n in NUM_SMS if n < all_sms) + (dict(num_sms=all_sms),)
    return dict(ops=(EXCHANGE, COMBINE, *round_trip), options=budgets)


SWEEPS: dict[str, Sweep] = dict(  # most informative first
    tokens=Sweep(
        by("tokens"),
        (1, 8, 128, 512, 1024, 2048, 4096, 8192, 16384),
        lambda setting: with_plain_jax(setting, (ROUTE, *BOTH_WAYS), (ROUND_TRIP, BACKWARD)),
    ),
    sms=Sweep(lambda _: [{}], ("",), of_budgets, has_few=True),
    formats=Sweep(formats, ("", *FORMAT_TOLERANCE), of_format, has_few=True),
    experts=Sweep(by("experts"), (64, 128, 256, 512), lambda setting: dict(ops=FORWARD)),
    hidden=Sweep(by("hidden"), (1024, 2048, 4096, 7168, 16384), lambda setting: dict(ops=FORWARD)),
    topk=Sweep(by("top_k"), (1, 2, 4, 8, 16), lambda setting: dict(ops=FORWARD)),
    sigma=Sweep(
        by("sigma"),
        (0.0, 0.5, 1.1, 1.7),
        lambda setting: with_plain_jax(setting, (*FORWARD, ROUND_TRIP), (ROUND_TRIP,)),
    ),
    capacity=Sweep(by("capacity"), ("tight", "worst"), lambda setting: dict(ops=BOTH_WAYS)),
)


def plans(name: str, ranks: int, on_gpu: bool) -> list[Plan]:
    """Return the plans of a sweep. Without a GPU, return a few tiny plans."""
    sweep = SWEEPS[name]
    base = Setting(TOKENS, **FULL) if on_gpu else Setting(16, **TINY)
    if name == "formats":  # groups have up to 128 elements
        base = dataclasses.replace(base, hidden=max(base.hidden, 128))
    tokens = (TOKENS, FEW_TOKENS) if on_gpu and sweep.has_few else (base.tokens,)
    sizes = sweep.sizes[: None if on_gpu else CPU_SIZES]
    found = []
    for changes in [
        dict(tokens=n) | case for n in tokens for s in sizes for case in sweep.cases(s)
    ]:
        setting = dataclasses.replace(base, **changes)
        options = dict(sweep.options(setting), sweep=name, program_us=2500.0, most_reps=32)
        found.append(Plan(draw(setting, ranks), **options))
    return found
