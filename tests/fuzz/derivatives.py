"""Compute first and second derivatives of a function of a dict of float arrays."""

import jax
import oracle

FIRST = ("jvp", "vjp")
# Ways to compute H v: H is the Hessian of <g, y> for the cotangent g of y, and v are tangents.
SECOND = ("forward over reverse", "reverse over forward", "reverse over reverse")


def derived(how, fn):
    """Return a function that maps (floats, others, directions) to a dict of results.

    Args:
      how: one of `FIRST` or `SECOND`, or None.
      fn: maps (floats, others) to (float array, dict of other results).

    The directions are the cotangent "g" and, for each float, the tangent "v.NAME". The results are
    "y", "t" (the tangent of y), "d.NAME" (the cotangent of a float), "dd.NAME" (its part of H v),
    and the other results of `fn`.
    """

    def run(floats, others, directions):
        of_floats = lambda floats: fn(floats, others)
        y_of = lambda floats: of_floats(floats)[0]
        g = directions.get("g")
        v = {name[2:]: x for name, x in directions.items() if name.startswith("v.")}
        gradient = lambda floats: jax.vjp(y_of, floats)[1](g)[0]
        if how is None:
            y, aux = of_floats(floats)
            return {"y": y, **aux}
        if how == "jvp":
            y, t, aux = jax.jvp(of_floats, (floats,), (v,), has_aux=True)
            return {"y": y, "t": t, **aux}
        if how == "vjp":
            y, vjp, aux = jax.vjp(of_floats, floats, has_aux=True)
            return {"y": y, **aux, **named("d", vjp(g)[0])}
        if how == "forward over reverse":
            d, dd = jax.jvp(gradient, (floats,), (v,))
            return {**named("d", d), **named("dd", dd)}
        if how == "reverse over forward":
            t, vjp = jax.vjp(lambda floats: jax.jvp(y_of, (floats,), (v,))[1], floats)
            return {"t": t, **named("dd", vjp(g)[0])}
        d, vjp = jax.vjp(gradient, floats)
        return {**named("d", d), **named("dd", vjp(v)[0])}

    return run


def named(kind, tree):
    return {f"{kind}.{name}": x for name, x in tree.items()}


def results_of(how, names):
    d, dd = ([f"{kind}.{name}" for name in names] for kind in ("d", "dd"))
    return {
        None: ["y"],
        "jvp": ["y", "t"],
        "vjp": ["y", *d],
        "forward over reverse": [*d, *dd],
        "reverse over forward": ["t", *dd],
        "reverse over reverse": [*d, *dd],
    }[how]


def directions_of(how, names):
    tangents = [f"v.{name}" for name in names]
    return {None: [], "jvp": tangents, "vjp": ["g"]}.get(how, ["g", *tangents])


def expected(how, value, gradient, floats, tangents):
    """Return the expected results of `derived` by name, computed with numpy.

    Args:
      value: maps floats to {"y": array}.
      gradient: maps floats to their cotangents.
      tangents: tangents of the floats, if `how` needs them.
    """
    found = value(floats)
    wanted = results_of(how, list(floats))
    if "t" in wanted:
        found["t"] = oracle.derivative(value, floats, tangents)["y"]
    if how in ("vjp", *SECOND):
        found |= named("d", gradient(floats))
    if how in SECOND:
        found |= named("dd", oracle.derivative(gradient, floats, tangents))
    return {name: found[name] for name in wanted}
