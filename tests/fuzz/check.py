"""Run the fuzzer's programs with the package and with the oracle, and compare all results.

Moved data and exact sums are compared bit for bit.
"""

import dataclasses
import functools
import math

import cases
import format_oracle
import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle

import jax_moe_a2a as ma

from . import draw


def wire_of(name):
    return draw.FORMATS.get(name, name)


def exchange(program, group, a):
    """Return (Recv, sums) of one rank. `a` maps the names of inputs to arrays."""
    p = program
    leaves = [a[f"x{i}"] for i in range(len(p.x))]
    routed = draw.routed_by(p, group)
    fmt = p.format_with(a.get("scale"))
    if p.has_token_scales:
        fmt = ma.NvFp4(global_scale=a["scales"])
    options = dict(
        wire_dtype=wire_of(p.dispatch_wire),
        token_format=fmt,
        decode=p.decode,
        tail=p.tail,
    )
    destination = a["ids"]
    if p.is_routed_first:
        destination, routed = ma.route(destination, **routed), {}
    y = [a[f"y{i}"] for i in range(len(p.y))]
    y = y[0] if p.is_weighted else y
    addends = [a[name] for name in p.addends] or None
    if p.is_split:
        inflight = ma.dispatch_start(
            leaves, destination, a.get("topk_weights"), **harness.exchanging(routed, options)
        )
        inflight, y = ma.overlap(inflight, lambda y: y, y)
        recv = ma.dispatch_done(inflight)
    else:
        recv = ma.dispatch(
            leaves, destination, a.get("topk_weights"), **harness.exchanging(routed, options)
        )
    weights = a["y_weights"] if p.y_weights == "own" else p.y_weights
    options = dict(weights=weights, wire_dtype=wire_of(p.combine_wire))
    given = recv.routing if p.is_routed_first and p.y_weights != "recv" else recv
    if p.is_split:
        wire = dict(wire_dtype=options["wire_dtype"])
        sums = ma.combine_done(ma.combine_start(y, recv.routing, **wire))
    else:
        if addends is not None and p.is_weighted:
            (addends,) = addends
        sums = ma.combine(y, given, add=addends, **options)
    return recv, [sums] if p.is_weighted else sums


def of_one_rank(program, group):
    """Return a function (inputs, directions) -> dict of results and derivatives, of one rank."""
    p = program
    names = [name for name, _, _ in draw.outputs_of(p)]

    def run(args, directions):
        def of_floats(floats):
            recv, sums = exchange(p, group, {**args, **floats})
            outputs = {f"sum{i}": leaf for i, leaf in enumerate(sums)}
            outputs["weights"] = recv.weights
            if p.format is None or p.decode:
                outputs |= {f"rows{i}": leaf for i, leaf in enumerate(recv.rows)}
            results = {"recv": recv, "sums": sums, "row_experts": recv.row_experts}
            if p.has_load:
                results["load"] = ma.expert_load(recv)
            return {name: outputs[name] for name in names}, results

        floats = {name: args[name] for name in p.differentiated}
        if p.derivative == "jvp":
            _, tangents, results = jax.jvp(of_floats, (floats,), (directions,), has_aux=True)
            return {**results, "derivatives": tangents}
        if p.derivative == "vjp":
            _, vjp, results = jax.vjp(of_floats, floats, has_aux=True)
            return {**results, "derivatives": vjp(directions)[0]}
        return {**of_floats(floats)[1], "derivatives": {}}

    return run


def compiled(program):
    p = program
    batched = {n: p.batch > 0 and draw.axis_of(n) in p.batched for n in names_of(p)}
    directions = {None: {}, "jvp": {n: batched[n] for n in p.differentiated}}
    directions["vjp"] = {name: p.batch > 0 for name, _, _ in draw.outputs_of(p)}
    names = ["recv", "sums", "row_experts", "derivatives", *(["load"] * p.has_load)]
    inputs = batched, directions[p.derivative]
    fn = of_one_rank(p, p.place.group)
    fn = p.place.over_ranks(fn, inputs, dict.fromkeys(names, True))
    return p.place.compiled(fn, inputs, p.x64)


@functools.cache
def rounds_twice():
    """Return True if XLA rounds float64 to float32 and then to float16 (CPUs without float16)."""
    with jax.enable_x64(True):
        above_a_tie = jnp.full(8, 1 + 2.0**-11 + 2.0**-40, jnp.float64)
        return bool((jax.jit(lambda x: x.astype(jnp.float16))(above_a_tie) == 1).all())


def through_float16(x):
    return (x.astype(np.float32) if rounds_twice() else x).astype(np.float16).astype(np.float64)


def rounded_to(fmt, x, dtype):
    return format_oracle.decode(fmt, *format_oracle.encode(fmt, x), dtype).reshape(x.shape)


def names_of(program):
    p = program
    names = ["ids", *(f"x{i}" for i in range(len(p.x))), *p.differentiated]
    return names + ["scale"] * p.has_traced_scale + ["scales"] * p.has_token_scales


def run(program, given, fn):
    p = program
    args = dict(given.args)
    if p.has_traced_scale:
        args["scale"] = np.full(p.ranks, draw.TRACED_SCALE, np.float32)
    results = fn(args, given.directions)
    for b in range(max(1, p.batch)):
        element = functools.partial(element_of, p, b)
        all_of_batch = lambda tree: jax.tree.map(lambda x: x[:, b] if p.batch else x, tree)
        own = {name: element(name, array) for name, array in given.args.items()}
        if p.derivative == "vjp":
            directions = all_of_batch(given.directions)
        else:
            directions = {name: element(name, a) for name, a in given.directions.items()}
        expected = Expected(p, own, directions, given.routings[b])
        try:
            expected.check(**all_of_batch(results))
        except AssertionError as error:
            which = f"element {b} of the batch, " if p.batch else ""
            raise AssertionError(f"{which}{error}") from None


def element_of(program, b, name, array):
    return array[:, b] if draw.axis_of(name) in program.batched else array


@dataclasses.dataclass(frozen=True)
class Expected:
    program: draw.Program
    args: dict[str, np.ndarray]
    directions: dict[str, np.ndarray]
    routings: list[oracle.Routing]

    def each(self, fn, *arrays):
        """Join fn(*arrays, routing) of each domain or, if tokens are replicated, of each rank."""
        alone = len(self.routings) > 1 or self.program.replicated
        found = []
        for r, routing in enumerate(self.routings):
            own = [a[r : r + 1] if alone else a for a in arrays]
            found.append(fn(*own, routing))
        if isinstance(found[0], tuple):
            return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))
        return np.concatenate(found)

    def grouped(self, rows):
        """Return rows [R, C, ...], with zeros for unspecified rows after the last group."""
        if self.program.tail == "zero":
            return rows
        is_tail = self.routing.is_tail
        rows = np.array(rows)
        if rows.size:
            rows.reshape(*is_tail.shape, -1).view(np.uint8)[is_tail] = 0
        return rows

    @functools.cached_property
    def routing(self):
        fields = [field.name for field in dataclasses.fields(oracle.Routing)]
        joined = {f: np.concatenate([getattr(r, f) for r in self.routings]) for f in fields}
        return oracle.Routing(**joined)

    def moved(self, x):
        return self.each(oracle.dispatch, x)

    def weights_with_rows(self, topk_weights):
        weights = topk_weights.astype(draw.weights_dtype(self.program))
        return self.each(oracle.dispatch_choices, weights)

    def summed(self, pairs, wire, addend=None):
        """Return (sums, allowed difference) of pairs (rows, weights or None) and the addend."""
        p = self.program
        of_wire = None
        if wire in draw.FORMATS:
            fmt = draw.FORMATS[wire]

            def of_wire(x):
                return rounded_to(fmt, x, "float32")

        elif wire is not None and pairs[0][0].dtype.kind != "c":
            of_wire = cases.dtype(wire)
            is_exact = p.weights_are_powers or all(weights is None for _, weights in pairs)
            if pairs[0][0].dtype == np.float64 and of_wire == np.float16 and is_exact:
                of_wire = through_float16

        def of_domain(*arrays):
            *arrays, routing = arrays
            add = None if addend is None else arrays[-1]
            own = [
                (rows, None if given is None else arrays[len(pairs) + i])
                for i, (rows, (_, given)) in enumerate(zip(arrays, pairs))
            ]
            if p.hosts and not p.replicated:
                return oracle.combine_of_hosts(own, routing, p.hosts, of_wire, add)
            return oracle.combine_pairs(own, routing, of_wire, add)

        rows = [rows for rows, _ in pairs]
        weights = [rows[0] if w is None else w for (rows, w) in pairs]
        addends = [] if addend is None else [addend]
        sums, slack = self.each(of_domain, *rows, *weights, *addends)
        return sums, slack * (not p.weights_are_powers)

    @functools.cached_property
    def weights(self):
        """Return the router weight of each row, [R, C], or None without router weights."""
        if not self.program.topk_weights:
            return None
        return self.weights_with_rows(self.args["topk_weights"])

    @property
    def combine_weights(self):
        if not self.program.is_weighted:
            return None
        return self.args["y_weights"] if self.program.y_weights == "own" else self.weights

    def check(self, recv, sums, row_experts, derivatives, load=None):
        self.check_recv(recv)
        harness.assert_same_bytes(row_experts, oracle.row_experts(self.routing), "row_experts")
        if load is not None:
            check_load(load, self.routings)
        p, weights = self.program, self.combine_weights
        for i, actual in enumerate(sums):
            pairs, addend = [(self.args[f"y{i}"], weights)], self.args.get(f"add{i}")
            expected = self.summed(pairs, p.combine_wire, addend)
            harness.assert_sums_agree(actual, *expected, f"sum {i}")
        if p.derivative == "jvp":
            self.check_tangents(derivatives)
        elif p.derivative == "vjp":
            self.check_cotangents(derivatives)

    def check_recv(self, recv):
        p, same = self.program, harness.assert_same_bytes
        # Use Python integers, because no numpy dtype has both -1 and all numbers of uint64.
        is_invalid = [
            [not -1 <= int(i) < p.num_experts for i in own.ravel()] for own in self.args["ids"]
        ]
        num_invalid = np.array([sum(own) for own in is_invalid], np.int32)
        expected = dataclasses.replace(self.routing, num_invalid=num_invalid)
        experts = np.arange(p.num_experts, dtype=np.int32).reshape(p.ranks, -1)
        harness.assert_rows_are_described(recv, expected, experts)
        if not p.hosts or p.replicated:
            harness.assert_routing_is(recv.routing, expected)
        for i, actual in enumerate(recv.rows):
            self.check_rows(actual, self.args[f"x{i}"], f"rows {i}")
        if p.has_token_scales and not p.decode:
            own = self.moved(self.args["scales"])
            same(self.grouped(recv.global_scales), own, "global_scales")
        else:
            assert recv.global_scales is None
        if self.weights is None:
            assert recv.weights is None
        else:
            same(self.grouped(recv.weights), self.weights, "weights")

    def check_rows(self, actual, x, what):
        p = self.program
        if p.format is None:
            harness.assert_same_bytes(self.grouped(actual), self.moved(x), what)
            return
        fmt = p.format_with(draw.TRACED_SCALE)
        if p.has_token_scales:
            scales = self.args["scales"]
            parts = format_oracle.encode_tokens(x, scales)
            decoded = self.moved(format_oracle.decode_tokens(*parts, scales, x.dtype.name))
            parts = [self.moved(part) for part in parts]
        else:
            parts = [self.moved(part) for part in format_oracle.encode(fmt, x)]
            decoded = format_oracle.decode(fmt, *parts, x.dtype.name)
        if p.decode:
            harness.assert_same_bytes(self.grouped(actual), decoded.reshape(actual.shape), what)
            return
        for part, of_oracle in zip(actual, parts, strict=True):
            harness.assert_same_bytes(self.grouped(part), of_oracle, what)

    def check_tangents(self, tangents):
        p, d = self.program, self.directions
        of_weights = self.weights
        if p.topk_weights:
            of_weights = self.weights_with_rows(d["topk_weights"])
            actual = self.grouped(tangents["weights"])
            harness.assert_same_bytes(actual, of_weights, "tangent of weights")
        for name, actual in tangents.items():
            if name.startswith("rows"):
                expected = self.moved(d[f"x{name[4:]}"])
                harness.assert_same_bytes(self.grouped(actual), expected, f"tangent of {name}")
        for i in range(len(p.y)):
            pairs = [(d[f"y{i}"], self.combine_weights)]
            if p.is_weighted:
                of_weights = d["y_weights"] if p.y_weights == "own" else of_weights
                pairs.append((self.args[f"y{i}"], of_weights))
            expected = self.summed(pairs, p.combine_wire, d.get(f"add{i}"))
            harness.assert_sums_agree(tangents[f"sum{i}"], *expected, f"tangent of sum {i}")

    def check_cotangents(self, cotangents):
        p, d = self.program, self.directions

        def transposed(g, y, weights, routing):
            return oracle.combine_transpose(g, y, routing, weights)

        for name, actual in cotangents.items():
            if name.startswith("x"):
                self.check_cotangent_of_tokens(name, actual)
        of_row_weights, slack = None, 0
        for i in range(len(p.y)):
            g, y = d[f"sum{i}"], self.args[f"y{i}"]
            if p.addends:
                harness.assert_same_bytes(cotangents[f"add{i}"], g, f"cotangent of add{i}")
            actual, what = cotangents[f"y{i}"], f"cotangent of y{i}"
            if not p.is_weighted:
                harness.assert_same_bytes(actual, self.moved(g), what)
                continue
            of_y, of_row_weights = self.each(transposed, g, y, self.combine_weights)
            harness.assert_same_bytes(actual, of_y, what)
            ones = np.ones(y.shape[:2], np.float32)
            _, magnitudes = self.each(transposed, np.abs(g), np.abs(y), ones)
            slack = (2 + math.prod(y.shape[2:])) * oracle.epsilon(magnitudes.dtype) * magnitudes
        if p.y_weights == "own":
            self.check_close(cotangents["y_weights"], of_row_weights, slack, "y_weights")
            of_row_weights = None
        if p.topk_weights:
            self.check_cotangents_of_router_weights(cotangents, of_row_weights, slack)

    def check_cotangent_of_tokens(self, name, actual):
        p, rows = self.program, self.directions.get(f"rows{name[1:]}")
        what = f"cotangent of {name}"
        if rows is None:  # quantized rows have no cotangents
            assert not np.asarray(actual, np.float32).any(), what
            return
        sums, _ = self.summed([(rows, None)], p.dispatch_wire)
        if sums.dtype.kind == "c":
            actual, sums = (a.view(a.real.dtype) for a in (actual, sums))
        harness.assert_sums_agree(actual, sums, np.zeros(sums.shape), what)

    def check_cotangents_of_router_weights(self, cotangents, of_row_weights, slack):
        total = self.directions["weights"]
        if of_row_weights is not None:
            is_row = self.routing.row_token >= 0
            added = of_row_weights.astype(total.dtype)
            total = np.where(is_row, total, 0) + added
            slack = slack + oracle.epsilon(total.dtype) * (np.abs(total) + np.abs(added))
            slack = self.each(oracle.combine_choices, slack)
        total = self.each(oracle.combine_choices, total)
        own = 0 if of_row_weights is None else slack
        self.check_close(cotangents["topk_weights"], total, own, "topk_weights")

    def check_close(self, actual, expected, slack, name):
        """Allow a difference of `slack` and, if `slack` is not 0, one more rounding."""
        rounded = expected.astype(actual.dtype)
        slack = np.broadcast_to(np.asarray(slack, np.float64), rounded.shape)
        at_most = slack + (slack > 0) * oracle.epsilon(actual.dtype) * np.abs(expected)
        harness.assert_sums_agree(actual, rounded, at_most, f"cotangent of {name}")


def check_load(load, routings):
    names = "rows_per_expert", "rows_per_rank", "dropped_per_rank"
    for name, counts in zip(names, oracle.expert_load(routings), strict=True):
        actual = getattr(load, name)
        counts = np.broadcast_to(counts, (actual.shape[0], *counts.shape))
        harness.assert_same_bytes(actual, counts, f"expert_load: {name}")
