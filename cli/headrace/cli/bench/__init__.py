"""`headrace bench`: what this machine can do."""
