"""List the settings that are measured as work grows: ``python -m benchmarks --sweep NAME,...``.

Each sweep varies one thing. It times ours, and plain JAX for a few numbers of tokens, with fewer
samples and shorter programs than the standard settings, so that it takes some 15 seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from .operations import (
    BACKWARD,
    COMBINE,
    DISPATCH,
    EXCHANGE,
    FORMAT_TOLERANCE,
    ROUND_TRIP,
    ROUTE,
    TOLERANCE,
    Op,
)
from .suite import Plan
from .workload import FULL, TINY, Setting, Workload, draw

SIZES: dict[str, tuple[Any, ...]] = dict(
    tokens=(1, 8, 128, 512, 1024, 2048, 4096, 8192, 16384),
    experts=(64, 128, 256, 512),
    hidden=(1024, 2048, 4096, 7168, 16384),
    topk=(1, 2, 4, 8, 16),
    skew=(1, 2, 4),
    capacity=("tight", "worst"),
    payload=("bfloat16", "float32", "uint8"),
    sms=(16, 24, 32, 48, 64, 96, 132),
    formats=("", *FORMAT_TOLERANCE),
    modes=("", "shared", "replicated", "map"),
)
CPU_SIZES = 3
QUICK_SIZES = 2
TOKENS = 4096
PLAIN_TOKENS = (128, 4096)
MANY_AND_FEW = (4096, 128)
PLAIN = ("ours", "all_gather", "dense")

FORWARD = (DISPATCH, EXCHANGE, COMBINE)
BOTH_WAYS = (*FORWARD, ROUND_TRIP, BACKWARD)
WITHOUT_MODE = dict(replicated="local")  # what one writes instead


def plans(name: str, ranks: int, on_gpu: bool, quick: bool = False) -> list[Plan]:
    """Return the plans of a sweep: its first sizes if quick, and small ones without a GPU."""
    sizes = SIZES[name][: QUICK_SIZES if quick else None if on_gpu else CPU_SIZES]
    if name == "skew":  # more than all rows no rank gets
        sizes = tuple(skew for skew in sizes if skew <= ranks)
    base = Setting(TOKENS, **FULL) if on_gpu else Setting(16, **TINY)
    make = _MAKERS[name]
    return [
        dataclasses.replace(plan, sweep=name, program_us=2500.0, most_reps=32)
        for plan in make(base, sizes, lambda setting: draw(setting, ranks))
    ]


Draw = Callable[[Setting], Workload]


def _varying(field: str, ops: tuple[Op, ...]) -> Callable[..., Iterable[Plan]]:
    """Return a sweep over one field of a setting."""

    def make(base: Setting, sizes: tuple[Any, ...], draw_one: Draw) -> Iterable[Plan]:
        for size in sizes:
            yield Plan(draw_one(dataclasses.replace(base, **{field: size})), ops=ops)

    return make


def _tokens(base: Setting, sizes: tuple[int, ...], draw_one: Draw) -> Iterable[Plan]:
    for tokens in sizes:
        yield Plan(
            draw_one(dataclasses.replace(base, tokens=tokens)),
            methods=PLAIN if tokens in PLAIN_TOKENS else ("ours",),
            ops=(ROUTE, *BOTH_WAYS),
            plain_ops=(ROUND_TRIP, BACKWARD),
        )


def _payload(base: Setting, sizes: tuple[str, ...], draw_one: Draw) -> Iterable[Plan]:
    for dtype in sizes:
        is_summed = dtype != "uint8"  # bytes are moved only, and have nothing to check sums by
        yield Plan(
            draw_one(dataclasses.replace(base, dtype=dtype)),
            ops=(*FORWARD, ROUND_TRIP) if is_summed else (DISPATCH, EXCHANGE),
            reference="" if is_summed else "all_gather",
        )


def _sms(base: Setting, sizes: tuple[int, ...], draw_one: Draw) -> Iterable[Plan]:
    for tokens in _many_and_few(base):
        yield Plan(
            draw_one(dataclasses.replace(base, tokens=tokens)),
            ops=(EXCHANGE, COMBINE, ROUND_TRIP) if tokens == base.tokens else (EXCHANGE, COMBINE),
            options=tuple(dict(num_sms=num_sms) for num_sms in sizes),
        )


def _formats(base: Setting, sizes: tuple[str, ...], draw_one: Draw) -> Iterable[Plan]:
    """Plan tokens in each format, by what arrives, and sums in it."""
    for tokens in _many_and_few(base):
        bare = dataclasses.replace(base, tokens=tokens, hidden=max(base.hidden, 128))
        for name in sizes:
            for formatted in ("rows", "decoded", "sums") if name else ("",):
                setting = dataclasses.replace(bare, format=name, formatted=formatted)
                yield Plan(
                    draw_one(setting),
                    ops={"": FORWARD, "sums": (COMBINE,)}.get(formatted, (DISPATCH, EXCHANGE)),
                    reference="encoded" if formatted in ("rows", "decoded") else "",
                    tolerance=FORMAT_TOLERANCE.get(name, TOLERANCE),
                )


def _modes(base: Setting, sizes: tuple[str, ...], draw_one: Draw) -> Iterable[Plan]:
    ops = (DISPATCH, COMBINE, ROUND_TRIP, BACKWARD)
    for tokens in _many_and_few(base):
        for mode in sizes:
            setting = dataclasses.replace(base, tokens=tokens, mode=mode)
            methods = ("ours", WITHOUT_MODE.get(mode, ""))
            yield Plan(draw_one(setting), methods=methods, ops=ops, plain_ops=ops)


def _many_and_few(base: Setting) -> tuple[int, ...]:
    """Return two numbers of tokens on a GPU."""
    return MANY_AND_FEW if base.tokens == TOKENS else (base.tokens,)


_MAKERS: dict[str, Callable[..., Iterable[Plan]]] = dict(
    tokens=_tokens,
    experts=_varying("experts", FORWARD),
    hidden=_varying("hidden", FORWARD),
    topk=_varying("top_k", FORWARD),
    skew=_varying("skew", (*FORWARD, ROUND_TRIP)),
    capacity=_varying("capacity", BOTH_WAYS),
    payload=_payload,
    sms=_sms,
    formats=_formats,
    modes=_modes,
)
