"""Dispatch and combine for mixture-of-experts models in JAX, as primitives that compose."""

from .api import Recv as Recv
from .api import SourceInfo as SourceInfo
from .api import combine as combine
from .api import dispatch as dispatch
from .api import route as route
from .group import Group as Group
from .memory import MemoryEstimate as MemoryEstimate
from .memory import memory_estimate as memory_estimate
from .native import available as available
from .routing import ROUTING_CHECKPOINT_NAME as ROUTING_CHECKPOINT_NAME
from .routing import Routing as Routing
from .routing import default_capacity as default_capacity
