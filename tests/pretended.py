"""Define fake GPUs for tests of groups with several processes."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    id: int
    process_index: int
    platform: str = "gpu"
    compute_capability: str = "9.0"

    @property
    def local_hardware_id(self):
        return self.id
