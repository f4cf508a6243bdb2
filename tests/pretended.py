"""Define stand-ins for GPUs, for tests of what a group over several processes says and asks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the package reads from a GPU of any process."""

    id: int
    process_index: int
    platform: str = "gpu"
    compute_capability: str = "9.0"

    @property
    def local_hardware_id(self):
        return self.id
