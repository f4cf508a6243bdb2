"""Count the rows that a small capacity drops, under several orders; numpy on the CPU.

    python -m benchmarks.drops                      # the table of docs/history/protocol.md
    python -m benchmarks.drops --factor 1.25 --spread 0.3 --alignment 128

Each token chooses distinct experts, and some experts are more popular than others. The table shows
the share of rows that drop: of all rows, and of the first and the last expert of a rank, source
rank, choice index and quarter of the tokens.
"""

import argparse
import math

import numpy as np

# How choices ask for room: the axes (source, token, choice) of the ids, slowest first. "last rows"
# is the order of rows: by expert first.
ORDERS = {
    "last rows": None,
    "choice, source, token": (2, 0, 1),
    "choice, token, source": (2, 1, 0),
}


def draw_ids(rng, ranks, tokens, top_k, experts, spread):
    """Draw distinct ids [R, T, K], by falling weight; popularity is lognormal with that sigma."""
    popularity = rng.normal(0, spread, experts)
    logits = popularity + rng.gumbel(size=(ranks, tokens, experts))
    ids = np.argpartition(-logits, top_k - 1, axis=-1)[..., :top_k]
    by_weight = np.argsort(-np.take_along_axis(logits, ids, -1), axis=-1)
    return np.take_along_axis(ids, by_weight, -1)


def kept_at(local, num_experts, capacity, alignment, axes):
    """Return which choices for a rank's experts are kept; local [R, T, K], -1 for other ranks."""
    by_expert = [np.argwhere((local == e).ravel())[:, 0] for e in range(num_experts)]
    kept = np.zeros(local.size, bool)
    if axes is None:
        row = 0
        for choices in by_expert:
            kept[choices[: max(0, capacity - row)]] = True
            row += -(-len(choices) // alignment) * alignment
        return kept.reshape(local.shape)
    asking = local.transpose(axes).ravel()
    opens = np.zeros(asking.shape, bool)
    for e in range(num_experts):
        opens[np.flatnonzero(asking == e)[::alignment]] = True
    fits = np.cumsum(opens) * alignment <= capacity
    shape = [local.shape[axis] for axis in axes]
    return fits.reshape(shape).transpose(np.argsort(axes)) & (local >= 0)


def shares(ids, ranks, experts, capacity, alignment, axes):
    """Return dropped shares by name, in percent: pairs of the first and the last of a kind."""
    per_rank = experts // ranks
    dropped = np.zeros(ids.shape, bool)
    for rank in range(ranks):
        local = np.where(ids // per_rank == rank, ids - rank * per_rank, -1)
        kept = kept_at(local, per_rank, capacity, alignment, axes)
        dropped |= (local >= 0) & ~kept
    quarter = ids.shape[1] // 4
    ends = lambda parts: tuple(100 * part.mean() for part in parts)
    return {
        "all": (100 * dropped.mean(),),
        "expert": ends([dropped[ids % per_rank == e] for e in (0, per_rank - 1)]),
        "source": ends([dropped[0], dropped[-1]]),
        "choice": ends([dropped[..., 0], dropped[..., -1]]),
        "tokens": ends([dropped[:, :quarter], dropped[:, -quarter:]]),
    }


def parse_args():
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in dict(ranks=8, tokens=1024, top_k=8, experts=256, alignment=1).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--factor", type=float, default=1.0, help="of the balanced load")
    parser.add_argument("--spread", type=float, default=0.15, help="sigma of log popularity")
    parser.add_argument("--steps", type=int, default=2, help="routings with other popularities")
    return parser.parse_args()


def main():
    """Print the table."""
    args = parse_args()
    sizes = args.ranks, args.tokens, args.top_k, args.experts
    rows = math.ceil(args.factor * args.tokens * args.top_k)
    padding = args.experts // args.ranks * (args.alignment - 1)  # as ma.capacity has it
    capacity = -(-(rows + padding) // args.alignment) * args.alignment
    rng = np.random.default_rng(0)
    routings = [draw_ids(rng, *sizes, args.spread) for _ in range(args.steps)]
    print(f"dropped rows in percent; first and last of each kind; capacity {capacity} rows")
    found = {}
    for order, axes in ORDERS.items():
        each = [
            shares(ids, args.ranks, args.experts, capacity, args.alignment, axes)
            for ids in routings
        ]
        found[order] = {
            kind: [float(np.mean(numbers)) for numbers in zip(*(one[kind] for one in each))]
            for kind in each[0]
        }
    print(f"{'order':24}" + "".join(f"{kind:>16}" for kind in next(iter(found.values()))))
    for order, kinds in found.items():
        cells = [" .. ".join(f"{number:.1f}" for number in kinds[kind]) for kind in kinds]
        print(f"{order:24}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
