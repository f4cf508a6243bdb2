"""Dispatch and combine for mixture-of-experts models in JAX, as primitives that compose."""

from . import versions as _versions  # noqa: F401  # refuses an older JAX, so it comes first

# isort: split
from .api import Recv as Recv
from .api import SourceInfo as SourceInfo
from .api import combine as combine
from .api import combine_done as combine_done
from .api import combine_start as combine_start
from .api import dispatch as dispatch
from .api import dispatch_done as dispatch_done
from .api import dispatch_start as dispatch_start
from .api import route as route
from .expert_load import ExpertLoad as ExpertLoad
from .expert_load import expert_load as expert_load
from .expert_load import plot_expert_load as plot_expert_load
from .formats import BlockwiseFp8 as BlockwiseFp8
from .formats import MxFp8 as MxFp8
from .formats import NvFp4 as NvFp4
from .formats import Quantized as Quantized
from .formats import TokenFormat as TokenFormat
from .formats import column_major_scales as column_major_scales
from .formats import tiled_scales as tiled_scales
from .group import DeviceCounters as DeviceCounters
from .group import Group as Group
from .grouped import grouped_dot as grouped_dot
from .grouped import why_no_grouped_gemm as why_no_grouped_gemm
from .inflight import InFlight as InFlight
from .inflight import overlap as overlap
from .memory import DeviceMemory as DeviceMemory
from .memory import MemoryEstimate as MemoryEstimate
from .memory import memory_estimate as memory_estimate
from .native import available as available
from .routing import ROUTING_CHECKPOINT_NAME as ROUTING_CHECKPOINT_NAME
from .routing import Routing as Routing
from .routing import capacity as capacity
from .routing import default_capacity as default_capacity
from .routing_map import Choices as Choices
from .routing_map import choices_from_map as choices_from_map
from .two_level import TwoLevelRouting as TwoLevelRouting
