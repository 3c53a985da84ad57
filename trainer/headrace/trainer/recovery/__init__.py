"""Training that survives lost nodes: the others form new pipelines from templates, and copy layers from nodes that have them."""
