"""The simulator: times a schedule with the microbatches of a plan, and adds up the memory that its stages hold."""
