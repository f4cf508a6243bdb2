"""Make a training program of the installed MaxText. Packages for clouds and data sets that are not
installed are replaced by empty modules."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax

_OPTIONAL = """pathwaysutils xprof grain drjax PIL tiktoken sentencepiece sympy tensorboardX
datasets transformers tokenizers huggingface_hub safetensors
cloud_accelerator_diagnostics ml_goodput_measurement google.cloud google.api
google.api_core tensorflow tensorflow_datasets tensorflow_text array_record""".split()
_OF_DATA_SETS = """common.grain_utility input_pipeline.grain_data_processing
input_pipeline.hf_data_processing input_pipeline.olmo_grain_data_processing
input_pipeline.multihost_dataloading input_pipeline.tfds_data_processing
input_pipeline.tfds_data_processing_c4_mlperf""".split()

COMMON: dict[str, Any] = dict(
    override_model_config=True,
    dataset_type="synthetic",
    reuse_example_batch=1,
    packing=False,
    enable_checkpointing=False,
    skip_jax_distributed_system=True,
    enable_goodput_recording=False,
    monitor_goodput=False,
    enable_gcp_goodput_metrics=False,
    use_vertex_tensorboard=False,
    log_config=False,
    enable_dropout=False,
    sharding_tolerance=1.0,
    tokenizer_type="huggingface",
    run_name="step",
    steps=100,
)


class _Anything:
    """The base of all classes in empty modules."""

    def __init__(self, *_: Any, **__: Any):
        pass


class _Empty(types.ModuleType):
    """A module in which each attribute is a class (capital letter) or a mock."""

    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = type(name, (_Anything,), {}) if name[0].isupper() else mock.MagicMock(name=name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder that makes empty modules."""

    def __init__(self, names: Sequence[str]):
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == own or name.startswith(own + ".") for own in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _is_missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True


def load() -> types.SimpleNamespace:
    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
    missing = [name for name in _OPTIONAL if _is_missing(name)]
    if missing and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        missing += [f"maxtext.{name}" for name in _OF_DATA_SETS]
        sys.meta_path.insert(0, _Finder(missing))
    names = {
        "train": "trainers.pre_train.train",
        "train_utils": "utils.train_utils",
        "maxtext_utils": "utils.maxtext_utils",
        "sharding": "utils.sharding",
        "version": "version",
    }
    modules = {key: importlib.import_module(f"maxtext.{name}") for key, name in names.items()}
    return types.SimpleNamespace(**modules, folder=pathlib.Path(modules["version"].__file__).parent)


class Program:
    def __init__(self, options: Mapping[str, Any]):
        from flax import nnx
        from flax.linen import partitioning

        self.maxtext = maxtext = load()
        self._rules = getattr(maxtext.train, "logical_axis_rules", partitioning.axis_rules)
        directory = tempfile.mkdtemp()
        base = dict(base_output_directory=directory, jax_cache_dir=directory)
        self.command = [
            "train",
            str(maxtext.folder / "configs" / "base.yml"),
            *(f"{name}={value}" for name, value in (COMMON | base | dict(options)).items()),
        ]
        self.config, recorder = maxtext.train.initialize(self.command)
        of_loop = maxtext.train_utils.setup_train_loop(self.config, recorder)
        _, _, shardings, _, self.mesh, _, _, self._loader, self._rampup, _, state = of_loop
        self.graph, self.state = nnx.split(state)
        of_params, shardings = maxtext.sharding.maybe_update_params_sharding_with_opt(
            self.config, shardings
        )
        step, _ = maxtext.train_utils.jit_train_and_eval_step(
            self.config,
            self.graph,
            self.mesh,
            self.state,
            shardings,
            maxtext.train.train_step,
            maxtext.train.eval_step,
            None,
            of_params,
        )
        with self.scope():
            placed = maxtext.sharding.get_input_data_sharding(self.config, self.mesh)
            batch = maxtext.maxtext_utils.get_shaped_batch(self.config, batch_sharding=placed)
            self.compiled = step.lower(self.state, batch).compile()

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        with jax.set_mesh(self.mesh), self._rules(self.config.logical_axis_rules):
            yield

    @property
    def tokens(self) -> int:
        """Return the tokens of one device."""
        return int(self.config.per_device_batch_size * self.config.max_target_length)

    @property
    def tflop(self) -> float:
        """Return the TFLOP of one device, as MaxText counts them."""
        count = self.maxtext.maxtext_utils.calculate_tflops_training_per_device
        return float(count(self.config, log=False)[0])

    def step(self) -> dict[str, Any]:
        """Start one training step, and return its metrics without a wait."""
        batch = self._loader.load_next_batch(rampup_manager=self._rampup)
        with self.scope():
            self.state, metrics = self.compiled(self.state, batch)
        return metrics["scalar"]
