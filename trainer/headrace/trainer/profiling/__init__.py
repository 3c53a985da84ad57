"""Times of a model's layers on this machine, one kind of layer at a time, without a job."""
