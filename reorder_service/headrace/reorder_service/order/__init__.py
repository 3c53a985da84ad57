"""The global order: which sample stands at which place of a job, as a pure function of data, mixture and seed."""
