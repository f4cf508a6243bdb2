"""Define the primitives of the exchange: checks, binding, rules of transforms, and both paths.

Given a routing (integers), dispatch and combine are linear, and each is the transpose of the other.
A weighted combine is bilinear in (rows, weights), and a weighted dispatch is its transpose. A
record describes each primitive (``record.Record``), and one set of rules (``rules``) reads all
records. Each family of primitives has a module, which registers the family.
"""
