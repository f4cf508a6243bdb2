"""Define the primitives: abstract values, derivatives, batching, dead code, and their registration.

Given a routing (integers), a dispatch and a combine are linear and each is the other's transpose. A
weighted combine is bilinear in (rows, weights), and a weighted dispatch is what it transposes to.
One record describes each of them (``exchange.Exchange``), and one set of rules (``rules``) reads
the records. A family of primitives has a module, which registers it.
"""
