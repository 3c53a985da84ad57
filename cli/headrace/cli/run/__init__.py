"""Commands that run a service or a trainer, and the processes that commands start."""
