"""`headrace orchestrate`: which GPUs each unit of a model gets, before anything is trained."""
