"""Run the kernels as C++ on a CPU. Random exchanges must pass, and must fail with each mutation
that a run can detect. Each commit tests only one third of the mutations."""

import subprocess

import pytest
from emulation import mutations, runs

# Numbers of seeds of each variant. They are small, because a "tsan" sequence takes seconds.
SEEDS = {"plain": 4, "colocated": 3, "tsan": 2}
# Fewer seeds would not detect all mutations of tests/mutations/list.toml.
MORE_SEEDS = {"sequences": 6, "drops": 6}
# Only ``make emulate`` runs the kinds that have other variants.
KINDS = [name for name, kind in runs.KINDS.items() if kind.variant in SEEDS]
THIRDS = 3

pytestmark = [
    pytest.mark.one_process("it starts programs of its own"),
    pytest.mark.exchanges(0),
]


def _commit():
    """Return the hash of the commit as a number, or 0 without git."""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=runs.HERE, capture_output=True, text=True
    )
    return int(done.stdout.strip() or "0", 16)


@pytest.fixture(scope="module", autouse=True)
def built():
    for variant in SEEDS:
        runs.build(f"{variant}/emulate")


@pytest.mark.parametrize("name", KINDS)
def test_sequences_are_right(name):
    kind = runs.KINDS[name]
    first = 1 + _commit() % 100_000
    seeds = kind.seeds(first, MORE_SEEDS.get(name, SEEDS[kind.variant]))
    wrong = {}
    for seed in seeds:
        outcome = runs.run_kind(name, seed)
        if not outcome.is_right:
            wrong[seed] = outcome.output[-2000:]
    assert not wrong


def test_each_tile_of_a_product_comes_once():
    runs.build("plain/walk")
    first = 1 + _commit() % 100_000
    for seed in range(first, first + 10):
        outcome = runs.run("plain", seed, program="walk")
        assert outcome.is_right, outcome.output


def test_products_by_cublas_lt_are_right_over_a_fake():
    runs.build("plain/library")
    outcome = runs.run("plain", 1 + _commit() % 100_000, program="library")
    assert outcome.is_right, outcome.output


def _this_third():
    chosen = _commit() % THIRDS
    return [m for i, m in enumerate(mutations.all_mutations()) if i % THIRDS == chosen]


@pytest.mark.parametrize("mutation", _this_third(), ids=lambda m: m.name.replace(" ", "-"))
def test_a_mutation_is_noticed(mutation):
    if mutation.name in mutations.JUSTIFIED:
        return
    assert any(runs.mutate(mutation, seed).is_noticed for seed in mutations.seeds_of(mutation))


@pytest.mark.parametrize("check", runs.HOST_CHECKS)
@pytest.mark.parametrize("sanitizer", runs.HOST_SANITIZERS)
def test_host_code_is_clean_over_a_fake_driver(sanitizer, check):
    runs.build(f"host_{sanitizer}/checks")
    assert not runs.check_host(sanitizer, check, seconds=2)
