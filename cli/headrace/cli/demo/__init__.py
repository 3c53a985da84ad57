"""`headrace demo`: the whole job on one machine."""
