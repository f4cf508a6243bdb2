"""Compute the expected results of exchanges and layers in numpy, with plain loops in the order that
the documents define.

Every array has a leading rank axis of length R. T is the number of tokens of a rank, K is top_k, L
is the number of local experts, and C is the capacity. This file shares no code with the package.
"""

import dataclasses
import decimal
import typing

import ml_dtypes
import numpy as np

DROPPED = -2  # the row of a dropped choice
ABSENT = -1
TAIL = -2  # the slot of a row after the last group


@dataclasses.dataclass(frozen=True)
class Routing:
    """The fields of the package's Routing as int32 numpy arrays."""

    token_slot: np.ndarray  # [R, T, R]
    slot_token: np.ndarray  # [R, R, T]
    choice_rank: np.ndarray  # [R, T, K]
    slot_rows: np.ndarray  # [R, R, T, K]
    row_rank: np.ndarray  # [R, C]
    row_slot: np.ndarray  # [R, C]
    row_k: np.ndarray  # [R, C]
    row_token: np.ndarray  # [R, C]
    group_sizes: np.ndarray  # [R, L]
    num_rows: np.ndarray  # [R]
    num_dropped: np.ndarray  # [R]
    num_invalid: np.ndarray  # [R]
    # the row on the destination rank, ABSENT or DROPPED; only in the oracle
    choice_row: np.ndarray  # [R, T, K]

    @property
    def capacity(self) -> int:
        return self.row_rank.shape[1]

    @property
    def is_tail(self) -> np.ndarray:
        ends = self.group_sizes.sum(axis=1)
        return np.arange(self.capacity) >= ends[:, None]

    @property
    def row_offsets(self) -> np.ndarray:
        """Return the first row of each local expert, and the end of the last expert, [R, L + 1]."""
        first = np.zeros((len(self.group_sizes), 1), np.int32)
        return np.cumsum(np.hstack([first, self.group_sizes]), axis=1, dtype=np.int32)


FIELDS = tuple(f.name for f in dataclasses.fields(Routing) if f.name != "choice_row")


def default_capacity(ranks, tokens, top_k, local_experts, alignment):
    rows = ranks * tokens * top_k
    rows += min(local_experts, rows) * (alignment - 1)
    return -(-rows // alignment) * alignment


def kept_choices(ids, first_expert, local_experts, capacity, alignment):
    """Return the set of choices (source, token, k) that get rows on one rank.

    Choices get rows in the order of k, then token, then source. An expert without a free row gets
    `alignment` more. If the capacity has no room for them, this choice and all later choices are
    dropped.
    """
    ranks, tokens, top_k = len(ids), len(ids[0]), len(ids[0][0]) if ids[0] else 0
    rows, room, kept = [0] * local_experts, capacity, set()
    for k in range(top_k):
        for token in range(tokens):
            for source in range(ranks):
                expert = ids[source][token][k] - first_expert
                if not 0 <= expert < local_experts:
                    continue
                if rows[expert] % alignment == 0:
                    if room < alignment:
                        return kept
                    room -= alignment
                rows[expert] += 1
                kept.add((source, token, k))
    return kept


def route(ids, num_experts, capacity, alignment=1):
    """Compute the routing of ids [R, T, K]. Expert e is on rank e // L."""
    ranks, tokens, top_k = ids.shape
    ids = ids.tolist()  # Python integers do not overflow
    local_experts = num_experts // ranks
    assert local_experts * ranks == num_experts

    def full(value, *shape):
        return np.full(shape, value, np.int32)

    token_slot = full(ABSENT, ranks, tokens, ranks)
    slot_token = full(ABSENT, ranks, ranks, tokens)
    choice_rank = full(ABSENT, ranks, tokens, top_k)
    num_invalid = full(0, ranks)
    for source in range(ranks):
        used = [0] * ranks
        for token in range(tokens):
            for k in range(top_k):
                expert = ids[source][token][k]
                if not -1 <= expert < num_experts:
                    num_invalid[source] += 1
                if not 0 <= expert < num_experts:
                    continue
                destination = expert // local_experts
                choice_rank[source, token, k] = destination
                if token_slot[source, token, destination] == ABSENT:
                    token_slot[source, token, destination] = used[destination]
                    slot_token[source, destination, used[destination]] = token
                    used[destination] += 1

    slot_rows = full(ABSENT, ranks, ranks, tokens, top_k)
    choice_row = full(ABSENT, ranks, tokens, top_k)
    row_rank, row_slot, row_k, row_token = (full(ABSENT, ranks, capacity) for _ in range(4))
    group_sizes = full(0, ranks, local_experts)
    num_rows, num_dropped = full(0, ranks), full(0, ranks)
    for destination in range(ranks):
        start = 0
        first_expert = destination * local_experts
        kept = kept_choices(ids, first_expert, local_experts, capacity, alignment)
        for local_expert in range(local_experts):
            row = start
            for source in range(ranks):
                for token in range(tokens):
                    for k in range(top_k):
                        if ids[source][token][k] != first_expert + local_expert:
                            continue
                        slot = token_slot[source, token, destination]
                        if (source, token, k) in kept:
                            row_rank[destination, row] = source
                            row_slot[destination, row] = slot
                            row_k[destination, row] = k
                            row_token[destination, row] = token
                            slot_rows[destination, source, slot, k] = row
                            choice_row[source, token, k] = row
                            num_rows[destination] += 1
                            row += 1
                        else:
                            slot_rows[destination, source, slot, k] = DROPPED
                            choice_row[source, token, k] = DROPPED
                            num_dropped[destination] += 1
            end = -(-row // alignment) * alignment
            group_sizes[destination, local_expert] = end - start
            start = end
        for row in range(start, capacity):
            row_slot[destination, row] = TAIL
    return Routing(
        token_slot,
        slot_token,
        choice_rank,
        slot_rows,
        row_rank,
        row_slot,
        row_k,
        row_token,
        group_sizes,
        num_rows,
        num_dropped,
        num_invalid,
        choice_row,
    )


def choices(routing):
    """Yield (source, token, k, destination rank, row) of every choice that has a row."""
    for source, token, k in np.ndindex(routing.choice_row.shape):
        row = routing.choice_row[source, token, k]
        if row >= 0:
            yield source, token, k, routing.choice_rank[source, token, k], row


def dispatch(x, routing):
    """Copy tokens [R, T, ...] to rows [R, C, ...], which are zero without a token."""
    rows = np.zeros((x.shape[0], routing.capacity, *x.shape[2:]), x.dtype)
    for source, token, _, destination, row in choices(routing):
        rows[destination, row] = x[source, token]
    return rows


def dispatch_choices(values, routing):
    """Copy values [R, T, K] of choices to rows [R, C]."""
    rows = np.zeros((values.shape[0], routing.capacity), values.dtype)
    for source, token, k, destination, row in choices(routing):
        rows[destination, row] = values[source, token, k]
    return rows


def combine_choices(rows, routing):
    """Copy values [R, C] of rows to their choices [R, T, K]."""
    values = np.zeros(routing.choice_row.shape, rows.dtype)
    for source, token, k, destination, row in choices(routing):
        values[source, token, k] = rows[destination, row]
    return values


def accumulation_dtype(dtype):
    wide = (np.float64, np.complex64, np.complex128)
    return np.dtype(dtype) if np.dtype(dtype) in wide else np.dtype(np.float32)


def epsilon(dtype):
    """Return the machine epsilon, which is twice the largest relative error of one rounding."""
    return float(ml_dtypes.finfo(dtype).eps)


def combine(y, routing, weights=None, wire_dtype=None, add=None):
    """Combine rows y [R, C, ...] with weights [R, C]. Return (sums, slack).

    Each rank sums a token's weighted rows in the accumulation dtype, in the order of k. It rounds
    this partial sum to `wire_dtype`, or calls `wire_dtype` if it is a function. The partial sums
    are added in the order of ranks, then `add` is added. The result is rounded to y's dtype.

    A correct result may use fused multiply-adds, so it differs from `sums` by up to the slack: an
    epsilon of each addition, each partial sum and the result. Without weights, the slack is zero.
    With a function `wire_dtype`, products must be exact, because the slack ignores its rounding.
    """
    return combine_pairs([(y, weights)], routing, wire_dtype, add)


def combine_pairs(pairs, routing, wire_dtype=None, add=None):
    """Combine pairs (rows [R, C, ...], weights [R, C] or None). The products of a choice are added
    in the order of the pairs."""
    with np.errstate(over="ignore", invalid="ignore"):
        return _combine(pairs, routing, wire_dtype or pairs[0][0].dtype, add)


def _combine(pairs, routing, wire_dtype, add):
    ranks, tokens, top_k = routing.choice_row.shape
    y = pairs[0][0]
    is_weighted = any(weights is not None for _, weights in pairs)
    acc = accumulation_dtype(y.dtype)
    out = np.zeros((ranks, tokens, *y.shape[2:]), y.dtype)
    slack = np.zeros(out.shape, np.float64)
    for home in range(ranks):
        for token in range(tokens):
            total = np.zeros(y.shape[2:], acc)
            total_slack = np.zeros(y.shape[2:], np.float64)
            for rank in range(ranks):
                partial = np.zeros(y.shape[2:], acc)
                magnitude = np.zeros(y.shape[2:], np.float64)
                for k in range(top_k):
                    row = routing.choice_row[home, token, k]
                    if routing.choice_rank[home, token, k] != rank or row < 0:
                        continue
                    for rows, weights in pairs:
                        term = rows[rank, row].astype(acc)
                        if weights is not None:
                            term = weights[rank, row].astype(acc) * term
                        partial = partial + term
                        magnitude += np.abs(term)
                if callable(wire_dtype):
                    total = total + wire_dtype(partial)
                    continue
                rounded = partial.astype(wire_dtype).astype(acc)
                total = total + rounded
                total_slack += (
                    epsilon(wire_dtype) * np.abs(rounded)
                    + len(pairs) * top_k * epsilon(acc) * magnitude
                )
            if add is not None:
                total = total + add[home, token].astype(acc)
            out[home, token] = total.astype(y.dtype)
            if is_weighted:
                slack[home, token] = 1.01 * total_slack + epsilon(y.dtype) * np.abs(total)
    return out, slack


def combine_of_hosts(pairs, routing, hosts, wire_dtype=None, add=None):
    """Combine pairs within each host, and then across hosts. A host's sum is rounded to y's dtype,
    then to the wire dtype."""
    dtype, of_host = pairs[0][0].dtype, len(pairs[0][0]) // hosts
    is_weighted = any(weights is not None for _, weights in pairs)
    on_the_wire = wire_dtype
    if not callable(wire_dtype):
        wire = np.dtype(wire_dtype or dtype)

        def on_the_wire(x):
            return x.astype(wire)

    acc = accumulation_dtype(dtype)
    total, slack = 0, 0
    with np.errstate(over="ignore", invalid="ignore"):
        for host in range(hosts):
            is_here = routing.choice_rank // of_host == host
            here = np.where(is_here, routing.choice_row, ABSENT)
            of_here = dataclasses.replace(routing, choice_row=here)
            sums, sums_slack = combine_pairs(pairs, of_here, wire_dtype)
            total = total + on_the_wire(sums.astype(acc)).astype(acc)
            slack = slack + sums_slack
            if is_weighted and not callable(wire_dtype):
                slack = slack + epsilon(wire) * np.abs(sums.astype(acc))
        total = total if add is None else total + add.astype(acc)
        out = total.astype(dtype)
    return out, 1.01 * slack + epsilon(dtype) * np.abs(total) * is_weighted


def combine_transpose(g, y, routing, weights):
    """Return the cotangents (dy, dw) of a weighted combine for the result's cotangent g."""
    acc = accumulation_dtype(y.dtype)
    gathered = dispatch(g, routing).astype(acc)
    dy, dw = np.zeros(y.shape, y.dtype), np.zeros(y.shape[:2], acc)
    for _, _, _, rank, row in choices(routing):
        dy[rank, row] = (weights[rank, row].astype(acc) * gathered[rank, row]).astype(y.dtype)
        dw[rank, row] = np.sum(gathered[rank, row] * y[rank, row].astype(acc), dtype=acc)
    return dy, dw


# With replicated tokens, each rank has a separate routing to only its experts.


def mode_ids(ids, local_experts, replicated):
    """Return a list of the ids of each routing, and the number of experts in a routing."""
    ranks = len(ids)
    if not replicated:
        return [ids], ranks * local_experts
    found = []
    for rank in range(ranks):
        local = ids[rank : rank + 1].astype(object) - rank * local_experts
        is_here = (0 <= local) & (local < local_experts)
        found.append(np.where(is_here, local, -1).astype(np.int64))
    return found, local_experts


def mode_capacity(ranks, tokens, top_k, local_experts, alignment, replicated):
    return default_capacity(1 if replicated else ranks, tokens, top_k, local_experts, alignment)


def route_mode(ids, local_experts, capacity, alignment, replicated):
    """Return one routing of ids [R, T, K] or, for replicated tokens, one for each rank."""
    new_ids, experts = mode_ids(ids, local_experts, replicated)
    return [route(each, experts, capacity, alignment) for each in new_ids]


def capacity_of_factor(factor, ranks, tokens, top_k, local_experts, alignment, replicated):
    """Return the factor times the mean number of rows, plus padding."""
    factor = decimal.Decimal(str(factor))
    in_all = (1 if replicated else ranks) * tokens * top_k
    rows = 0
    while rows < in_all and rows * ranks < factor * in_all:
        rows += 1
    rows += min(local_experts, rows) * (alignment - 1)
    return -(-rows // alignment) * alignment


def row_experts(routing):
    """Return the local expert of each row [R, C], or ABSENT for a row without a token."""
    found = np.full(routing.row_token.shape, ABSENT, np.int32)
    for rank, row in np.argwhere(routing.row_token >= 0):
        ends = routing.row_offsets[rank, 1:]
        found[rank, row] = next(e for e, end in enumerate(ends) if row < end)
    return found


def expert_load(routings):
    """Return (rows of each expert, rows of each rank, dropped rows of each rank)."""
    per_expert = []
    for routing in routings:
        for experts in row_experts(routing):
            local = range(routing.group_sizes.shape[1])
            per_expert += [int(np.sum(experts == expert)) for expert in local]
    counts = [
        np.concatenate([getattr(r, n) for r in routings]) for n in ("num_rows", "num_dropped")
    ]
    return np.array(per_expert, np.int32), *counts


# The functions below are analytic in float64, so a complex step gives accurate derivatives.

STEP = 1e-100


def derivative(fn, arrays, directions):
    """Return the directional derivatives of `fn`, from a dict of arrays to another dict."""
    moved = {name: array + STEP * 1j * directions[name] for name, array in arrays.items()}
    return {name: array.imag / STEP for name, array in fn(moved).items()}


def type_of(arrays):
    return np.result_type(np.float64, *arrays)


def spans(sizes, num_rows):
    """Yield each group's (first row, end). A negative size counts as 0."""
    end, found = 0, []
    for size in sizes:
        start, end = end, min(end + max(int(size), 0), num_rows)
        found.append((start, end))
    return found


def grouped_dot(rows, w, sizes):
    """Multiply rows [C, K] by their group's matrix of w [L, K, N]; rows outside of groups become
    zero."""
    out = np.zeros((rows.shape[0], w.shape[2]), type_of((rows, w)))
    for (start, end), matrix in zip(spans(sizes, len(rows)), w, strict=True):
        out[start:end] = rows[start:end] @ matrix
    return out


def grouped_dot_fp8(rows, w, sizes, block=128):
    """Multiply FP8 rows by FP8 weights, as docs/fp8.md defines.

    Rows are (values [C, K], scales [C, K / block]). Weights are (values [L, N, K], scales [L, N /
    block, K / block]). Return the float32 results [C, N], and the sum of each result's terms'
    magnitudes, to which error bounds are relative.
    """
    (values, scales), (w_values, w_scales) = rows, w
    wide = lambda x: x.astype(np.float64)
    out = np.zeros((len(values), w_values.shape[1]), np.float32)
    magnitudes = np.zeros(out.shape)
    for group, (start, end) in enumerate(spans(sizes, len(values))):
        of_columns = np.repeat(w_scales[group], block, axis=0)[: out.shape[1]]  # [N, K / block]
        for i in range(scales.shape[1]):
            part = np.s_[i * block : (i + 1) * block]
            a, b = wide(values[start:end, part]), wide(w_values[group, :, part])
            scale = scales[start:end, i, None] * of_columns[None, :, i]  # rounded to float32
            out[start:end] += (a @ b.T).astype(np.float32) * scale
            magnitudes[start:end] += np.abs(a) @ np.abs(b.T) * wide(scale)
    return out, magnitudes


def grouped_outer(x, y, sizes):
    """Return x^T y [L, K, N] of each group's rows."""
    out = np.zeros((len(sizes), x.shape[1], y.shape[1]), type_of((x, y)))
    for group, (start, end) in enumerate(spans(sizes, len(x))):
        out[group] = x[start:end].T @ y[start:end]
    return out


def products(arrays, sizes, between):
    """Multiply rows [C, K] by w[0], w[1], ... of w [D, L, K, N], with the activation `between`
    them."""
    return _products(arrays, sizes, between)[-1]


def _products(arrays, sizes, between):
    rows, found = arrays["rows"], []
    for w in arrays["w"]:
        found.append(grouped_dot(rows, w, sizes))
        rows = between.value(found[-1], None)
    return found


def products_transpose(arrays, sizes, between, g):
    """Return the cotangents of `arrays` in `products` for the result's cotangent g."""
    found = _products(arrays, sizes, between)
    of_w = [None] * len(found)
    for i in reversed(range(len(found))):
        rows = between.value(found[i - 1], None) if i else arrays["rows"]
        of_w[i] = grouped_outer(rows, g, sizes)
        g = grouped_dot(g, np.swapaxes(arrays["w"][i], 1, 2), sizes)
        if i:
            g, _ = between.transpose(g, found[i - 1], None)
    return dict(rows=g, w=np.stack(of_w))


@dataclasses.dataclass(frozen=True)
class Activation:
    """A function of rows h [N, I'] and of p (an array [N, ...] or None), with its transpose."""

    value: typing.Callable  # (h, p) -> [N, I]
    transpose: typing.Callable  # (cotangent [N, I], h, p) -> cotangents of h and of p (or None)


def elementwise(fn, slope):
    return Activation(lambda h, p: fn(h), lambda g, h, p: (g * slope(h), None))


def gated(fn, slope):
    """Return the activation fn(gate) * up; the first half of the columns is the gate."""

    def transpose(g, h, p):
        gate, up = np.split(h, 2, axis=1)
        return np.concatenate([g * slope(gate) * up, g * fn(gate)], axis=1), None

    return Activation(lambda h, p: fn(np.split(h, 2, 1)[0]) * np.split(h, 2, 1)[1], transpose)


def scaled(fn, slope):
    """Return the activation p * fn(h), p [N, I]."""
    return Activation(lambda h, p: p * fn(h), lambda g, h, p: (g * p * slope(h), g * fn(h)))


def steep(fn, slope):
    """Return the activation fn(p * h), p [N]."""

    def transpose(g, h, p):
        g = g * slope(p[:, None] * h)
        return g * p[:, None], np.sum(g * h, axis=1)

    return Activation(lambda h, p: fn(p[:, None] * h), transpose)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The N rows that contain a token, as arrays [N]."""

    source: np.ndarray  # the token's rank
    token: np.ndarray
    k: np.ndarray
    owner: np.ndarray  # rank of the expert
    expert: np.ndarray  # index among the experts of `owner`

    @property
    def choice(self):
        return self.source, self.token, self.k

    @property
    def home(self):
        return self.source, self.token

    @property
    def place(self):
        return self.owner, self.expert


def rows_of(ids, local_experts, routings, replicated):
    """Return the ``Rows`` of all ranks. If tokens are replicated, the source of a row is the owner
    of its expert, because each rank computes partial sums from its own copy of the tokens."""
    new_ids, _ = mode_ids(ids, local_experts, replicated)
    found = []
    for rank, (domain, routing) in enumerate(zip(new_ids, routings, strict=True)):
        for source, token, k, _, _ in choices(routing):
            owner, expert = divmod(int(domain[source, token, k]), local_experts)
            if replicated:
                source = owner = rank
            found.append((source, token, k, owner, expert))
    return Rows(*np.array(found, np.int64).reshape(-1, 5).T)


def expert_layer(a, rows, activation, weigh_input=False):
    """Return the output [R, T, H] of a layer.

    `a` has x [R, T, H], weights [R, T, K], w_in [R, L, H, I'], w_out [R, L, I, H], and optionally
    b_in [R, L, I'], b_out [R, L, H] and p [R, ...]. Weights multiply the outputs of experts or,
    with `weigh_input`, their inputs.
    """
    y = _rows_of_layer(a, rows, activation, weigh_input)[-1]
    out = np.zeros(a["x"].shape, y.dtype)
    np.add.at(out, rows.home, y)
    return out


def _rows_of_layer(a, rows, activation, weigh_input):
    """Return (x, weight of x, first product, p, activation, weight of y, y) of all rows."""
    x, weight = a["x"][rows.home], a["weights"][rows.choice][:, None]
    p = a["p"][rows.owner] if "p" in a else None
    before, weight = (
        (weight, np.ones_like(weight)) if weigh_input else (np.ones_like(weight), weight)
    )
    h = np.einsum("nh,nhi->ni", before * x, a["w_in"][rows.place])
    h = h + a["b_in"][rows.place] if "b_in" in a else h
    act = activation.value(h, p)
    y = np.einsum("ni,nih->nh", weight * act, a["w_out"][rows.place])
    y = y + weight * a["b_out"][rows.place] if "b_out" in a else y
    return x, before, h, p, act, weight, y


def expert_layer_transpose(a, rows, activation, g, weigh_input=False):
    """Return the cotangents of `a` in `expert_layer` for the output's cotangent g [R, T, H]."""
    x, before, h, p, act, weight, _ = _rows_of_layer(a, rows, activation, weigh_input)
    g = g[rows.home]
    of_act = np.einsum("nh,nih->ni", g, a["w_out"][rows.place])
    of_weight = np.sum(act * of_act, axis=1)
    if "b_out" in a:
        of_weight = of_weight + np.sum(g * a["b_out"][rows.place], axis=1)
    of_h, of_p = activation.transpose(weight * of_act, h, p)
    of_input = np.einsum("ni,nhi->nh", of_h, a["w_in"][rows.place])
    if weigh_input:
        of_weight = np.sum(x * of_input, axis=1)
    terms = dict(
        x=(rows.home, before * of_input),
        weights=(rows.choice, of_weight),
        w_in=(rows.place, np.einsum("nh,ni->nhi", before * x, of_h)),
        w_out=(rows.place, np.einsum("ni,nh->nih", weight * act, g)),
        b_in=(rows.place, of_h),
        b_out=(rows.place, weight * g),
        p=(rows.owner, of_p),
    )
    found = {}
    for name, array in a.items():
        index, own = terms[name]
        found[name] = np.zeros(array.shape, type_of((own,)))
        np.add.at(found[name], index, own)
    return found
