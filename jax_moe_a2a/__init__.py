"""Dispatch and combine for mixture-of-experts models, as JAX primitives with exact gradients."""

import importlib as _importlib
import typing as _typing

__version__ = "0.1.0"  # as in pyproject.toml

# isort: split
from ._src import versions as _versions  # noqa: F401  # refuses an older JAX, so it comes first

# isort: split
from ._src.api import combine as combine
from ._src.api import combine_done as combine_done
from ._src.api import combine_start as combine_start
from ._src.api import dispatch as dispatch
from ._src.api import dispatch_done as dispatch_done
from ._src.api import dispatch_start as dispatch_start
from ._src.api import route as route
from ._src.exchange.inflight import InFlight as InFlight
from ._src.exchange.inflight import overlap as overlap
from ._src.exchange.recv import Recv as Recv
from ._src.exchange.recv import SourceInfo as SourceInfo
from ._src.experts.activations import clamped_swiglu as clamped_swiglu
from ._src.experts.activations import gated as gated
from ._src.experts.activations import squared_relu as squared_relu
from ._src.experts.primitives import PRODUCTS_CHECKPOINT_NAME as PRODUCTS_CHECKPOINT_NAME
from ._src.explain import Call as Call
from ._src.explain import Explanation as Explanation
from ._src.explain import explain as explain
from ._src.formats.formats import BlockwiseFp8 as BlockwiseFp8
from ._src.formats.formats import MxFp8 as MxFp8
from ._src.formats.formats import NvFp4 as NvFp4
from ._src.formats.formats import Quantized as Quantized
from ._src.formats.formats import TokenFormat as TokenFormat
from ._src.group.group import Group as Group
from ._src.grouped.api import grouped_dot as grouped_dot
from ._src.grouped.weights import QUANTIZED_CHECKPOINT_NAME as QUANTIZED_CHECKPOINT_NAME
from ._src.grouped.weights import QuantizedExperts as QuantizedExperts
from ._src.layer.accumulate import accumulate_grads as accumulate_grads
from ._src.layer.axes import Axes as Axes
from ._src.layer.balance import load_balancing_loss as load_balancing_loss
from ._src.layer.balance import quantile_select_bias as quantile_select_bias
from ._src.layer.balance import router_z_loss as router_z_loss
from ._src.layer.balance import update_select_bias as update_select_bias
from ._src.layer.dispatch_rows import ROWS_CHECKPOINT_NAME as ROWS_CHECKPOINT_NAME
from ._src.layer.fetch import FETCHED_CHECKPOINT_NAME as FETCHED_CHECKPOINT_NAME
from ._src.layer.fetch import fetch_experts as fetch_experts
from ._src.layer.load import ExpertLoad as ExpertLoad
from ._src.layer.load import expert_load as expert_load
from ._src.layer.lora import LoRA as LoRA
from ._src.layer.mlp import moe_mlp as moe_mlp
from ._src.layer.moe import MoEStatistics as MoEStatistics
from ._src.layer.moe import moe as moe
from ._src.layer.parameters import MoEConfig as MoEConfig
from ._src.layer.parameters import init_moe as init_moe
from ._src.layer.parameters import moe_partition_specs as moe_partition_specs
from ._src.layer.router import Replay as Replay
from ._src.layer.router import Router as Router
from ._src.layer.top_k import TopK as TopK
from ._src.layer.weights import Experts as Experts
from ._src.layer.weights import quantize_experts as quantize_experts
from ._src.placement.choice import choose_slots as choose_slots
from ._src.placement.move import move_experts as move_experts
from ._src.placement.planner import plan_placement as plan_placement
from ._src.placement.types import Placement as Placement
from ._src.plan.memory import DeviceMemory as DeviceMemory
from ._src.plan.memory import MemoryEstimate as MemoryEstimate
from ._src.plan.memory import memory_estimate as memory_estimate
from ._src.plan.options import Exchange as Exchange
from ._src.routing.choices import RouterChoices as RouterChoices
from ._src.routing.two_level import TwoLevelRouting as TwoLevelRouting
from ._src.routing.types import ROUTING_CHECKPOINT_NAME as ROUTING_CHECKPOINT_NAME
from ._src.routing.types import Routing as Routing

if not _typing.TYPE_CHECKING:  # a type checker that sees __getattr__ would accept any name

    def __getattr__(name):
        """Import the package ``integrations`` when a program first uses it."""
        if name == "integrations":
            return _importlib.import_module(f"{__name__}.integrations")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
