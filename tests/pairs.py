"""Check in jaxprs that every start of an exchange has one done, and that only this done uses the
start's results."""

import harness
from jax.extend.core import Literal

STARTS = {
    "moe_a2a_dispatch_start": "moe_a2a_dispatch_done",
    "moe_a2a_combine_start": "moe_a2a_combine_done",
}
DONES = {done: start for start, done in STARTS.items()}
# JAX's vmap and shard_map insert these between a start and its done.
PASSING = {"reshape", "transpose", "squeeze", "broadcast_in_dim", "pvary", "pcast", "copy"}


def subjaxprs(jaxpr):
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    yield jaxpr
    for eqn in jaxpr.eqns:
        for nested in harness.nested_jaxprs(eqn):
            yield from subjaxprs(nested)


def num_pairs(jaxpr):
    """Return the number of starts by name; fail if `problems` finds any."""
    found = problems(jaxpr)
    assert not found, "\n".join(found)
    counts = harness.count_primitives(jaxpr)
    return {name: n for name, n in counts.items() if f"moe_a2a_{name}" in STARTS}


def problems(jaxpr):
    """Return a sentence for each wrong use of a start or done in a program."""
    return [problem for each in subjaxprs(jaxpr) for problem in problems_of_one(each)]


def problems_of_one(jaxpr):
    """Check a jaxpr without its nested jaxprs, which may not use the results of its starts."""
    found = []
    origin = {}  # variable -> (index of the start's equation, index of its result)
    dones = {}  # index of a start's equation -> number of its dones

    def origins(atoms):
        return [None if isinstance(atom, Literal) else origin.get(atom) for atom in atoms]

    for number, eqn in enumerate(jaxpr.eqns):
        name, sources = eqn.primitive.name, origins(eqn.invars)
        if name in STARTS:
            if any(source is not None for source in sources):
                found.append(f"{name} ({number}) starts with an array in flight")
            origin.update({var: (number, i) for i, var in enumerate(eqn.outvars)})
            dones[number] = 0
        elif name == "moe_a2a_tie":
            origin.update({v: s for v, s in zip(eqn.outvars, sources) if s is not None})
        elif name in PASSING and sources[0] is not None:
            origin[eqn.outvars[0]] = sources[0]
        elif name in DONES:
            start = None if sources[0] is None else sources[0][0]
            if start is None or jaxpr.eqns[start].primitive.name != DONES[name]:
                found.append(f"{name} ({number}) has no start")
                continue
            dones[start] += 1
            num_flying = len(jaxpr.eqns[start].outvars)
            expected = [(start, i) for i in range(num_flying)]
            if sources[:num_flying] != expected:
                found.append(f"{name} ({number}) mixes arrays in flight: {sources}")
            if any(source is not None for source in sources[num_flying:]):
                found.append(f"{name} ({number}) reads an array in flight")
        elif any(source is not None for source in sources):
            found.append(f"{name} ({number}) uses an array in flight")
    found += [
        f"{jaxpr.eqns[start].primitive.name} ({start}) is done {times} times"
        for start, times in dones.items()
        if times != 1
    ]
    if any(source is not None for source in origins(jaxpr.outvars)):
        found.append("an array in flight leaves its function")
    return found
