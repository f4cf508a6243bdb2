"""Install wheels into an empty environment, and run README's quick start and the doctor there.

    python tools/try_wheels.py dist                    on the CPU
    python tools/try_wheels.py dist --cuda 13          on the CPU, with the wheel of the kernels
    python tools/try_wheels.py dist --cuda 13 --gpu    on GPUs

With ``--gpu``, the environment also uses the packages of the current Python, such as JAX. Without
it, pip installs JAX from a registry, and ``PATH`` only has the programs of the environment.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "jax-moe-a2a"
DOCTOR = ("--tokens", "64", "--hidden", "128", "--top-k", "2", "--experts", "16")
# A program that compares the kernels with the portable path, with four ranks on one GPU.
ONE_GPU = """
import jax, jax.numpy as jnp, jax_moe_a2a as ma

def layer(x, ids, implementation):
    group = ma.Group(axis_name="ep", size=4, implementation=implementation)
    def on_rank(x, ids):
        recv = ma.dispatch(x, ids, jnp.ones(ids.shape), group=group, num_experts=16)
        return ma.combine(2 * recv.rows, recv)
    return jax.vmap(on_rank, axis_name="ep")(x, ids)

x = jax.random.randint(jax.random.key(0), (4, 512, 256), -8, 8).astype(jnp.bfloat16)
ids = jax.random.randint(jax.random.key(1), (4, 512, 4), 0, 16)
kernels, portable = (jax.jit(layer, static_argnums=2)(x, ids, i) for i in ("cuda", "portable"))
assert bool((kernels == portable).all()), "the kernels differ from the portable path"
print("kernels and portable path agree, 4 ranks on", jax.devices()[0].device_kind)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of the wheels")
    parser.add_argument("--cuda", type=int, help="install the kernels for this CUDA version")
    parser.add_argument("--gpu", action="store_true", help="run the kernels")
    flags = parser.parse_args()
    if flags.gpu and not flags.cuda:
        parser.error("--gpu needs --cuda: the other wheel has no kernels")
    with tempfile.TemporaryDirectory() as folder:
        attempt(Path(folder), flags.folder.resolve(), flags.cuda, flags.gpu)


def attempt(folder: Path, wheels: Path, cuda: int | None, gpu: bool) -> None:
    """Install the wheels into an environment in ``folder``, and run programs in it. A failure ends
    this process."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    if gpu:  # look for packages in the environment, and then among those of the current Python
        (site_packages,) = folder.glob("venv/lib/python*/site-packages")
        outer = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (site_packages / "outer.pth").write_text("\n".join(outer))
    # Hide compilers, toolkits and the sources of this repository.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**kept, "PATH": os.environ["PATH"] if gpu else str(python.parent)}
    if not gpu:
        environment["JAX_PLATFORMS"] = "cpu"
    environment.pop("XLA_FLAGS", None)

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(python), *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        print(done.stdout, end="", flush=True)
        if done.returncode:
            sys.exit(f"failed: python {' '.join(arguments)}")
        return done.stdout

    # pip installs this package from the folder, and all other packages from a registry.
    names = [str(path) for path in wheels.glob("jax_moe_a2a-*-py3-none-any.whl")]
    pip = ["-m", "pip", "install", "-q", "--only-binary", ":all:", "--find-links", str(wheels)]
    run(*pip, *(["--no-index", "--no-deps"] if gpu else []), *names)
    if cuda:
        run(*pip, "--no-index", "--no-deps", f"{PACKAGE}-cuda{cuda}")
    installed = (
        "from jax_moe_a2a._src.group import native; print(native.has_kernels(), native.origin())"
    )
    expected = f"True wheel {PACKAGE}-cuda{cuda}" if cuda else "False "
    if (found := run("-c", installed).rstrip("\n")) != expected:
        sys.exit(f"the extension must be {expected!r}; found {found!r}")
    path = "cuda" if gpu else "portable"
    if f"{path} path" not in run("-c", quick_start()):
        sys.exit(f"the quick start must use the {path} path")
    run("-m", "jax_moe_a2a", *DOCTOR)
    if gpu:
        run("-c", ONE_GPU)
    print(f"the wheels work: {path} path, Python {sys.version.split()[0]}")


def quick_start() -> str:
    text = (ROOT / "README.md").read_text()
    found = re.search(r"^## Quick start$.*?^```python\n(.*?)^```$", text, re.M | re.S)
    assert found, "README.md has no quick start"
    return found[1]


if __name__ == "__main__":
    main()
