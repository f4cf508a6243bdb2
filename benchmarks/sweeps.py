"""List the standard settings, and the sweeps, each of which varies one parameter.

Sweeps have fewer samples and shorter programs than the standard settings, about 15 seconds each.
"""

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
from .workload import FULL, SKEW, TINY, Setting, draw

CPU_SIZES = 3
QUICK_SIZES = 2
TOKENS, FEW_TOKENS = 4096, 128
PLAIN_TOKENS = (128, 4096)
PLAIN = ("ours", "all_gather", "dense")
NUM_SMS = (16, 24, 32, 48, 64, 96)  # and all SMs of the GPU

FORWARD = (DISPATCH, EXCHANGE, COMBINE)
BOTH_WAYS = (*FORWARD, ROUND_TRIP, BACKWARD)


class Sweep(NamedTuple):
    """A sweep: the parameter that varies, and what is measured."""

    cases: Callable[[Any], Iterable[dict[str, Any]]]
    """From a size to changes of the base setting."""
    sizes: tuple[Any, ...]
    options: Callable[[Setting], dict[str, Any]]
    """From a setting to the options of its plan."""
    has_few: bool = False
    """Also with few tokens."""


def by(field: str) -> Callable[[Any], Iterable[dict[str, Any]]]:
    """Return the cases of a sweep over a field of the setting."""
    return lambda size: [{field: size}]


def with_plain_jax(setting: Setting, ops: tuple[Any, ...], plain_ops: tuple[Any, ...]) -> Any:
    """Return the options of a plan, which includes plain JAX for a few numbers of tokens."""
    methods = PLAIN if setting.tokens in PLAIN_TOKENS else ("ours",)
    return dict(methods=methods, ops=ops, plain_ops=plain_ops)


def formats(name: str) -> list[dict[str, Any]]:
    """Return the cases of a format: tokens that arrive quantized or decoded, and sums."""
    found = ("rows", "decoded", "sums") if name else ("",)
    return [dict(format=name, formatted=formatted) for formatted in found]


def of_format(setting: Setting) -> dict[str, Any]:
    """Return the measurements of a sweep over formats."""
    if not setting.format:
        return dict(ops=FORWARD)
    tolerance = FORMAT_TOLERANCE.get(setting.format, TOLERANCE)
    if setting.formatted == "sums":
        return dict(ops=(COMBINE,), tolerance=tolerance)
    return dict(ops=(DISPATCH, EXCHANGE), tolerance=tolerance)


def of_budgets(setting: Setting) -> dict[str, Any]:
    """Return the measurements with each SM budget."""
    round_trip = (ROUND_TRIP,) if setting.tokens != FEW_TOKENS else ()
    all_sms = getattr(native.default_gpu(), "core_count", NUM_SMS[-1])
    budgets = tuple(dict(num_sms=n) for n in NUM_SMS if n < all_sms) + (dict(num_sms=all_sms),)
    return dict(ops=(EXCHANGE, COMBINE, *round_trip), options=budgets)


SWEEPS: dict[str, Sweep] = dict(  # the most informative sweep first
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
    skew=Sweep(  # a hot rank; experts of different popularity
        lambda change: [change],
        (
            *({}, dict(skew=2), dict(skew=SKEW)),
            *(dict(sigma=0.5), dict(sigma=1.1), dict(sigma=1.7)),
        ),
        lambda setting: with_plain_jax(setting, (*FORWARD, ROUND_TRIP), (ROUND_TRIP,)),
    ),
    capacity=Sweep(by("capacity"), ("tight", "worst"), lambda setting: dict(ops=BOTH_WAYS)),
)


def plans(name: str, ranks: int, on_gpu: bool, quick: bool = False) -> list[Plan]:
    """Return the plans of a sweep: its first sizes if quick, and small sizes without a GPU."""
    sweep = SWEEPS[name]
    base = Setting(TOKENS, **FULL) if on_gpu else Setting(16, **TINY)
    if name == "formats":  # whose groups have up to 128 numbers
        base = dataclasses.replace(base, hidden=max(base.hidden, 128))
    tokens = (TOKENS, FEW_TOKENS) if on_gpu and sweep.has_few else (base.tokens,)
    sizes = sweep.sizes[: QUICK_SIZES if quick else None if on_gpu else CPU_SIZES]
    found = []
    for changes in [
        dict(tokens=n) | case for n in tokens for s in sizes for case in sweep.cases(s)
    ]:
        setting = dataclasses.replace(base, **changes)
        if setting.skew > ranks:  # no rank can get more than all rows
            continue
        options = dict(sweep.options(setting), sweep=name, program_us=2500.0, most_reps=32)
        found.append(Plan(draw(setting, ranks), **options))
    return found
