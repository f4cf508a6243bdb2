"""Lower programs for GPUs on any machine, and list the kernel calls in the programs."""

import re
from typing import NamedTuple

import jax
import pytest

from jax_moe_a2a._src.group import native

needs_kernel = pytest.mark.skipif(
    not native.has_grouped_gemm(), reason="the extension was built without the kernels of products"
)


class Call(NamedTuple):
    target: str  # without the prefix "moe_a2a_"
    attributes: dict[str, str]
    types: str  # of the operands and results


def lowered(fn, *args):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def calls(fn, *args):
    found = []
    for line in lowered(fn, *args).splitlines():
        if match := re.search(r"custom_call @moe_a2a_(\w+)\(", line):
            attributes = dict(re.findall(r"(\w+) = ([-+.e\d]+) : \w\d+", line))
            found.append(Call(match[1], attributes, line.rsplit(" : ", 1)[1]))
    return found
