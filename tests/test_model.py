"""The cost model: its counts are exact, its times go the right way, and its fit is close."""

import dataclasses
import fractions
import itertools
import pathlib
import sys

import numpy as np
import pytest

import jax_moe_a2a as ma
from jax_moe_a2a._src.group.value import two_levels_pay

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks import model  # noqa: E402

pytestmark = pytest.mark.exchanges(0)  # no program runs here

RECORD = model.newest_record()
FITS = {operation: model.fit(RECORD, operation) for operation in model.OPERATIONS}
MACHINES = model.machines(RECORD)
OWN = MACHINES[0]
EVERY = list(itertools.product(model.OPERATIONS, model.LEVELS, MACHINES))


def us(operation, levels, machine, **load):
    load = model.Load(**{"ranks": 16, "tokens": 1024, **load})
    return model.predict(FITS[operation], load, machine, levels, operation)


@pytest.mark.parametrize(("sets", "experts", "top_k"), [(4, 8, 3), (2, 6, 2), (8, 8, 5), (1, 4, 2)])
def test_distinct_ranks_are_the_mean_over_all_choices_of_experts(sets, experts, top_k):
    size = experts // sets
    all_choices = list(itertools.combinations(range(experts), top_k))
    total = sum(len({expert // size for expert in choice}) for choice in all_choices)
    exact = fractions.Fraction(total, len(all_choices))
    assert model.expected_distinct(sets, experts, top_k) == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize(("ranks", "domain"), [(8, 8), (16, 8), (64, 8), (32, 4), (8, 1)])
def test_traffic_is_what_a_simulated_routing_moves(ranks, domain):
    """Counted rank by rank: what each rank sends to each, flat and through the sender's local
    index."""
    rng = np.random.default_rng(ranks)
    tokens, experts = 200, 256
    hosts = ranks // domain
    machine = dataclasses.replace(OWN, domain=domain)
    link, network = np.zeros((2, ranks)), np.zeros((2, ranks))  # flat, two-level; by sender
    for source in range(ranks):
        here = source // domain
        chosen = rng.random((tokens, experts)).argpartition(8, axis=1)[:, :8]
        for one in chosen:
            wanted = {int(expert) // (experts // ranks) for expert in one}
            for rank in wanted - {source}:
                (link if rank // domain == here else network)[0, source] += 1
            for host in {rank // domain for rank in wanted}:
                relay = host * domain + source % domain
                network[1, source] += host != here
                link[1, relay] += len({r for r in wanted if r // domain == host} - {relay})
    for i, levels in enumerate(model.LEVELS):
        load = model.Load(ranks, tokens, row_bytes=1, experts=experts)
        expected = model.traffic(load, machine, levels, "dispatch")
        assert expected.link == pytest.approx(link[i].mean(), rel=0.03, abs=1e-9)
        assert expected.network == pytest.approx(network[i].mean(), rel=0.03, abs=1e-9)
    assert hosts > 1 or network.sum() == 0


@pytest.mark.parametrize("ranks", model.RANKS)
def test_the_package_and_the_model_count_the_same_bytes(ranks):
    load = model.Load(ranks, 128)
    estimate = ma.memory_estimate(
        num_tokens=128, hidden=7168, top_k=8, num_experts=load.num_experts, group_size=ranks
    )
    flat = model.traffic(load, OWN, "flat", "dispatch")
    assert flat.link + flat.network == pytest.approx(estimate.wire_bytes, rel=1e-6)


@pytest.mark.parametrize(("operation", "levels", "machine"), EVERY)
def test_more_of_anything_takes_no_less_time(operation, levels, machine):
    for name, values in dict(
        ranks=model.RANKS,
        tokens=(1, 8, 128, 1024, 4096, 8192),
        row_bytes=(1024, 7168, 14336, 65536),
        top_k=(1, 2, 4, 8, 16),
    ).items():
        times = [us(operation, levels, machine, **{name: value}) for value in values]
        assert times == sorted(times), (name, times)
    for rate in ("link", "network", "memory"):
        faster = dataclasses.replace(machine, **{rate: 2 * getattr(machine, rate)})
        assert us(operation, levels, faster) <= us(operation, levels, machine)


@pytest.mark.parametrize(
    ("operation", "machine"), list(itertools.product(model.OPERATIONS, MACHINES))
)
def test_two_levels_cross_the_network_less_and_are_nothing_else_within_a_host(operation, machine):
    for ranks in model.RANKS:
        flat, two = (
            model.traffic(model.Load(ranks, 128), machine, levels, operation)
            for levels in model.LEVELS
        )
        if ranks <= machine.domain:
            assert flat == two
            assert flat.network == 0
        else:
            assert 0 < two.network <= flat.network * (1 + 1e-12)
            assert two.link > flat.link
    # With as many experts as ranks and many hosts hardly two of a token's share one.
    far = model.Load(1024, 128)
    flat, two = (model.traffic(far, OWN, levels, operation) for levels in model.LEVELS)
    assert two.network / flat.network > 0.95


@pytest.mark.parametrize("machine", MACHINES[:2], ids=lambda machine: machine.name)
def test_a_group_chooses_two_levels_where_the_model_says_that_they_are_faster(machine):
    """The model compares one level after the other, routing included, for few tokens and many."""
    route = model.fit_route(RECORD)

    def gains(hosts, ranks):
        of_host = dataclasses.replace(machine, domain=ranks)
        loads = (model.Load(hosts * ranks, tokens) for tokens in (128, 1024, 4096))
        return [model.two_levels_gain(FITS, route, load, of_host) for load in loads]

    for hosts in (2, 4, 8, 16, 32, 64):
        for ranks in (2, 4, 8, 64):
            chosen = two_levels_pay(np.repeat(np.arange(hosts), ranks).reshape(1, hosts, ranks))
            assert chosen == (hosts <= 8)
            if chosen:
                assert min(gains(hosts, ranks)) > 1, (hosts, ranks)
            else:  # not much is lost, and few tokens would lose
                assert max(gains(hosts, ranks)) < 1.15, (hosts, ranks)
                assert min(gains(hosts, ranks)) < 1.05, (hosts, ranks)
        assert max(gains(hosts, 1)) < 1  # nothing to forward


@pytest.mark.parametrize("operation", model.OPERATIONS)
def test_levels_in_turn_take_longer_than_levels_that_overlap(operation):
    fit = FITS[operation]
    for ranks, tokens in itertools.product(model.RANKS, model.TOKENS):
        load = model.Load(ranks, tokens)
        in_turn = model.predict_in_turn(fit, load, OWN, operation)
        overlapped = model.predict(fit, load, OWN, "two-level", operation)
        assert in_turn == overlapped if ranks <= OWN.domain else in_turn > overlapped


def test_routing_grows_with_all_ids_and_crosses_once_for_each_host():
    fit = model.fit_route(RECORD)
    assert fit[0] > 0 and fit[1] > 0
    for ranks in model.RANKS:
        flat, two = (
            model.predict_route(fit, model.Load(ranks, 4096), OWN, levels)
            for levels in model.LEVELS
        )
        assert two <= flat
    assert flat > 10 * model.predict_route(fit, model.Load(8, 4096), OWN, "flat")


@pytest.mark.parametrize("operation", model.OPERATIONS)
def test_the_fit_is_within_what_the_page_says(operation):
    fit = FITS[operation]
    assert len(fit.points) >= 5
    assert fit.start > 0 and fit.tail >= 0
    assert 0.9 < fit.slope < 1.2  # of the links' own limit
    assert abs(fit.errors).mean() < 0.05
    assert abs(fit.errors).max() < 0.15
    assert abs(model.held_out_errors(RECORD, operation)).max() < 0.2
    off = dataclasses.replace(fit, points=tuple((*p[:3], 2 * p[3]) for p in fit.points))
    assert abs(off.errors).mean() > 0.5  # the error would show


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="sets=3"):
        model.expected_distinct(3, 8, 2)
    with pytest.raises(ValueError, match="domain, 8; got 12"):
        model.traffic(model.Load(12, 1), OWN, "flat", "dispatch")


def test_the_model_prints_its_tables():
    printed = "\n".join(model.tables(RECORD))
    for word in ("Fitted to", "two-level", "| 1,024 |"):
        assert word in printed
