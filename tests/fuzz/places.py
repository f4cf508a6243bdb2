"""Run a function of one rank on all ranks, by a vmap on one device or by shard_map on a mesh."""

import contextlib
import dataclasses

import harness
import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import jax_moe_a2a as ma

AXES = ("host", harness.AXIS)
BATCH_AXIS = "data"


@dataclasses.dataclass(frozen=True)
class Place:
    """A mesh or vmaps. In a batch, an array is [R, B, ...], or [R, ...] if elements share it."""

    kind: str  # "vmap", or the kind of mesh axes: "auto" or "explicit"
    ranks: int
    hosts: int = 0  # hosts of a two-level group; 0: a group of one level
    batch: int = 0  # 0: no batch
    has_domains: bool = False  # True: the batch is an axis of the mesh, and not a vmap
    check_vma: bool = True

    @property
    def group(self):
        options = dict(implementation="portable")
        if self.hosts:
            return ma.Group(self.mesh, AXES, two_level=True, **options)
        if self.kind == "vmap":
            return ma.Group(axis_name=harness.AXIS, size=self.ranks, **options)
        return ma.Group(self.mesh, harness.AXIS, **options)

    @property
    def axes(self):
        return AXES if self.hosts else (harness.AXIS,)

    @property
    def shape(self):
        return (self.hosts, self.ranks // self.hosts) if self.hosts else (self.ranks,)

    @property
    def mesh(self):
        if self.kind == "vmap":
            return AbstractMesh(self.shape, self.axes)
        domains = self.batch if self.has_domains else 1
        shape, axes = self.shape, self.axes
        if self.has_domains:
            shape, axes = (domains, *shape), (BATCH_AXIS, *axes)
        devices = np.array(harness.devices(domains * self.ranks)).reshape(shape)
        kind = AxisType.Explicit if self.kind == "explicit" else AxisType.Auto
        return Mesh(devices, axes, axis_types=(kind,) * len(axes))

    def over_ranks(self, fn, in_batched, out_batched):
        """Map `fn` (dicts -> dict) over ranks. `*_batched` are True for arrays of [R, B, ...]."""
        if self.batch and not self.has_domains:
            axes = tuple({n: 0 if is_batched else None for n, is_batched in own.items()}
                         for own in in_batched)  # fmt: skip
            fn = jax.vmap(fn, in_axes=axes, axis_size=self.batch)
        if self.kind == "vmap":
            return harness.over_axes(fn, self.mesh)

        def lead(is_batched):
            return (0,) * (1 + self.has_domains * is_batched)

        def of_one_rank(*args):
            results = fn(*jax.tree.map(lambda x, b: x[lead(b)], args, tuple(in_batched)))
            return {
                name: jax.tree.map(lambda x: x[(None,) * len(lead(out_batched[name]))], tree)
                for name, tree in results.items()
            }

        return jax.shard_map(
            of_one_rank,
            mesh=self.mesh,
            in_specs=jax.tree.map(self.spec, tuple(in_batched)),
            out_specs=jax.tree.map(self.spec, out_batched),
            check_vma=self.check_vma,
        )

    def spec(self, is_batched):
        batch = (BATCH_AXIS,) if self.has_domains and is_batched else ()
        return PartitionSpec(self.axes, *batch)

    def compiled(self, fn, in_batched, x64=False):
        jitted = jax.jit(fn)

        def put(x, is_batched):
            return jax.device_put(x, NamedSharding(self.mesh, self.spec(is_batched)))

        def run(*args):
            with jax.enable_x64(True) if x64 else contextlib.nullcontext():
                if self.kind != "vmap":
                    args = jax.tree.map(put, args, tuple(in_batched))
                return jax.tree.map(np.asarray, jitted(*args))

        return run
