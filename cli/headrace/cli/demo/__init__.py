"""`headrace demo`: runs a whole training job on one machine."""
