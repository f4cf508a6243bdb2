"""Define pretended GPUs, for tests of the messages and requests of a group over several
processes."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The attributes that the package reads from a GPU of any process."""

    id: int
    process_index: int
    platform: str = "gpu"
    compute_capability: str = "9.0"

    @property
    def local_hardware_id(self):
        return self.id
