"""Training that goes on without the nodes that are lost: pipelines from templates, layers copied from whoever still has them."""
